"""Checkpoints of any pytree of arrays, written in the background by Orbax."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)

_ITEMS = ("state", "manifest")
_FORMAT = 1  # of the manifest; raised when its meaning changes


class Checkpointer:
    """Saves and restores (state, data position) pairs below one directory.

    A checkpoint is a directory named by its step, with two items: `state`, the arrays under flat names such as
    `params.layers.w_DF`, which any Orbax reader can open, and `manifest`, a small JSON object with the dtype and
    shape of every leaf, the implementation of typed random keys and the position of the data stream. Arrays are
    stored by their global shape, so a checkpoint is restored onto whatever mesh the caller's shardings name.

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
        self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: Any, data_state: Mapping[str, Any]) -> bool:
        """Starts writing a checkpoint; returns once the values are copied, so `state` may be donated afterwards.

        Args:
          step: name of the checkpoint; one that exists is left alone.
          state: any pytree of arrays; typed random keys are kept as such.
          data_state: position of the data stream, an object that JSON can hold; the same on every process.

        Returns:
          Whether a checkpoint was started (False: this step is saved already).

        Raises:
          Whatever went wrong in the previous save, if `check_for_errors` has not raised it yet.
        """
        self._manager.wait_until_finished()
        if step in self._manager.all_steps():
            return False
        leaves = _named_leaves(state)
        manifest = {
            "format": _FORMAT,
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "data": dict(data_state),
        }
        arrays = {name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()}
        return self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifest)),
            force=True,  # the loop decides when to save, not Orbax
        )

    def check_for_errors(self) -> None:
        """Raises the error of the background save, if one has failed; does not wait for a save that still runs."""
        if not self._manager.is_saving_in_progress():
            self._manager.wait_until_finished()

    def steps(self) -> list[int]:
        """Steps of all committed checkpoints in ascending order; waits for a save that still runs."""
        self._manager.wait_until_finished()
        return sorted(step for step in self._manager.all_steps() if not _missing_items(self.directory / str(step)))

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
        """
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
            found = ", ".join(map(str, steps)) or "none"
            raise FileNotFoundError(f"{self.directory} holds no committed {wanted}; the steps found are: {found}.")
        step = steps[-1] if step is None else step
        # The manifest comes first: a state that does not match is refused before any array is read.
        manifest = self._manager.restore(step, args=ocp.args.Composite(manifest=ocp.args.JsonRestore())).manifest
        targets = _named_leaves(abstract_state)
        _check_match(self.directory / str(step), manifest["leaves"], targets)
        abstract = {name: _abstract_array(leaf) for name, leaf in targets.items()}
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
        leaves = []
        for name in targets:
            impl = manifest["leaves"][name]["key_impl"]
            leaves.append(jax.random.wrap_key_data(arrays[name], impl=impl) if impl else arrays[name])
        return jax.tree.unflatten(jax.tree.structure(abstract_state), leaves), manifest["data"]

    def wait(self) -> None:
        """Blocks until the running save, if any, is committed; raises its error if it failed."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the running save, then stops the background threads."""
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


def _missing_items(checkpoint: pathlib.Path) -> list[str]:
    return [name for name in _ITEMS if not (checkpoint / name).is_dir() or not any((checkpoint / name).iterdir())]


def _free_name(directory: pathlib.Path, name: str) -> pathlib.Path:
    candidate, count = directory / name, 1
    while candidate.exists():
        candidate, count = directory / f"{name}-{count}", count + 1
    return candidate


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves under names like `opt_state.0.mu.w`, in flattening order."""
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths_and_leaves}
    if len(named) != len(paths_and_leaves):
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths_and_leaves]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"Two leaves of the state share the name {twice[0]!r}; rename one of their dictionary keys.")
    return named


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
        raise ValueError(
            f"The checkpoint {where} {lacks} (in all {len(absent)} missing, {len(unknown)} unknown); {remedy}."
        )
    for name, leaf in targets.items():
        has = (saved[name]["dtype"], tuple(saved[name]["shape"]))
        wants = (leaf.dtype.name, tuple(leaf.shape))
        if has != wants:
            raise ValueError(
                f"The checkpoint {where} has the leaf {name} as {has[0]}{list(has[1])} where "
                f"{wants[0]}{list(wants[1])} is expected; {remedy}."
            )
