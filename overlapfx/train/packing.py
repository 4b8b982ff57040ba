"""Fixed-length rows of byte tokens cut from a sequence of documents, each row reachable on its own."""

from __future__ import annotations

import operator
from typing import Protocol

import numpy as np
from jaxtyping import Int32, Int64, Integer, UInt8

VOCAB_SIZE = 256
SEPARATOR = 0  # the one byte that no text keeps: it starts a document, ends the one before it, and fills padding

Row = dict[str, np.ndarray]  # name -> array; a batch has a dimension of rows before
Batch = dict[str, np.ndarray]


class Documents(Protocol):
    """Documents with random access, whose lengths are known without reading them."""

    @property
    def lengths(self) -> Int64[np.ndarray, " documents"]:
        """Number of bytes in each document."""

    def __getitem__(self, index: int, /) -> UInt8[np.ndarray, " bytes"]:
        """The bytes of one document, none of which is the separator."""


def encode(text: str) -> Int32[np.ndarray, " bytes"]:
    """The UTF-8 bytes of `text` as tokens, without NUL characters and without a separator."""
    return clean(text.encode("utf-8")).astype(np.int32)


def decode(ids: Integer[np.ndarray, " bytes"]) -> str:
    """The text of `ids` without separators; bytes that are not UTF-8 become U+FFFD.

    Raises:
        ValueError: an id is not a byte.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= VOCAB_SIZE):
        raise ValueError(
            f"Token ids from {ids.min()} to {ids.max()} cannot be decoded; a token is a byte, 0 to {VOCAB_SIZE - 1}."
        )
    return ids[ids != SEPARATOR].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def clean(text: bytes) -> UInt8[np.ndarray, " bytes"]:
    """The bytes of a document without NUL, which is the separator."""
    return np.frombuffer(text.replace(b"\0", b""), np.uint8)


class Rows:
    """Rows of `seq_len` tokens and the tokens that follow them.

    All documents that are not empty form one stream, a separator before each, and one separator closes it. Row r reads
    the stream from r * seq_len on: inputs are seq_len tokens, targets the tokens one further. So every byte and every
    end of a document is a target exactly once, and only the last row has padding.

    A row is a dict of arrays [T], T = seq_len: inputs and targets int32 (0 to 255), mask float32 (1 where the target
    counts, 0 on padding), segments int32 (which document of the row the input belongs to, counted from 1, or 0).
    """

    def __init__(self, documents: Documents, seq_len: int) -> None:
        """Raises ValueError if seq_len is not positive or all documents are empty."""
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; it must be at least 1.")
        lengths = documents.lengths
        self._documents = documents
        self._seq_len = seq_len
        self._ends = np.cumsum(np.where(lengths > 0, lengths + 1, 0))  # of each document's part of the stream
        self._num_targets = int(self._ends[-1]) if len(self._ends) else 0
        if self._num_targets == 0:
            raise ValueError(
                f"The data set has no text in any of its {len(lengths)} documents; choose another data set or split."
            )

    @property
    def num_targets(self) -> int:
        """Number of targets in all rows, which is the number of bytes and documents that are not empty."""
        return self._num_targets

    def __len__(self) -> int:
        return -(-self._num_targets // self._seq_len)

    def __getitem__(self, index: int) -> Row:
        row = operator.index(index)
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        start = row * self._seq_len
        tokens, segments = self._read(start, min(start + self._seq_len + 1, self._num_targets))
        return {
            "inputs": tokens[:-1].astype(np.int32),
            "targets": tokens[1:].astype(np.int32),
            "mask": (segments[:-1] > 0).astype(np.float32),
            "segments": segments[:-1],
        }

    def _read(self, start: int, stop: int) -> tuple[UInt8[np.ndarray, " tokens"], Int32[np.ndarray, " tokens"]]:
        """Tokens and segments of the stream from start to stop, filled up with zeros to seq_len + 1."""
        tokens = np.full(self._seq_len + 1, SEPARATOR, np.uint8)
        segments = np.zeros(self._seq_len + 1, np.int32)
        document = int(np.searchsorted(self._ends, start, side="right"))  # the first that ends beyond start
        position, segment = start, 0
        while position < stop:
            end = int(self._ends[document])
            if end > position:  # an empty document takes no part of the stream
                text = self._documents[document]
                begin = end - len(text)  # where the text starts, one after its separator
                until = min(end, stop)
                segment += 1
                segments[position - start : until - start] = segment
                first = max(position, begin)
                tokens[first - start : until - start] = text[first - begin : until - begin]
                position = until
            document += 1
        return tokens, segments


def process_rows(global_batch: int, process_index: int, process_count: int) -> range:
    """Which rows of a global batch a process has: the process_index-th of process_count equal runs.

    Raises:
        ValueError: there is no such process, or no equal runs.
    """
    if global_batch < 1:
        raise ValueError(f"data.global_batch is {global_batch}; it must be at least 1.")
    if not 0 <= process_index < process_count:
        raise ValueError(f"Process {process_index} of {process_count} has no rows of a batch; processes count from 0.")
    if global_batch % process_count:
        below = global_batch - global_batch % process_count
        legal = f"{below} or {below + process_count}" if below else f"{process_count}"
        raise ValueError(
            f"data.global_batch {global_batch} does not divide evenly over {process_count} processes; use {legal}."
        )
    size = global_batch // process_count
    return range(process_index * size, (process_index + 1) * size)
