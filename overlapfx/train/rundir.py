"""The directory of one training run: what is in it, who may write to it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from overlapfx.train.directories import make_directory, take_lock
from overlapfx.train.watchdog import STACKS

_LOCK = ".lock"
_CONFIG = "config.json"
_VERSIONS = "versions.json"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "tensorflow-datasets")
# What a resumed run may change, since it alters neither the model nor what is learned from which data.
_MAY_CHANGE = (
    "mesh",
    "overlap",
    "sample",
    "data.num_workers",
    "train.log_every",
    "train.step_timeout_s",
    "train.max_skipped_steps",
)
_MAY_GROW = ("train.num_steps",)


class RunDir:
    """An open run directory, locked against other runs until `close`.

    It holds config.json (resolved configuration), versions.json, metrics.jsonl, tb/ (TensorBoard), checkpoints/ and, at
    the end, report.png. A missing or empty directory starts a run. One that holds a run is resumed if its configuration
    agrees. Fields in which a resumed run may differ are mesh.*, overlap.*, sample.*, data.num_workers, train.log_every,
    train.step_timeout_s, train.max_skipped_steps, and train.num_steps upwards; the earlier configuration is then kept
    as config.1.json, config.2.json, ... in order of age, and `notes` says what changed. Earlier versions.json are kept
    likewise. Whatever is written lies inside: a link inside that leads out is refused.

    Args:
      path: the directory.
      config: the resolved configuration: a dataclass or mapping of strings, numbers, booleans, None, lists and the
        like.
      primary: False on all processes of a job but one, which only learn the paths: nothing is checked, written or
        locked.

    Raises:
      ValueError: the directory is in use by another run, holds something else, holds a run whose configuration
        disagrees, holds a link that leads out of it, or cannot be written to.
    """

    def __init__(self, path: str | pathlib.Path, config: Any, *, primary: bool = True):
        self.path = pathlib.Path(path)
        self.config_file = self.path / _CONFIG
        self.metrics_file = self.path / "metrics.jsonl"
        self.tensorboard_dir = self.path / "tb"
        self.checkpoint_dir = self.path / "checkpoints"
        self.report_file = self.path / "report.png"
        self.resumed = False
        self.notes: tuple[str, ...] = ()
        self._lock: TextIO | None = None
        if not primary:
            return
        with contextlib.ExitStack() as undo, _usable(self.path):
            _refuse_foreign(self.path)
            make_directory(self.path, "The run directory", "choose another one with --run_dir")
            self._lock = take_lock(self.path / _LOCK, f"The run directory {self.path}")
            undo.callback(self.close)  # a refused directory must not stay locked
            _refuse_links(self.path)
            self._open(to_plain(config))
            undo.pop_all()

    def _open(self, config: dict[str, Any]) -> None:
        notes = []
        self.resumed = self.config_file.exists()
        if self.resumed:
            changes = _differences(_read_json(self.config_file), config)
            refused = [str(change) for change in changes if not change.is_allowed()]
            if refused:
                raise ValueError(
                    f"The run directory {self.path} was made with another configuration ({'; '.join(refused)}); "
                    "set this back or choose a new directory."
                )
            notes += [f"Resuming with a changed configuration: {change}." for change in changes]
        kept = _write_versioned(self.config_file, config)
        if kept is not None:
            notes.append(f"The earlier configuration is kept in {kept.name}.")
        stacks = sorted(path.name for path in self.path.glob(STACKS.format(process="*")) if path.stat().st_size)
        if stacks:
            notes.append(f"The watchdog ended an earlier attempt; where it hung is in {', '.join(stacks)}.")
        _write_versioned(self.path / _VERSIONS, versions())
        self.notes = tuple(notes)

    def close(self) -> None:
        """Unlocks the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class _Change:
    """A configuration field (dotted name) whose value differs from the one that the run was started with."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = ("absent" if value is _ABSENT else json.dumps(value) for value in (self.old, self.new))
        rule = "" if self.is_allowed() or self.name not in _MAY_GROW else ", but may only grow"
        return f"{self.name} was {old}, is {new}{rule}"

    def is_allowed(self) -> bool:
        if any(self.name == field or self.name.startswith(field + ".") for field in _MAY_CHANGE):
            return True
        return self.name in _MAY_GROW and _ABSENT not in (self.old, self.new) and self.new > self.old


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[_Change]:
    old_flat, new_flat = _flatten(old), _flatten(new)
    changes = [
        _Change(name, old_flat.get(name, _ABSENT), new_flat.get(name, _ABSENT))
        for name in sorted(old_flat.keys() | new_flat.keys())
    ]
    return [change for change in changes if change.old != change.new]


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_plain(value: Any) -> Any:
    """Dataclasses and mappings become dictionaries, sequences lists; strings, numbers, booleans and None stay.

    Raises:
      TypeError: anything else, since it has no JSON form that can be compared.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"A configuration holds {value!r} of type {type(value).__name__}, which JSON has no form for.")


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on; None where a package is not installed or the code is not in git."""
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("overlapfx", *_PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["commit"] = _commit()
    return found


def _commit() -> str | None:
    """The commit of the checkout this file is in, marked if files differ from it."""
    here = pathlib.Path(__file__)

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here.parent), *args], capture_output=True, text=True, check=False)
        except FileNotFoundError:  # no git on this machine
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside somebody else's repository, for example in a virtual environment.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit} with uncommitted changes" if commit and git("status", "--porcelain", "-uno") else commit


@contextlib.contextmanager
def _usable(path: pathlib.Path) -> Iterator[None]:
    """Turns what the system has against a directory into one sentence."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"The run directory {path} cannot be used ({error.strerror}: {error.filename}); make room, mend its "
            "permissions or choose another one with --run_dir."
        ) from error


def _refuse_foreign(path: pathlib.Path) -> None:
    """Refuses a path that exists but is neither empty nor a run directory."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"The run directory {path} is a file; choose another path.")
    if not path.is_dir() or (path / _CONFIG).exists():
        return
    # A run that was killed while it made its directory leaves only the lock and perhaps a temporary file.
    foreign = sorted(p.name for p in path.iterdir() if p.name not in (_LOCK, _CONFIG + ".tmp"))
    if foreign:
        raise ValueError(
            f"The directory {path} holds {foreign[0]} but no {_CONFIG}, so it is no run directory; "
            "choose an empty or a new one."
        )


def _refuse_links(path: pathlib.Path) -> None:
    """Refuses a run directory in which a link leads out: a run writes, and cleans up, only below its directory."""
    inside = path.resolve()
    for entry in sorted([*path.iterdir(), *path.glob("checkpoints/*")]):
        if entry.is_symlink() and not entry.resolve().is_relative_to(inside):
            raise ValueError(
                f"{entry} is a link to {entry.resolve()}, outside of the run directory; move what it links to here, or "
                "give the place itself as --run_dir."
            )


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(
            f"{path} is damaged ({error}); restore it from a copy, or start in a new directory."
        ) from error


def _write_versioned(path: pathlib.Path, content: Any) -> pathlib.Path | None:
    """Writes JSON as a whole or not at all; returns where an earlier, different content was kept."""
    kept = None
    if path.exists():
        if _read_json(path) == content:
            return None
        numbered = (path.with_suffix(f".{number}.json") for number in itertools.count(1))
        kept = next(candidate for candidate in numbered if not candidate.exists())
        kept.write_bytes(path.read_bytes())
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return kept
