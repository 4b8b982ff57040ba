"""The records of one split of a data set, with random access to what is read of them."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from jaxtyping import Int16, Int64, UInt8

from overlapfx.train.directories import replacing
from overlapfx.train.packing import clean
from overlapfx.train.stops import DataError

_log = logging.getLogger(__name__)
_UNREADABLE = -1  # in place of a length


class Shard(NamedTuple):
    """Part of a file of records: the records from number `first` on, `number` of them."""

    file: str
    first: int
    number: int


class Unreadable(Exception):
    """A record holds something else than what it is read for; the message says what."""


class Records(Protocol):
    """Records with random access."""

    def __len__(self) -> int:
        """Number of records."""

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        """One record."""


class Source(abc.ABC):
    """What is read of each record; it can be pickled, for processes that read ahead.

    name: identifies data set, version and split, and so the content and the order of the records.
    lengths: int64 [records], the length of each, in the source's own unit.
    skipped: a sentence for every record that cannot be read, and counts as an empty one.
    """

    unit: ClassVar[str]

    @staticmethod
    @abc.abstractmethod
    def _decode(record: Mapping[str, Any]) -> Any:
        """What is read of a record, which has a length; raises Unreadable."""

    def __init__(
        self,
        name: str,
        records: Records,
        shards: Sequence[Shard] = (),
        cache: Path | None = None,
        max_skipped: int = 0,
    ) -> None:
        """Counts the lengths, which reads every record, unless they are known from the last time.

        Args:
            name: see the class.
            records: what is read.
            shards: where the records are, in order.
            cache: directory where the lengths are kept; None counts them every time.
            max_skipped: how many records may be unreadable.

        Raises:
            DataError: more records cannot be read; the sentence names the file and the number of the first.
        """
        self.name = name
        self._records = records
        self._shards = tuple(shards)
        lengths = self._known_lengths(cache) if cache else self._count_lengths()
        broken = np.flatnonzero(lengths == _UNREADABLE).tolist()
        if len(broken) > max_skipped:
            self._refuse(broken, max_skipped)
        self.skipped = tuple(f"{self._locate(index)} cannot be read and is skipped." for index in broken)
        self.lengths: Int64[np.ndarray, " records"] = np.maximum(lengths, 0)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> Any:
        """What is read of one record.

        Raises:
            DataError: the record cannot be read, or has another length than it had when the lengths were counted.
        """
        content = self._read(index)
        if len(content) != self.lengths[index]:
            raise DataError(
                f"{self._locate(index)} has {len(content)} {self.unit} where {self.lengths[index]} were counted "
                "before; something changed the files during the run, so start again."
            )
        return content

    def _read(self, index: int) -> Any:
        try:
            return self._decode(self._records[index])
        except (RuntimeError, Unreadable) as error:  # ArrayRecord raises the former for files that are damaged or gone
            raise DataError(self._unreadable(index, str(error))) from error

    def _refuse(self, broken: list[int], max_skipped: int) -> None:
        allowed = f" ({len(broken)} such records, data.max_skipped_records is {max_skipped})"
        try:
            self._read(broken[0])
        except DataError as error:
            raise DataError(str(error).removesuffix(".") + allowed + ".") from error
        raise DataError(f"{self._locate(broken[0])} was unreadable a moment ago{allowed}; start again.")

    def _unreadable(self, index: int, reason: str) -> str:
        return (
            f"{self._locate(index)} cannot be read ({reason}); remove the directory of that file and prepare the data "
            "set again."
        )

    def _locate(self, index: int) -> str:
        position = index
        for shard in self._shards:
            if position < shard.number:
                return f"Record {shard.first + position} of {shard.file}"
            position -= shard.number
        return f"Record {index} of {self.name}"

    def _count_lengths(self) -> Int64[np.ndarray, " records"]:
        return np.array([self._length(i) for i in range(len(self._records))], np.int64)

    def _length(self, index: int) -> int:
        try:
            return len(self._read(index))
        except DataError:
            return _UNREADABLE

    def _known_lengths(self, cache: Path) -> Int64[np.ndarray, " records"]:
        """The lengths kept in `cache`, or counted and kept there; their key changes when a file is written anew."""
        stats = [os.stat(shard.file) for shard in self._shards]
        key = json.dumps([self.name, self._shards, [(stat.st_size, stat.st_mtime_ns) for stat in stats]])
        path = cache / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
        known = _load_lengths(path, len(self._records))
        if known is not None:
            return known
        lengths = self._count_lengths()
        try:
            with replacing(path) as file:
                np.save(file, lengths)
        except OSError as error:  # without a cache the next start takes longer, nothing else
            _log.warning("The lengths of the records could not be kept in %s: %s", path, error)
        return lengths


class TextSource(Source):
    """Documents as arrays of bytes without NUL, uint8 [bytes], from records with a "text" of UTF-8."""

    unit = "bytes of text"

    @staticmethod
    def _decode(record: Mapping[str, Any]) -> UInt8[np.ndarray, " bytes"]:
        text = record["text"]
        if not isinstance(text, bytes):  # the reader takes a file cut short at a block for one of empty records
            raise Unreadable(f"its text is {text!r}")
        return clean(text)


@dataclasses.dataclass(frozen=True)
class Clip:
    """Samples of 16 bits, and the UTF-8 text that is said; its length is that of the samples."""

    samples: Int16[np.ndarray, " samples"]
    text: bytes

    def __len__(self) -> int:
        return len(self.samples)


class SpeechSource(Source):
    """Clips, from records with "speech" in samples of 16 bits and a "text"."""

    unit = "samples"

    @staticmethod
    def _decode(record: Mapping[str, Any]) -> Clip:
        samples, text = record["speech"], record["text"]
        if not (isinstance(samples, np.ndarray) and samples.ndim == 1 and np.can_cast(samples.dtype, np.int16)):
            raise Unreadable("its speech is no row of samples of 16 bits")
        if not isinstance(text, bytes):
            raise Unreadable(f"its text is {text!r}")
        return Clip(samples.astype(np.int16), text)


def _load_lengths(path: Path, number: int) -> np.ndarray | None:
    """The kept lengths; None if there are none, or the file is not one that this program wrote."""
    if not path.exists():
        return None
    try:
        lengths = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        _log.warning("%s is damaged (%s); the lengths of the records are counted again", path, error)
        return None
    return (
        lengths
        if isinstance(lengths, np.ndarray) and lengths.dtype == np.int64 and lengths.shape == (number,)
        else None
    )
