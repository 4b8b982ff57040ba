"""What a model learns to predict: rows of text made into training examples."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
from jaxtyping import Bool

from overlapfx.train.packing import SEPARATOR, VOCAB_SIZE, Documents, Row, Rows


@dataclasses.dataclass(frozen=True)
class Field:
    """One array of an example; a batch has a dimension of examples before."""

    shape: tuple[int, ...]
    dtype: Any


class Objective(Protocol):
    """How a model is trained; equal objectives make equal examples, and their repr is kept with saved positions."""

    @property
    def sample_rate(self) -> int | None:
        """Of the speech that it reads, in samples per second; None if it reads text."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The arrays of an example; zeros are an example that counts nothing."""

    def rows(self, source: Any) -> Any:
        """The rows that examples are made of, a sequence; `source`: a TextSource, or a SpeechSource if it has a
        sample rate.
        """

    def example(self, row: Row, rng: np.random.Generator) -> Row:
        """The example made of a row; all chance comes from `rng`."""


def _text_fields(seq_len: int) -> dict[str, Field]:
    tokens = Field((seq_len,), np.int32)
    return {"inputs": tokens, "targets": tokens, "mask": Field((seq_len,), np.float32), "segments": tokens}


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Every token predicts the one that follows; examples are those of `packing.Rows`."""

    sample_rate: ClassVar[None] = None
    seq_len: int

    @property
    def fields(self) -> Mapping[str, Field]:
        """As `packing.Rows` says."""
        return _text_fields(self.seq_len)

    def rows(self, documents: Documents) -> Rows:
        """Rows of seq_len tokens."""
        return Rows(documents, self.seq_len)

    def example(self, row: Row, rng: np.random.Generator) -> Row:
        """The row itself."""
        return row


@dataclasses.dataclass(frozen=True)
class MaskedTokens:
    """Some bytes of a row are hidden and have to be told from the others (Devlin et al., 2018).

    Chosen are 15 % of the bytes, rounded, at least one; separators and padding never. Of the chosen, 80 % are shown as
    the token MASK, 10 % as a random byte, 10 % as they are. inputs: what is shown; targets: what was there; mask: 1
    where chosen; segments: as in the row.
    """

    sample_rate: ClassVar[None] = None
    seq_len: int
    vocab_size: int

    MASK = VOCAB_SIZE  # the first token after the bytes

    def __post_init__(self) -> None:
        if self.vocab_size <= self.MASK:
            raise ValueError(
                f"model.vocab_size is {self.vocab_size}, but there are {VOCAB_SIZE} byte values and a mask; use at "
                f"least {self.MASK + 1}."
            )

    @property
    def fields(self) -> Mapping[str, Field]:
        """inputs, targets, segments (int32) and mask (float32), all [T]."""
        return _text_fields(self.seq_len)

    def rows(self, documents: Documents) -> Rows:
        """Rows of seq_len tokens."""
        return Rows(documents, self.seq_len)

    def example(self, row: Row, rng: np.random.Generator) -> Row:
        """Hides bytes of the row's inputs."""
        tokens = row["inputs"]
        bytes_at = np.flatnonzero((row["segments"] > 0) & (tokens != SEPARATOR))
        chosen = rng.choice(bytes_at, min(len(bytes_at), max(1, round(0.15 * len(bytes_at)))), replace=False)
        lot = rng.random(len(chosen))
        shown = np.where(lot < 0.9, rng.integers(1, VOCAB_SIZE, len(chosen)), tokens[chosen])
        inputs, mask = tokens.copy(), np.zeros(self.seq_len, np.float32)
        inputs[chosen] = np.where(lot < 0.8, self.MASK, shown)
        mask[chosen] = 1
        return {"inputs": inputs, "targets": tokens, "mask": mask, "segments": row["segments"]}


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """Spans of a text are cut out and have to be written in order (Raffel et al., 2019).

    15 % of the tokens are cut out, in spans of 3 on average that do not touch. inputs [seq_len]: the text with a
    sentinel for each span; segments: 1 where text is, 0 on padding. targets [target_len]: each span after its sentinel,
    one more sentinel as the end; mask: 1 on all of these. Sentinels are the last tokens of the vocabulary, the first of
    a row vocab_size - 1, the next vocab_size - 2. As much text is read as fills the inputs.
    """

    sample_rate: ClassVar[None] = None
    seq_len: int
    target_len: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.seq_len < 2:
            raise ValueError(f"model.seq_len is {self.seq_len}; cutting spans out of a text takes at least 2.")
        num_cut, num_spans = _cut(self.text_len)
        if self.target_len < num_cut + num_spans + 1:
            raise ValueError(
                f"model.target_len is {self.target_len}, but what is cut out of the text for {self.seq_len} inputs "
                f"(model.seq_len) takes {num_cut + num_spans + 1} tokens; use at least that."
            )
        if self.vocab_size < VOCAB_SIZE + num_spans + 1:
            raise ValueError(
                f"model.vocab_size is {self.vocab_size}, but there are {VOCAB_SIZE} byte values and {num_spans + 1} "
                f"sentinels; use at least {VOCAB_SIZE + num_spans + 1}."
            )

    @property
    def text_len(self) -> int:
        """Tokens of text in a row."""
        num_tokens = self.seq_len
        while True:
            num_cut, num_spans = _cut(num_tokens + 1)
            if num_tokens + 1 - num_cut + num_spans > self.seq_len:
                return num_tokens
            num_tokens += 1

    @property
    def fields(self) -> Mapping[str, Field]:
        """inputs and segments [S], targets and mask [T]; int32 but for the mask, which is float32."""
        inputs, targets = Field((self.seq_len,), np.int32), Field((self.target_len,), np.int32)
        mask = Field((self.target_len,), np.float32)
        return {"inputs": inputs, "targets": targets, "mask": mask, "segments": inputs}

    def rows(self, documents: Documents) -> Rows:
        """Rows of as many tokens as fill the inputs; a text may go on from one document to the next."""
        return Rows(documents, self.text_len)

    def example(self, row: Row, rng: np.random.Generator) -> Row:
        """Cuts spans out of the row's inputs."""
        tokens = row["inputs"][row["segments"] > 0]
        is_cut = _choose_spans(len(tokens), rng)
        starts = is_cut & ~np.concatenate([[False], is_cut[:-1]])
        sentinels = self.vocab_size - np.cumsum(starts)
        inputs = np.where(starts, sentinels, tokens)[starts | ~is_cut]
        # In the targets a sentinel comes before the first token of its span.
        spans = np.stack([sentinels, tokens], axis=1)[np.stack([starts, is_cut], axis=1)]
        targets = np.concatenate([spans, [self.vocab_size - 1 - starts.sum()]])
        example = {name: np.zeros(field.shape, field.dtype) for name, field in self.fields.items()}
        example["inputs"][: len(inputs)], example["segments"][: len(inputs)] = inputs, 1
        example["targets"][: len(targets)], example["mask"][: len(targets)] = targets, 1
        return example


