"""What models are asked to predict holds the text, hides the right share of it, and depends on (seed, k) alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapfx.train.data import Batches, BatchStream, TextSource, eval_batches
from overlapfx.train.objectives import MaskedTokens, NextToken, SpanCorruption
from overlapfx.train.packing import SEPARATOR, Rows

OBJECTIVES = [NextToken(24), MaskedTokens(24, 264), SpanCorruption(24, 16, 288)]


def source(*texts: bytes) -> TextSource:
    return TextSource("test", [{"text": text} for text in texts])


def long_source() -> TextSource:
    rng = np.random.default_rng(0)
    return source(*(rng.integers(1, 256, n, np.uint8).tobytes() for n in (200, 1, 50, 333)))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: type(o).__name__)
def test_batches_depend_on_seed_and_number_alone(objective):
    options = {"objective": objective, "global_batch": 4, "seed": 3}
    whole = Batches(long_source(), **options)
    assert {name: (a.shape[1:], a.dtype) for name, a in whole[0].items()} == {
        name: (field.shape, np.dtype(field.dtype)) for name, field in objective.fields.items()
    }
    parts = [Batches(long_source(), **options, process_index=i, process_count=2)[7] for i in (0, 1)]
    for name, array in whole[7].items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
    with BatchStream(long_source(), **options, start=6) as stream:
        next(stream)
        for name, array in next(stream).items():
            np.testing.assert_array_equal(array, whole[7][name])
    other = Batches(long_source(), **{**options, "seed": 4})
    assert any((other[7][name] != array).any() for name, array in whole[7].items())


@pytest.mark.parametrize("objective", OBJECTIVES[1:], ids=lambda o: type(o).__name__)
def test_every_epoch_hides_other_tokens_but_evaluations_are_alike(objective):
    num_rows = len(objective.rows(long_source()))
    batches = Batches(long_source(), objective=objective, global_batch=num_rows, seed=0)
    first, second = batches[0], batches[1]  # the same rows in another order

    def hidden(batch):
        return sorted(batch["inputs"].tolist())

    assert hidden(first) != hidden(second)
    again = [next(eval_batches(long_source(), objective=objective, global_batch=4)) for _ in range(2)]
    assert all((again[0][name] == again[1][name]).all() for name in again[0])


def test_a_position_among_other_examples_is_refused():
    def stream(objective):
        return BatchStream(long_source(), objective=objective, global_batch=4, seed=0)

    position = stream(MaskedTokens(24, 264)).get_state()
    stream(MaskedTokens(24, 264)).set_state(position)
    with pytest.raises(ValueError, match=r"objective was 'MaskedTokens\(seq_len=24, .*is 'NextToken\(seq_len=24\)'"):
        stream(NextToken(24)).set_state(position)


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4), st.integers(0, 100))
def test_masked_tokens_hide_a_share_of_the_bytes(texts, seed):
    texts = [text.replace(b"\0", b"a") for text in texts]
    objective = MaskedTokens(24, 264)
    for row in Rows(source(*texts), 24):
        example = objective.example(row, np.random.default_rng(seed))
        hidden = example["mask"] == 1
        is_byte = (row["segments"] > 0) & (row["inputs"] != SEPARATOR)
        assert not (hidden & ~is_byte).any()
        assert hidden.sum() == (max(1, round(0.15 * is_byte.sum())) if is_byte.any() else 0)
        np.testing.assert_array_equal(example["targets"], row["inputs"])
        np.testing.assert_array_equal(example["segments"], row["segments"])
        np.testing.assert_array_equal(example["inputs"][~hidden], row["inputs"][~hidden])
        assert ((example["inputs"][hidden] == 256) | (example["inputs"][hidden] < 256)).all()
        assert (example["inputs"][hidden] != SEPARATOR).all()


def test_masked_tokens_are_mostly_the_mask():
    # 30000 bytes of one value, 4500 hidden: five standard deviations of the 80 % and the 10 % that stay.
    row = {"inputs": np.full(30000, 7, np.int32), "segments": np.ones(30000, np.int32)}
    example = MaskedTokens(30000, 257).example(row, np.random.default_rng(0))
    shown = example["inputs"][example["mask"] == 1]
    assert len(shown) == 4500
    assert abs((shown == 256).mean() - 0.8) < 0.03
    assert abs((shown == 7).mean() - 0.1) < 0.023
    assert len(set(shown.tolist())) > 200


def restored(example, vocab_size):
    """The text that inputs and targets together spell."""
    targets = example["targets"][example["mask"] == 1].tolist()
    spans, sentinel = {}, None
    for token in targets:
        if token > 255:
            sentinel = token
            spans[sentinel] = []
        else:
            spans[sentinel].append(token)
    assert list(spans) == [vocab_size - 1 - k for k in range(len(spans))]
    assert spans.pop(sentinel) == []  # the last one ends the targets
    text = []
    for token in example["inputs"][example["segments"] == 1].tolist():
        text += spans.pop(token) if token > 255 else [token]
    assert not spans
    return text


@given(st.integers(1, 300), st.integers(0, 1000))
def test_spans_put_back_are_the_text(length, seed):
    objective = SpanCorruption(24, 16, 288)
    rows = Rows(source(bytes(1 + k % 255 for k in range(length))), objective.text_len)
    for row in rows:
        example = objective.example(row, np.random.default_rng(seed))
        text = row["inputs"][row["segments"] > 0].tolist()
        assert restored(example, 288) == text
        num_hidden = len(text) + (example["inputs"] > 255).sum() - (example["segments"] == 1).sum()
        assert num_hidden == (max(1, round(0.15 * len(text))) if len(text) > 1 else 0)
        assert (np.diff(np.flatnonzero(example["inputs"] > 255)) > 1).all(), "spans do not touch"


def test_spans_fill_the_inputs_and_lie_anywhere():
    # By hand: of 568 tokens 85 are cut out in 28 spans, which leaves 483 + 28 = 511; of 569 are left 484 + 28.
    objective = SpanCorruption(512, 114, 285)
    assert objective.text_len == 569
    row = {"inputs": np.arange(569, dtype=np.int32) % 255 + 1, "segments": np.ones(569, np.int32)}
    examples = [objective.example(row, np.random.default_rng(seed)) for seed in range(200)]
    assert all(e["segments"].all() and e["mask"].sum() == 114 for e in examples)
    first, last = (sum(e["inputs"][at] > 255 for e in examples) for at in (0, -1))
    assert 0 < first < 60 and 0 < last < 60


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: MaskedTokens(8, 256), "model.vocab_size is 256, but there are 256 byte values and a mask; use at"),
        (lambda: SpanCorruption(512, 113, 512), "model.target_len is 113, but what is cut out of the text for 512"),
        (lambda: SpanCorruption(512, 114, 284), "model.vocab_size is 284, but there are 256 byte values and 29"),
        (lambda: SpanCorruption(1, 114, 284), "model.seq_len is 1; cutting spans out of a text takes at least 2"),
    ],
)
def test_objectives_refuse(make, sentence):
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*\.$"):
        make()
