"""The points of a sweep: every combination of the values asked for, legal or refused with the reason."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.config_file import load_config
from overlapfx.config import Config, MeshConfig, from_config_dict, to_dict

ALL = "all"
MODE = "overlap.mode"
_MESH_FIELDS = ("mesh.replica", "mesh.y", "mesh.x")
_MESH = re.compile(r"(?:(\d+)x)?(\d+)x(\d+)$")


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to sweep over: `name` is a slice such as v4:4x4x4, or says what this machine has."""

    name: str
    num_devices: int
    num_slices: int = 1


@dataclasses.dataclass(frozen=True)
class Point:
    """One combination. `settings` holds (field, text) of what was given, mesh apart, `swept` those with several values.

    `config` is None where the checks of the config refuse it; `why` then says so in a sentence.
    """

    target: Target
    mesh: MeshConfig
    settings: tuple[tuple[str, str], ...]
    swept: tuple[tuple[str, str], ...]
    config: Config | None
    why: str = ""

    def overrides(self) -> list[str]:
        """What follows --config. on the command line of this very point."""
        fields = [("mesh.y", str(self.mesh.y)), ("mesh.x", str(self.mesh.x))]
        if self.mesh.replica > 1:
            fields.append(("mesh.replica", str(self.mesh.replica)))
        return [f"{name}={text}" for name, text in (*fields, *self.settings)]

    def key(self, basis: Mapping[str, Any]) -> str:
        """Identifies the result: the config, the devices, everything else that decides it, which is the `basis`."""
        assert self.config is not None
        decides = {"config": to_dict(self.config), "target": self.target.name, "basis": basis}
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        settings = [text if name == MODE else f"{name}={text}" for name, text in self.swept]
        return " ".join((self.target.name, mesh_text(self.mesh), *settings))


def mesh_text(mesh: MeshConfig) -> str:
    """The sizes of a mesh by axis: `y=16 x=4`."""
    return (f"replica={mesh.replica} " if mesh.replica > 1 else "") + f"y={mesh.y} x={mesh.x}"


def expand(config_file: str, overrides: Sequence[str], meshes: str, targets: Sequence[Target]) -> list[Point]:
    """Every combination of targets, meshes and field values, in this order; equal ones once.

    overrides: "overlap.unroll=1,2", one per field (see `split_values`). meshes: "all", or YxX and REPLICAxYxX separated
    by commas. Raises ValueError for what is wrong with any mesh: an unknown field, a value that no combination allows.
    """
    fields = _fields(overrides)
    asked = None if meshes == ALL else [_parse_mesh(text) for text in meshes.split(",")]
    settings = [tuple(zip(fields, values, strict=True)) for values in itertools.product(*fields.values())]
    _check_values(config_file, fields, settings)
    swept = {name for name, values in fields.items() if len(values) > 1}
    points: dict[tuple[Any, ...], Point] = {}
    for target in targets:
        shapes: dict[MeshConfig, list[tuple[tuple[str, str], ...]]] = {}
        for chosen in settings:
            replica = _replicas(config_file, chosen, target)
            for shape in _all_shapes(replica, target) if asked is None else _filled_in(asked, replica):
                shapes.setdefault(shape, []).append(chosen)
        for shape, chosen_here in shapes.items():
            for chosen in chosen_here:
                point = _point(config_file, target, shape, chosen, swept)
                points.setdefault((target, shape, chosen), point)
    return list(points.values())


def split_values(text: str) -> tuple[str, ...]:
    """The values in one override: separated by commas, or a JSON list where commas are part of them.

    A JSON object is one value. Raises ValueError for a broken list or an empty value between commas.
    """
    if text.startswith("{"):
        return (text,)
    if text.startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{text!r} is not a JSON list: {error}; write [VALUE, VALUE].") from error
        return tuple(dict.fromkeys(value if isinstance(value, str) else json.dumps(value) for value in values))
    values = [value.strip() for value in text.split(",")] if "," in text else [text]
    if "" in values and len(values) > 1:
        raise ValueError(f"{text!r} has an empty value between its commas; leave it out, or write a JSON list.")
    return tuple(dict.fromkeys(values))


