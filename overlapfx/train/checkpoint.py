"""Checkpoints of any pytree of arrays, written in the background by Orbax."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from overlapfx.train.digest import digests
from overlapfx.train.names import leaf_names
from overlapfx.train.stops import StorageError

logger = logging.getLogger(__name__)

_ITEMS = ("state", "manifest")
_FORMAT = 2  # of the manifest; raised when its meaning changes
_REASON_CHARS = 300


class Mismatch(ValueError):
    """A checkpoint holds another state than the one asked for."""


class Checkpointer:
    """Saves and restores (state, data position) pairs below one directory.

    A checkpoint is a directory named by its step, with two items: `state`, the arrays under flat names such as
    `params.layers.w_DF`, which any Orbax reader can open, and `manifest`, a small JSON object with the dtype and
    shape of every leaf, a digest of its values, the implementation of typed random keys and the position of the data
    stream. Arrays are stored by their global shape, so a checkpoint is restored onto whatever mesh the caller's
    shardings name; what was restored is compared with the digests, since files can be damaged without an error.

    A save is committed as a whole or not at all: Orbax writes to a temporary directory and renames it at the end.
    What a killed writer leaves behind is never restored, but `skipped` (filled on process 0) names it, a sentence for
    each.

    Every process of a job makes one Checkpointer with the same arguments, on a file system they share, and calls the
    same methods in the same order; Orbax coordinates them.

    Args:
      directory: where the checkpoints live; created if missing.
      keep: how many of the newest checkpoints are kept, at least 1.
      read_only: for readers beside a running writer: nothing is created, tidied up or deleted.
    """

    def __init__(self, directory: str | pathlib.Path, keep: int, *, read_only: bool = False):
        if keep < 1:
            raise ValueError(f"train.checkpoint_keep is {keep}; keep at least 1 checkpoint.")
        self.directory = pathlib.Path(directory).absolute()
        self.skipped: tuple[str, ...] = ()
        # Process 0 tidies before the others look: making the manager is a barrier.
        if jax.process_index() == 0 and self.directory.is_dir():
            self.skipped = _set_incomplete_aside(self.directory, read_only)
        for sentence in self.skipped:
            logger.warning("%s", sentence)
        if read_only:
            options = ocp.CheckpointManagerOptions(read_only=True)
        else:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=ocp.checkpoint_managers.LatestN(keep), cleanup_tmp_directories=True
            )
        self._read_only = read_only
        self._writing: int | None = None  # the step of the save that was started last
        with _reported(f"The directory {self.directory} cannot be used", lambda: "choose another one with --run_dir"):
            self._manager = ocp.CheckpointManager(self.directory, options=options)
            self._identity = _identity(self.directory)

    def save(self, step: int, state: Any, data_state: Mapping[str, Any]) -> bool:
        """Starts writing a checkpoint; returns once the values are copied, so `state` may be donated afterwards.

        Args:
          step: name of the checkpoint; one that exists is left alone.
          state: any pytree of arrays; typed random keys are kept as such.
          data_state: position of the data stream, an object that JSON can hold; the same on every process.

        Returns:
          Whether a checkpoint was started (False: this step is saved already).

        Raises:
          StorageError: this save or the one before it failed; no older checkpoint is deleted before this one is
            committed.
        """
        self.wait()
        if step in self.steps():
            return False
        self._check_directory(step)
        leaves = _named_leaves(state)
        arrays = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()}
        of_values = digests(arrays)
        manifest = {
            "format": _FORMAT,
            "leaves": {name: _describe(leaf) | {"digest": of_values[name]} for name, leaf in leaves.items()},
            "data": dict(data_state),
        }
        manifest["digest"] = _digest_of_json(manifest)
        self._writing = step
        with self._failing_save():
            return self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifest)),
                force=True,  # the loop decides when to save, not Orbax
            )

    def check_for_errors(self) -> None:
        """Raises StorageError if the background save has failed; does not wait for a save that still runs."""
        if self._writing is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def steps(self) -> list[int]:
        """Steps of all committed checkpoints in ascending order; waits for a save that still runs."""
        self.wait()
        return self._committed()

    def _committed(self) -> list[int]:
        # From the disk: after a save that failed, Orbax has forgotten what that save would have replaced.
        entries = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(int(e.name) for e in entries if e.name.isdigit() and not _missing_items(e))

    def latest_step(self) -> int | None:
        """Step of the newest committed checkpoint, None if there is none; waits for a save that still runs."""
        return max(self.steps(), default=None)

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint into the layout that `abstract_state` asks for.

        Args:
          abstract_state: a pytree of `jax.ShapeDtypeStruct` (or arrays) with the structure, dtypes and global shapes
            of the saved one. Its shardings may differ from those at the time of the save; a leaf without one becomes
            numpy.
          step: which checkpoint; the newest committed one if None.

        Returns:
          The state and the position of the data stream.

        Raises:
          FileNotFoundError: there is no such checkpoint.
          ValueError: the checkpoint does not hold this state; the sentence names the leaf.
          StorageError: a file of the checkpoint is damaged or gone.
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            found = ", ".join(map(str, steps)) or "none"
            raise FileNotFoundError(f"{self.directory} holds no committed {wanted}; the steps found are: {found}.")
        step = steps[-1] if step is None else step
        older = ", ".join(str(other) for other in steps if other < step)
        remedy = f"--use-older-checkpoint goes back to an older one ({older})" if older else "there is no older one"
        with _reported(f"The checkpoint {self.directory / str(step)} is damaged", lambda: remedy):
            return self._read(step, abstract_state)

    def restore_newest(self, abstract_state: Any, *, fall_back: bool) -> tuple[int, Any, dict[str, Any]] | None:
        """The newest committed checkpoint as (step, state, position of the data); None if there is none.

        Args:
          abstract_state: as for `restore`.
          fall_back: where it is damaged, set it aside as STEP.damaged, say so in `skipped`, and take the next older
            one; otherwise its StorageError is raised. All processes of a job take the same one.

        Raises:
          StorageError: the newest one, or with `fall_back` every one, is damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            error: StorageError | None = None
            try:
                state, position = self.restore(abstract_state, step)
            except StorageError as caught:
                if not fall_back:
                    raise
                error = caught
            if not _any_process(error is not None):
                return step, state, position
            sentence = f"Skipped step {step}: {error or 'another process found it damaged.'}"
            if not self._read_only:
                sentence += f" It is now {self._set_aside(step)}."
            self.skipped += (sentence,)
        if steps:  # to begin anew without a word would throw the run away
            raise StorageError(
                f"All checkpoints in {self.directory} are damaged (steps {', '.join(map(str, steps))}); start in a new "
                "run directory."
            )
        return None

    def _set_aside(self, step: int) -> str:
        """Takes a damaged checkpoint out of sight of all processes; returns its new name."""
        aside = _free_name(self.directory, f"{step}.damaged")
        if jax.process_index() == 0:
            (self.directory / str(step)).rename(aside)
        _any_process(False)  # nobody goes on before it is renamed
        self._manager.reload()
        return aside.name

    def _read(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any]]:
        # The manifest comes first: a state that does not match is refused before any array is read.
        manifest = self._manager.restore(step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore())).manifest
        if manifest.get("format") != _FORMAT:
            raise Mismatch(
                f"The checkpoint {self.directory / str(step)} has format {manifest.get('format')}, where this program "
                f"reads format {_FORMAT}; use the program that wrote it, or start in a new run directory."
            )
        if manifest.pop("digest", None) != _digest_of_json(manifest):
            raise StorageError("its manifest is not what was written")
        targets = _named_leaves(abstract_state)
        _check_match(self.directory / str(step), manifest["leaves"], targets)
        abstract = {name: _abstract_array(leaf) for name, leaf in targets.items()}
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
        found = digests(arrays)
        changed = [name for name in targets if found[name] != manifest["leaves"][name]["digest"]]
        if changed:
            raise StorageError(f"the values of {changed[0]} are not those that were saved ({len(changed)} such leaves)")
        leaves = []
        for name in targets:
            impl = manifest["leaves"][name]["key_impl"]
            leaves.append(jax.random.wrap_key_data(arrays[name], impl=impl) if impl else arrays[name])
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), manifest["data"]

    def wait(self) -> None:
        """Blocks until the running save, if any, is committed; raises StorageError if it failed."""
        if self._writing is not None:
            with self._failing_save():
                self._manager.wait_until_finished()
            self._writing = None

    @contextlib.contextmanager
    def _failing_save(self) -> Iterator[None]:
        try:
            with _reported(
                f"The checkpoint of step {self._writing} in {self.directory} could not be written",
                lambda: (
                    f"the newest one is that of step {max(self._committed(), default='none')}: make room or mend the "
                    "disk, then run the same command again"
                ),
            ):
                yield
        except StorageError as error:
            if self._writing is not None:
                self._check_directory(self._writing, error)
            raise

    def _check_directory(self, step: int, cause: Exception | None = None) -> None:
        """Orbax makes a directory that is gone anew, without the rest of the run."""
        if _identity(self.directory) != self._identity:
            raise StorageError(
                f"The directory {self.directory} has vanished, so step {step} cannot be saved; bring the run directory "
                "back, or start in a new one."
            ) from cause

    def close(self) -> None:
        """Waits for the running save, then stops the background threads; raises StorageError if the save failed."""
        with self._failing_save():
            self._manager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _set_incomplete_aside(directory: pathlib.Path, read_only: bool) -> tuple[str, ...]:
    """Says which entries are not complete checkpoints; takes those that look like one out of Orbax's sight.

    A directory that bears a step number but lacks an item (a copy that was cut short, a deletion that was killed)
    counts as a checkpoint for Orbax: it could be "the newest", make the retention policy delete a good one, and block
    a new save.
    """
    sentences = []
    for entry in sorted(directory.iterdir()):
        if ".orbax-checkpoint-tmp" in entry.name:
            step = entry.name.partition(".")[0]
            sentences.append(f"Skipped step {step}: {entry.name} is not committed.")
        elif entry.is_dir() and entry.name.isdigit():
            missing = _missing_items(entry)
            if not missing:
                continue
            sentence = f"Skipped step {entry.name}: its directory lacks {' and '.join(missing)}"
            if not read_only:
                aside = _free_name(directory, f"{entry.name}.incomplete")
                entry.rename(aside)
                sentence += f"; it is now {aside.name}"
            sentences.append(sentence + ".")
    return tuple(sentences)


