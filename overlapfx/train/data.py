"""Batches of byte tokens from TFDS text data sets, where batch k is a pure function of (seed, k)."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import grain
import numpy as np
import tensorflow_datasets as tfds
from absl import flags

from overlapfx.config import DataConfig
from overlapfx.train import pystdlib
from overlapfx.train.directories import make_directory
from overlapfx.train.documents import Shard, TextSource, cache_dir
from overlapfx.train.objectives import Objective
from overlapfx.train.packing import SEPARATOR, VOCAB_SIZE, Batch, Row, decode, encode, process_rows

__all__ = [
    "SEPARATOR",
    "VOCAB_SIZE",
    "Batch",
    "BatchStream",
    "Batches",
    "TextSource",
    "decode",
    "encode",
    "eval_batches",
    "make_source",
]

_BATCHES_AHEAD = 4
_log = logging.getLogger(__name__)


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
        source: TextSource,
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
        source: TextSource,
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
    source: TextSource,
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


def make_source(data: DataConfig, split: str) -> TextSource:
    """The documents of `split` of the data set that `data` names.

    "pystdlib" is prepared on first use, below data.data_dir or else the user's cache directory. Any other name ("name",
    "name/config" or "name/config:version") is a TFDS data set with a "text" feature that was prepared there in the
    ArrayRecord format. `split` may be any TFDS split expression, such as "train[:1%]".

    Raises:
        ValueError: the data set is unknown or not prepared, has no text, no such split, another format, or a file that
            is missing or damaged.
    """
    data_dir = Path(data.data_dir).expanduser() if data.data_dir else cache_dir()
    if data.name == "pystdlib":
        builder = tfds.builder_from_directory(_prepare_pystdlib(data_dir))
    else:
        builder = _find_prepared(data.name, data_dir)
    shards = _check(builder, split)
    name = f"{builder.info.full_name}:{split}"
    records = builder.as_data_source(split)
    return TextSource(name, records, shards, cache=cache_dir() / "lengths", max_skipped=data.max_skipped_records)


def _find_prepared(name: str, data_dir: Path) -> tfds.core.DatasetBuilder:
    try:
        return tfds.core.read_only_builder.builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError:
        base = name.split("/")[0].split(":")[0]
        if base in tfds.list_builders(with_community_datasets=False):
            remedy = f"prepare it with `tfds build {name} --file_format=array_record --data_dir={data_dir}`"
        else:
            remedy = "TFDS knows no data set of this name, so correct data.name or data.data_dir"
        raise ValueError(f"data.name {name!r} is not prepared below {data_dir}: {remedy}.") from None


def _check(builder: tfds.core.DatasetBuilder, split: str) -> list[Shard]:
    """The files of a split, all of which exist; refuses what has no text or no random access."""
    info = builder.info
    features = dict(info.features.items()) if isinstance(info.features, tfds.features.FeaturesDict) else {}
    if not isinstance(features.get("text"), tfds.features.Text):
        raise ValueError(
            f"{info.full_name} has no text feature named 'text', only {', '.join(features) or 'other features'}; "
            "choose another data.name."
        )
    if tfds.core.FileFormat.ARRAY_RECORD not in info.available_file_formats():
        found = info.file_format.value if info.file_format else "an unknown format"
        raise ValueError(
            f"{info.full_name} in {builder.data_dir} is prepared as {found}, which has no random access; prepare it "
            "again with --file_format=array_record."
        )
    try:
        instructions = info.splits[split].file_instructions
    except (KeyError, ValueError):
        known = ", ".join(info.splits) or "none at all"
        raise ValueError(f"{info.full_name} has no split {split!r}; its splits are {known}.") from None
    if not instructions:
        raise ValueError(f"Split {split!r} of {info.full_name} in {builder.data_dir} is empty; choose another split.")
    for instruction in instructions:
        if not os.path.exists(instruction.filename):
            raise ValueError(
                f"{instruction.filename}, a file of {info.full_name}, is missing; remove its directory and prepare the "
                "data set again."
            )
    return [Shard(instruction.filename, instruction.skip, instruction.take) for instruction in instructions]


def _prepare_pystdlib(data_dir: Path) -> Path:
    """The directory of the prepared standard library of this Python, written first if it is not there.

    Its name holds the version of Python and a digest of the files. It appears complete or not at all, and of several
    processes that need it one writes while the others wait.
    """
    files = pystdlib.collect()
    builder_class = _pystdlib_builder(files)
    config = builder_class.BUILDER_CONFIGS[0].name
    directory = data_dir / "pystdlib" / config / str(builder_class.VERSION)
    if directory.exists():
        return directory
    make_directory(data_dir, "The data directory", "set data.data_dir to a place that can be written")
    with open(data_dir / "pystdlib.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it even if this process is killed
        if not directory.exists():
            for leftover in directory.parent.glob("incomplete.*"):  # its writer was killed, else it would have the lock
                shutil.rmtree(leftover)
            _log.info("Preparing %d source files of the standard library in %s", len(files), directory)
            with _quiet_tfds(), tempfile.TemporaryDirectory() as unused:
                builder = builder_class(data_dir=data_dir, file_format="array_record")
                builder.download_and_prepare(download_dir=unused)
    return directory


def _pystdlib_builder(files: Sequence[pystdlib.SourceFile]) -> type[tfds.core.GeneratorBasedBuilder]:
    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
        """Source files of the Python standard library; the version is Python's, the config a digest of the files."""

        name = "pystdlib"
        VERSION = tfds.core.Version(".".join(map(str, sys.version_info[:3])))
        # Nothing is downloaded, and TFDS's own search for a list of addresses imports a package it does not require.
        url_infos = None
        BUILDER_CONFIGS: ClassVar = [tfds.core.BuilderConfig(name=f"files_{pystdlib.fingerprint(files)}")]

        def _info(self) -> tfds.core.DatasetInfo:
            text = tfds.features.Text()
            features = tfds.features.FeaturesDict({"name": text, "text": text})
            return tfds.core.DatasetInfo(builder=self, features=features)  # dataset_info_from_configs needs TensorFlow

        def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[Any]]:
            return {split: self._generate_examples(split) for split in pystdlib.SPLITS}

        def _generate_examples(self, split: str) -> Iterator[tuple[str, dict[str, Any]]]:
            for file in files:
                if pystdlib.split_of(file.name) == split:
                    yield file.name, {"name": file.name, "text": file.text}

    return Builder


@contextlib.contextmanager
def _quiet_tfds() -> Iterator[None]:
    """Without TFDS's announcement of a download of unknown size, and bars for what takes a fraction of a second."""
    tfds.disable_progress_bar()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        tfds.enable_progress_bar()
