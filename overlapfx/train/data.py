"""Batches of examples, where batch k is a pure function of (seed, k)."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import grain
import numpy as np
from absl import flags

from overlapfx.train.documents import Source, SpeechSource, TextSource
from overlapfx.train.objectives import Objective
from overlapfx.train.packing import SEPARATOR, VOCAB_SIZE, Batch, Row, decode, encode, process_rows
from overlapfx.train.sources import make_source

__all__ = [
    "SEPARATOR",
    "VOCAB_SIZE",
    "Batch",
    "BatchStream",
    "Batches",
    "Source",
    "SpeechSource",
    "TextSource",
    "decode",
    "encode",
    "eval_batches",
    "make_source",
]

_BATCHES_AHEAD = 4


class Batches:
    """The rows that one process has of every training batch: `batches[k]` depends on k and the arguments here alone.

    Rows are shuffled anew in every epoch and the epochs joined into one endless sequence, of which batch k has rows
    [k * global_batch, (k + 1) * global_batch). Process i of n has the i-th of n equal runs of these, so what the
    processes have, joined in order, is the same batch for every n. (Processes that hold the same rows, because the
    model axis spans them, count as one.)

    A batch is a dict of the arrays of `objective.fields`, each with a first dimension of global_batch // process_count
    examples.
    """

    def __init__(
        self,
        source: Source,
        *,
        objective: Objective,
        global_batch: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        """Raises ValueError for sizes that are not positive, and if processes would differ in their number of rows."""
        self._own = process_rows(global_batch, process_index, process_count)
        self._global_batch = global_batch
        self._objective = objective
        rows = objective.rows(source)
        self.fingerprint: dict[str, str | int] = {
            "dataset": source.name,
            "num_rows": len(rows),
            "objective": repr(objective),
            "global_batch": global_batch,
            "seed": seed,
        }
        # Grain adds the epoch to its seed: unless hashed, seed 1 would start with the second epoch of seed 0.
        self._seed = int.from_bytes(hashlib.sha256(f"batches {seed}".encode()).digest()[:4], "big")
        self._sequence = grain.MapDataset.source(rows).shuffle(seed=self._seed).repeat()

    def __len__(self) -> int:
        """As many as Grain can count, which no run reaches."""
        return len(self._sequence) // self._global_batch

    def __getitem__(self, index: int) -> Batch:
        first = operator.index(index) * self._global_batch
        rows = {first + i: self._sequence[first + i] for i in self._own}
        return _batch(self._objective, rows, self._seed, len(self._own))


def _batch(objective: Objective, rows: Mapping[int, Row], seed: int, num_examples: int) -> Batch:
    """The examples of rows with their numbers, from which, and the seed, comes all chance; zeros after the last one."""
    batch = {name: np.zeros((num_examples, *field.shape), field.dtype) for name, field in objective.fields.items()}
    for i, (number, row) in enumerate(rows.items()):
        example = objective.example(row, np.random.default_rng([seed, number]))
        for name, array in batch.items():
            array[i] = example[name]
    return batch


class BatchStream:
    """An endless iterator over `Batches` from batch `start` on, read ahead in the background.

    Its state is the number of the next batch, so it can be resumed with another number of processes. num_workers = 0
    reads ahead in a thread, otherwise in that many worker processes. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        source: Source,
        *,
        objective: Objective,
        global_batch: int,
        seed: int,
        process_index: int = 0,
        process_count: int = 1,
        start: int = 0,
        num_workers: int = 0,
    ) -> None:
        """Raises ValueError for what `Batches` refuses, and if start or num_workers is negative."""
        if start < 0 or num_workers < 0:
            raise ValueError(
                f"A stream of batches has start {start} and num_workers {num_workers}; use 0 or more for both."
            )
        self._batches = Batches(
            source,
            objective=objective,
            global_batch=global_batch,
            seed=seed,
            process_index=process_index,
            process_count=process_count,
        )
        self._next_batch = start
        self._num_workers = num_workers
        self._iterator: Any = None

    def __iter__(self) -> BatchStream:
        return self

    def __next__(self) -> Batch:
        self._iterator = self._iterator or self._open()
        batch = None
        try:
            batch = next(self._iterator)
        finally:
            if batch is None:  # Grain has lost count, so the next call has to start over, at the same batch
                self.close()
        self._next_batch += 1
        return batch

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def get_state(self) -> dict[str, Any]:
        """The position in JSON types: the number of the next batch, and all that decides what the batches hold."""
        return {"next_batch": self._next_batch, "fingerprint": dict(self._batches.fingerprint)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a position that `get_state` returned, in this process or another.

        Raises:
            ValueError: the state is not a position, or a position among other batches; the sentence lists what differs.
        """
        next_batch, theirs, ours = state.get("next_batch"), state.get("fingerprint"), self._batches.fingerprint
        if not isinstance(next_batch, int) or next_batch < 0 or not isinstance(theirs, Mapping):
            raise ValueError(f"{dict(state)!r} is not a data position; give one that BatchStream.get_state returned.")
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differing:
            listed = ", ".join(f"{key} was {theirs.get(key)!r}, is {ours.get(key)!r}" for key in differing)
            raise ValueError(
                f"The saved position belongs to other batches ({listed}); go back to those values or start a new run."
            )
        self.close()
        self._next_batch = next_batch

    def close(self) -> None:
        """Stop reading ahead. The position stays, and a later `next` continues from it."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def _open(self) -> Any:
        # The position is where the data set starts, not a state of Grain's: its form depends on the number of workers.
        dataset = grain.MapDataset.source(self._batches).slice(slice(self._next_batch, None))
        if self._num_workers == 0:
            options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_BATCHES_AHEAD)
            return iter(dataset.to_iter_dataset(options))
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain asks for a flag of its own before it starts workers
        workers = grain.MultiprocessingOptions(num_workers=self._num_workers, per_worker_buffer_size=_BATCHES_AHEAD)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        return iter(dataset.to_iter_dataset(options).mp_prefetch(workers).map(_copy))


def _copy(batch: Batch) -> Batch:
    """The batch in memory of this process: what a worker sends lies in shared memory, which has to be given back."""
    return {key: np.array(array) for key, array in batch.items()}


def eval_batches(
    source: Source,
    *,
    objective: Objective,
    global_batch: int,
    num_batches: int | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[Batch]:
    """The rows that one process has of at most num_batches batches (None: all), in the order of the source.

    If they do not hold all rows, the rows are spread evenly over the source. The last batch is filled up with zeros,
    whose mask is 0. Shapes and dtypes are those of `Batches`. The examples are the same every time.

    Raises:
        ValueError: a size is not positive, or processes would differ in their number of rows.
    """
    if num_batches is not None and num_batches < 1:
        raise ValueError(f"The number of evaluation batches is {num_batches}; it must be at least 1.")
    own = process_rows(global_batch, process_index, process_count)
    rows = objective.rows(source)
    count = len(rows) if num_batches is None else min(len(rows), num_batches * global_batch)

    def generate() -> Iterator[Batch]:
        for first in range(0, count, global_batch):
            chosen = [(first + i) * len(rows) // count for i in own if first + i < count]
            yield _batch(objective, {r: rows[r] for r in chosen}, 0, len(own))

    return generate()