def _identity(directory: pathlib.Path) -> int | None:
    """What tells a directory from another one of the same name; None if there is none."""
    try:
        return directory.stat().st_ino
    except FileNotFoundError:
        return None


def _missing_items(checkpoint: pathlib.Path) -> list[str]:
    return [name for name in _ITEMS if not (checkpoint / name).is_dir() or not any((checkpoint / name).iterdir())]


def _free_name(directory: pathlib.Path, name: str) -> pathlib.Path:
    candidate, count = directory / name, 1
    while candidate.exists():
        candidate, count = directory / f"{name}-{count}", count + 1
    return candidate


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves under names like `opt_state.0.mu.w`, in flattening order."""
    names = leaf_names(tree)
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"Two leaves of the state share the name {twice[0]!r}; rename one of their dictionary keys.")
    return dict(zip(names, jax.tree.leaves(tree), strict=True))


@contextlib.contextmanager
def _reported(what: str, remedy: Callable[[], str]) -> Iterator[None]:
    """Turns whatever Orbax raises, which for a damaged file may be a bare Exception, into one sentence."""
    try:
        yield
    except Mismatch:
        raise
    except Exception as error:
        raise StorageError(f"{what} ({_reason(error)}); {remedy()}.") from error


def _any_process(flag: bool) -> bool:
    """Whether `flag` holds on any process of the job; all of them have to ask."""
    return flag if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def _digest_of_json(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    """The gist of an error in one line: the system's own words if it has them."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    code = re.search(r"os_error_code='(\d+)'", str(error))  # at the end of a long message of TensorStore's
    if code:
        return os.strerror(int(code[1]))
    line = (str(error) or type(error).__name__).splitlines()[0]
    return line if len(line) <= _REASON_CHARS else f"{line[:_REASON_CHARS]} ..."


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _describe(leaf: Any) -> dict[str, Any]:
    impl = str(jax.random.key_impl(leaf)) if _is_key(leaf) else None
    return {"dtype": leaf.dtype.name, "shape": list(leaf.shape), "key_impl": impl}


