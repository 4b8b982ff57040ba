"""Named TPU slices: how they are written, what they consist of, how the compiler is told about them."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from overlapfx import chips
from overlapfx.plan import cost
from overlapfx.plan.placement import Placement, place
from overlapfx.plan.torus import Coord, Torus

INSTALL_HINT = "pip install 'overlapfx[plan]'"

# What libtpu would otherwise ask the cloud's metadata server; any valid accelerator does, since none is present.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
    # Without it the compiler serves one process at a time, as if it held the chips.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_NAME = re.compile(r"([a-z0-9]+):(\d+(?:x\d+)*)(?:,slices=(\d+))?$")


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of TPU as slices name it.

    `named` lists the usual shapes, smallest first; with `cubes`, any box of multiples of four up to `max_chips` chips
    is legal too. `config_name` makes one device of a chip's two cores. `permute_wrap` is False where the compiler
    turns a permute across a wrap-around link into a blocking one.
    """

    name: str
    chip: chips.Chip
    named: tuple[str, ...]
    max_chips: int
    cubes: bool
    config_name: str | None = None
    permute_wrap: bool = True


_SMALL_3D = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
_ALL_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Family("v4", chips.TPU_V4, _SMALL_3D, 4096, True, "megacore"),
        # Found by compiling with libtpu 0.0.52: one pair across the wrap-around link makes the whole permute blocking.
        Family("v5e", chips.TPU_V5E, _ALL_2D, 256, False, permute_wrap=False),
        Family("v5p", chips.TPU_V5P, (*_SMALL_3D, "16x16x24"), 6144, True),
        Family("v6e", chips.TPU_V6E, _ALL_2D, 256, False),
        Family("tpu7x", chips.TPU_7X, (*_SMALL_3D, "16x24x24"), 9216, True),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice by its name: `shape` in chips, `num_slices` equal slices joined by the data-centre network."""

    family: Family
    shape: tuple[int, ...]
    num_slices: int = 1

    def __str__(self) -> str:
        joined = f",slices={self.num_slices}" if self.num_slices > 1 else ""
        return f"{self.family.name}:{'x'.join(map(str, self.shape))}{joined}"

    @property
    def chip(self) -> chips.Chip:
        """Figures of one chip."""
        return self.family.chip

    @property
    def torus(self) -> Torus:
        """The network inside one slice."""
        return Torus.for_chip(self.chip, self.shape, self.family.permute_wrap)

    @property
    def num_chips(self) -> int:
        """Chips in all slices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def num_devices(self) -> int:
        """JAX devices in all slices."""
        return self.num_chips * self.chip.devices_per_chip


def parse_slice(text: str) -> Slice:
    """Read `v4:8x8x8`, `v5e:16x16` or `v5p:4x4x4,slices=2`. Raises ValueError that lists the legal names."""
    match = _NAME.match(text.strip())
    if match is None or match[1] not in FAMILIES:
        raise ValueError(f"unknown topology {text!r}; use one of {_legal(FAMILIES.values())}.")
    family = FAMILIES[match[1]]
    shape = tuple(int(size) for size in match[2].split("x"))
    num_slices = int(match[3] or 1)
    cubes = family.cubes and len(shape) == 3 and all(size > 0 and size % 4 == 0 for size in shape)
    if (match[2] not in family.named and not cubes) or math.prod(shape) > family.max_chips or num_slices < 1:
        raise ValueError(f"no slice {text!r} exists; use one of {_legal([family])}.")
    return Slice(family, shape, num_slices)


def _legal(families: Iterable[Family]) -> str:
    """The legal names, family by family, in one line."""
    parts = []
    for family in families:
        cubes = f" or any box of multiples of 4 up to {family.max_chips} chips" if family.cubes else ""
        parts.append(f"{family.name}: {', '.join(family.named)}{cubes}")
    return f"{'; '.join(parts)}; several slices are written like {FAMILIES['v4'].name}:4x4x4,slices=2"


