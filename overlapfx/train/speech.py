"""What a model of speech learns to predict: clips made into training examples."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Int32

from overlapfx.train.documents import SpeechSource
from overlapfx.train.objectives import Field
from overlapfx.train.packing import Row
from overlapfx.train.stops import DataError


class Clips:
    """The clips of a source that are not empty and have at most `clip_len` samples, in order.

    A row has samples, int16 [number of samples], and text, its UTF-8 bytes.
    """

    def __init__(self, source: SpeechSource, clip_len: int) -> None:
        """Raises ValueError if there is none."""
        self._source = source
        self._numbers = np.flatnonzero((source.lengths > 0) & (source.lengths <= clip_len))
        if not len(self._numbers):
            raise ValueError(
                f"None of the {len(source)} clips of {source.name} has 1 to {clip_len} samples, the length of a clip "
                "by model.seq_len and model.hop; raise model.seq_len or choose other data."
            )

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Row:
        row = operator.index(index)
        if not 0 <= row < len(self):
            raise IndexError(f"clip {row} of {len(self)}")
        clip = self._source[int(self._numbers[row])]
        return {"samples": clip.samples, "text": np.frombuffer(clip.text, np.uint8)}


@dataclasses.dataclass(frozen=True)
class Speech:
    """Clips of at most clip_len samples, which become seq_len tokens."""

    sample_rate: int
    clip_len: int
    seq_len: int

    @property
    def fields(self) -> Mapping[str, Field]:
        """samples, int16 [S]; length, int32: how many of them there are."""
        return {"samples": Field((self.clip_len,), np.int16), "length": Field((), np.int32)}

    def rows(self, source: SpeechSource) -> Clips:
        """The clips that are not too long."""
        return Clips(source, self.clip_len)

    def example(self, row: Row, rng: np.random.Generator) -> Row:
        """The samples, filled up with zeros."""
        samples = np.zeros(self.clip_len, np.int16)
        samples[: len(row["samples"])] = row["samples"]
        return {"samples": samples, "length": np.asarray(len(row["samples"]), np.int32)}

    def num_tokens(self, row: Row) -> int:
        """Tokens that begin before the end of the clip."""
        return -(-len(row["samples"]) * self.seq_len // self.clip_len)


@dataclasses.dataclass(frozen=True)
class Transcription(Speech):
    """What is said in a clip: characters of `alphabet`, the first of which is label 1.

    A clip counts nothing if its text is empty, has more than target_len labels, or more than its tokens can say: one
    label each, and a token that says nothing between two equal ones.
    """

    alphabet: str
    target_len: int

    @property
    def fields(self) -> Mapping[str, Field]:
        """Besides the samples: labels, int32 [N], zeros after the last one; mask, float32 [N], 1 where labels are."""
        labels, mask = Field((self.target_len,), np.int32), Field((self.target_len,), np.float32)
        return {**super().fields, "labels": labels, "mask": mask}

    def example(self, row: Row, rng: np.random.Generator) -> Row:
        """Raises DataError for a character that is not in the alphabet."""
        found = self._labels(row["text"].tobytes().decode("utf-8", errors="replace"))
        needed = len(found) + int(np.sum(found[1:] == found[:-1]))
        labels, mask = np.zeros(self.target_len, np.int32), np.zeros(self.target_len, np.float32)
        if len(found) <= self.target_len and needed <= self.num_tokens(row):
            labels[: len(found)], mask[: len(found)] = found, 1
        return {**super().example(row, rng), "labels": labels, "mask": mask}

    def _labels(self, text: str) -> Int32[np.ndarray, " labels"]:
        unknown = sorted(set(text) - set(self.alphabet))
        if unknown:
            raise DataError(
                f"The transcript {text!r} has {unknown[0]!r}, which is not in model.alphabet {self.alphabet!r}; add it "
                "there or choose other data."
            )
        return np.array([1 + self.alphabet.index(character) for character in text], np.int32)


@dataclasses.dataclass(frozen=True)
class HiddenSpeech(Speech):
    """The codes of tokens that are hidden, whatever is said in them.

    Hidden are spans of 10 tokens, half of the clip if that is less, from tokens that are drawn: 4 % of all, rounded, at
    least one. Spans may overlap.
    """

    START, SPAN = 0.04, 10

    @property
    def fields(self) -> Mapping[str, Field]:
        """Besides the samples: mask, float32 [T], 1 where a token is hidden."""
        return {**super().fields, "mask": Field((self.seq_len,), np.float32)}

    def example(self, row: Row, rng: np.random.Generator) -> Row:
        """Hides tokens of the clip."""
        return {**super().example(row, rng), "mask": self._hide(self.num_tokens(row), rng)}

    def _hide(self, num_tokens: int, rng: np.random.Generator) -> Float32[np.ndarray, " tokens"]:
        span = min(self.SPAN, max(1, num_tokens // 2))
        starts = num_tokens - span + 1
        drawn = rng.choice(starts, min(starts, max(1, round(self.START * num_tokens))), replace=False)
        mask = np.zeros(self.seq_len, np.float32)
        mask[drawn[:, None] + np.arange(span)] = 1
        return mask