def _cut(num_tokens: int) -> tuple[int, int]:
    """How many of `num_tokens` tokens are cut out, in how many spans; nothing of a single token."""
    num_cut = min(max(1, round(0.15 * num_tokens)), num_tokens - 1)
    return num_cut, min(num_cut, max(1, round(num_cut / 3)))


def _choose_spans(num_tokens: int, rng: np.random.Generator) -> Bool[np.ndarray, " tokens"]:
    """Which tokens are cut out: spans of random lengths with text of random lengths between, before and after."""
    num_cut, num_spans = _cut(num_tokens)
    is_cut = np.zeros(num_tokens, bool)
    if num_cut:
        cut = _lengths(num_cut, num_spans, rng)
        kept = _lengths(num_tokens - num_cut + 2, num_spans + 1, rng)
        kept[[0, -1]] -= 1  # there may be nothing before the first span or after the last one
        ends = np.cumsum(kept[:-1] + cut)
        for end, length in zip(ends, cut, strict=True):
            is_cut[end - length : end] = True
    return is_cut


def _lengths(total: int, num_parts: int, rng: np.random.Generator) -> np.ndarray:
    """Random lengths of `num_parts` parts of at least 1 that add up to `total`, every such division as likely."""
    inner = np.sort(rng.choice(total - 1, num_parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], inner, [total]]))