def _abstract_array(leaf: Any) -> jax.ShapeDtypeStruct:
    """What Orbax has to read for one leaf: for a typed key, the integers behind it."""
    # Key data has one more dimension than the key; a partition spec that does not mention it leaves it whole.
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) if _is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=getattr(leaf, "sharding", None))


def _check_match(where: pathlib.Path, saved: Mapping[str, Mapping[str, Any]], targets: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose leaves differ from the wanted ones in name, dtype or global shape."""
    remedy = "restore with the configuration it was saved with, or train in a new run directory"
    absent, unknown = sorted(set(targets) - set(saved)), sorted(set(saved) - set(targets))
    if absent or unknown:
        lacks = f"lacks the leaf {absent[0]}" if absent else f"has the leaf {unknown[0]}, which this state does not"
        raise Mismatch(
            f"The checkpoint {where} {lacks} (in all {len(absent)} missing, {len(unknown)} unknown); {remedy}."
        )
    for name, leaf in targets.items():
        has = (saved[name]["dtype"], tuple(saved[name]["shape"]))
        wants = (leaf.dtype.name, tuple(leaf.shape))
        if has != wants:
            raise Mismatch(
                f"The checkpoint {where} has the leaf {name} as {has[0]}{list(has[1])} where "
                f"{wants[0]}{list(wants[1])} is expected; {remedy}."
            )