def prepare_environment() -> None:
    """Let the TPU compiler start on a machine without TPUs; best called before JAX is imported, harmless later.

    Variables that are set already are kept. JAX itself is told to run on the CPU unless JAX_PLATFORMS says otherwise.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "JAX_PLATFORMS" not in os.environ:
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules and sys.modules["jax"].config.jax_platforms is None:
            sys.modules["jax"].config.update("jax_platforms", "cpu")


def require_compiler() -> None:
    """Raises ValueError that says how to install the TPU compiler if it is missing."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"compiling for a TPU slice needs the libtpu package, which is not installed; run {INSTALL_HINT} on x86-64 "
            f"Linux."
        )


def describe(wanted: Slice) -> tuple[Any, ...]:
    """The device descriptions of all slices, without any device present. Raises ValueError if libtpu refuses."""
    require_compiler()
    prepare_environment()
    # Imported here so that the environment is set before JAX looks at it.
    import jax
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if wanted.family.config_name:
        options["chip_config_name"] = wanted.family.config_name
    if wanted.num_slices > 1:
        options["num_slices"] = wanted.num_slices
    if math.prod(wanted.shape) == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    name = f"{wanted.family.name}:{'x'.join(map(str, wanted.shape))}"
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"libtpu does not know topology {wanted} ({str(error).splitlines()[0]}); use one of "
            f"{_legal([wanted.family])}."
        ) from error
    return tuple(topology.devices)


def device_coord(device: Any, torus: Torus) -> Coord:
    """Position of a described device on the torus, with its core where a chip holds two devices."""
    chip = tuple(int(number) for number in device.coords[: len(torus.shape)])
    return chip if torus.cores == 1 else (*chip, int(device.core_on_chip))


def _example(wanted: Slice, axes: Mapping[str, int]) -> str:
    """A mesh that fills the slices and keeps the innermost axis, if there is one."""
    inner = list(axes)[-1]
    rest, left_over = divmod(wanted.num_devices, axes[inner] * wanted.num_slices)
    if left_over:
        return ""
    replica = f"replica={wanted.num_slices}, " if wanted.num_slices > 1 else ""
    return f", such as {replica}y={rest}, {inner}={axes[inner]}"


def make_slice_mesh(wanted: Slice, axes: Mapping[str, int], torus: Torus | None = None) -> tuple[Any, Placement]:
    """A `jax.sharding.Mesh` of `axes` (outermost first) over the slice, with the placement that chose its order.

    `torus` is the network of one slice, if it is not the family's own.

    Several slices are told apart by the first axis, whose size must be a multiple of their number; the placement
    describes one of them, whose order they share. Raises ValueError for a mesh that does not fill the slices.
    """
    num_devices = math.prod(axes.values())
    if num_devices != wanted.num_devices:
        mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"mesh {mesh} has {num_devices} devices but {wanted} has {wanted.num_devices}; choose axis sizes whose "
            f"product is that number{_example(wanted, axes)}."
        )
    inner = dict(axes)
    outer = next(iter(axes))
    if wanted.num_slices > 1 and axes[outer] % wanted.num_slices:
        raise ValueError(
            f"topology {wanted} has {wanted.num_slices} slices but mesh axis {outer}={axes[outer]} is no multiple of "
            f"that; put an axis of that size first, such as replica={wanted.num_slices}."
        )
    inner[outer] = axes[outer] // wanted.num_slices
    placement = place(wanted.torus if torus is None else torus, inner)
    devices = describe(wanted)

    import jax
    import numpy as np

    by_place = {(getattr(d, "slice_index", None) or 0, device_coord(d, placement.torus)): d for d in devices}
    ordered = [by_place[number, coord] for number in range(wanted.num_slices) for coord in placement.order]
    grid = np.array(ordered, dtype=object).reshape(tuple(axes.values()))
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.sharding.Mesh(grid, tuple(axes), axis_types=auto), placement


def environment(wanted: Slice, placement: Placement) -> cost.Environment:
    """What the gate prices einsums for: this chip, the axes of a mesh from `make_slice_mesh` on its links."""
    axes = {r.axis: cost.AxisLinks(r.native_links, r.ring_load, r.max_hops, r.members) for r in placement.reports}
    return cost.Environment(wanted.chip, axes)