def _fields(overrides: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of every field given; mesh.y and mesh.x are --mesh's to set."""
    fields: dict[str, tuple[str, ...]] = {}
    for override in overrides:
        name, _, text = override.partition("=")
        if name in ("mesh.y", "mesh.x"):
            raise ValueError(f"--config.{name}={text} contradicts --mesh, which sets it; write --mesh=YxX instead.")
        if name in fields:
            raise ValueError(f"{name} is given twice; give it once, with its values separated by commas.")
        fields[name] = split_values(text)
        if not fields[name]:
            raise ValueError(f"--config.{name}={text} has no value; give one at least.")
    return fields


def _parse_mesh(text: str) -> MeshConfig:
    match = _MESH.match(text.strip())
    if match is None or "0" in (sizes := match.groups("1")):
        raise ValueError(f"--mesh has {text.strip()!r}; write {ALL}, or YxX such as 16x4, or REPLICAxYxX.")
    replica, y, x = map(int, sizes)
    return MeshConfig(y=y, x=x, replica=replica)


def _load(config_file: str, settings: Sequence[tuple[str, str]], mesh: MeshConfig) -> Config:
    sizes = zip(_MESH_FIELDS, map(str, (mesh.replica, mesh.y, mesh.x)), strict=True)
    return from_config_dict(load_config(config_file, [f"{name}={text}" for name, text in (*settings, *sizes)]))


def _check_values(
    config_file: str, fields: Mapping[str, tuple[str, ...]], settings: Sequence[tuple[tuple[str, str], ...]]
) -> None:
    """Raises ValueError for a value that no combination allows even on one device: a slip, not a limit of a mesh."""
    reasons: dict[tuple[str, str], str] = {}
    legal: set[tuple[str, str]] = set()
    for chosen in settings:
        try:
            _load(config_file, chosen, MeshConfig(y=1, x=1))
            legal.update(chosen)
        except ValueError as error:
            reasons |= {pair: str(error) for pair in chosen if pair not in reasons}
            if not chosen:
                raise
    for name, values in fields.items():
        for value in values:
            if (name, value) not in legal:
                raise ValueError(reasons[name, value])


def _replicas(config_file: str, settings: Sequence[tuple[str, str]], target: Target) -> int:
    """The config's own number of replicas, else one per slice."""
    replica = int(dict(settings).get("mesh.replica") or load_config(config_file).mesh.replica)
    return replica if replica > 1 else target.num_slices


def _all_shapes(replica: int, target: Target) -> Iterator[MeshConfig]:
    """Every (y, x) that fills the target, the largest y first."""
    inner = max(1, target.num_devices // replica)
    for x in range(1, inner + 1):
        if inner % x == 0:
            yield MeshConfig(y=inner // x, x=x, replica=replica)


def _filled_in(asked: Sequence[MeshConfig], replica: int) -> Iterator[MeshConfig]:
    for shape in asked:
        yield shape if shape.replica > 1 else dataclasses.replace(shape, replica=replica)


def _point(
    config_file: str, target: Target, mesh: MeshConfig, settings: tuple[tuple[str, str], ...], swept: set[str]
) -> Point:
    """The checked point."""
    own = tuple((name, text) for name, text in settings if name != "mesh.replica")
    varied = tuple((name, text) for name, text in own if name in swept)
    why = ""
    if mesh.num_devices != target.num_devices:
        why = f"mesh {mesh_text(mesh)} needs {mesh.num_devices} devices but {target.name} has {target.num_devices}."
    elif mesh.replica % target.num_slices:
        why = f"mesh.replica is {mesh.replica} but {target.name} has {target.num_slices} slices; use a multiple of it."
    try:
        config = None if why else _load(config_file, settings, mesh)
    except ValueError as error:
        config, why = None, str(error)
    return Point(target, mesh, own, varied, config, why)
