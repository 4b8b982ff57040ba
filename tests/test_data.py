"""Rows, batches and positions: what a run reads depends on (seed, k) alone."""

import itertools
import json
import multiprocessing
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapfx.train.data import Batches, BatchStream, TextSource, decode, encode, eval_batches
from overlapfx.train.objectives import NextToken
from overlapfx.train.packing import Rows

SEQ_LEN = 4
KEYS = {"inputs": np.int32, "targets": np.int32, "mask": np.float32, "segments": np.int32}


def make_source(*texts: bytes) -> TextSource:
    return TextSource("test", [{"text": text} for text in texts])


def numbered(count: int) -> TextSource:
    """Documents that fill one row each: the first target of every row is its number, counted from 1."""
    return make_source(*(bytes([i + 1]) * (SEQ_LEN - 1) for i in range(count)))


def ids(batch) -> list[int]:
    return batch["targets"][:, 0].tolist()


def assert_equal(a, b) -> None:
    assert a.keys() == b.keys() == KEYS.keys()
    for key, dtype in KEYS.items():
        assert a[key].dtype == b[key].dtype == dtype
        np.testing.assert_array_equal(a[key], b[key])


@settings(deadline=None)
@given(st.text())
def test_decode_inverts_encode(text):
    tokens = encode(text)
    assert tokens.dtype == np.int32
    assert decode(tokens) == text.replace("\0", "")


def test_decode_takes_any_bytes_and_nothing_else():
    assert decode(np.array([0, 104, 105, 0])) == "hi"
    assert decode(np.array([0xC3])) == "\ufffd"
    with pytest.raises(ValueError, match="from -1 to 256 cannot be decoded"):
        decode(np.array([256, -1]))


def test_rows_by_hand():
    rows = Rows(make_source(b"abc", b"", b"d\0e"), 4)
    assert (len(rows), rows.num_targets) == (2, 7)
    a, b, c, d, e = b"abcde"
    expected = [
        {"inputs": [0, a, b, c], "targets": [a, b, c, 0], "mask": [1, 1, 1, 1], "segments": [1, 1, 1, 1]},
        {"inputs": [0, d, e, 0], "targets": [d, e, 0, 0], "mask": [1, 1, 1, 0], "segments": [1, 1, 1, 0]},
    ]
    for row, by_hand in zip(rows, expected, strict=True):
        assert_equal(row, {key: np.array(by_hand[key], dtype) for key, dtype in KEYS.items()})
    first = Rows(make_source(b"abc", b"", b"de"), 5)[0]
    assert first["inputs"].tolist() == [0, a, b, c, 0]
    assert first["targets"].tolist() == [a, b, c, 0, d]
    assert first["segments"].tolist() == [1, 1, 1, 1, 2]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=12), min_size=1, max_size=6), st.integers(1, 9))
def test_every_byte_and_every_end_is_a_target_once(texts, seq_len):
    texts = [text.replace(b"\0", b"") for text in texts]
    stream = b"".join(b"\0" + text for text in texts if text)
    if not stream:
        with pytest.raises(ValueError, match="no text in any of its"):
            Rows(make_source(*texts), seq_len)
        return
    rows = list(Rows(make_source(*texts), seq_len))
    joined = {key: np.concatenate([row[key] for row in rows]) for key in KEYS}
    counts = joined["mask"] == 1
    assert joined["inputs"][counts].astype(np.uint8).tobytes() == stream
    assert joined["targets"][counts].astype(np.uint8).tobytes() == stream[1:] + b"\0"
    assert not counts[len(stream) :].any()
    assert (joined["segments"] > 0).tolist() == counts.tolist()
    for row in rows:  # a document begins at a separator, and with a new number
        new = np.diff(row["segments"], prepend=row["segments"][0]) > 0
        assert (row["inputs"][new] == 0).all()
        assert new.sum() == ((row["inputs"] == 0) & (row["mask"] == 1))[1:].sum()


def test_rows_refuse():
    with pytest.raises(ValueError, match="seq_len is 0"):
        Rows(numbered(1), 0)
    with pytest.raises(IndexError, match="row 3 of 3"):
        Rows(numbered(3), SEQ_LEN)[3]


def stream_of(count: int, **options) -> BatchStream:
    return BatchStream(numbered(count), **{"objective": NextToken(SEQ_LEN), "global_batch": 4, "seed": 0, **options})


def read(streams, number: int) -> list[list[int]]:
    """The ids of the next `number` global batches, joined from the streams of all processes."""
    return [list(itertools.chain.from_iterable(ids(next(stream)) for stream in streams)) for _ in range(number)]


@pytest.mark.parametrize("count", [40, 42], ids=["epoch ends with a batch", "epoch ends inside a batch"])
@pytest.mark.parametrize(("stop", "before", "after"), [(3, 1, 4), (10, 4, 2), (10, 1, 1), (13, 2, 1)])
def test_resume_continues_the_log(count, stop, before, after):
    """Case C21: an epoch is 10 batches of 4, or two rows more."""
    with stream_of(count) as whole:
        log = read([whole], 24)
    first = [stream_of(count, process_index=i, process_count=before) for i in range(before)]
    resumed_log = read(first, stop)
    states = [json.loads(json.dumps(stream.get_state())) for stream in first]
    assert all(state == states[0] for state in states)
    second = [stream_of(count, process_index=i, process_count=after) for i in range(after)]
    for stream in second:
        stream.set_state(states[0])
    resumed_log += read(second, 24 - stop)
    for stream in first + second:
        stream.close()
    assert resumed_log == log


def test_every_epoch_is_a_new_order_of_all_rows():
    batches = Batches(numbered(40), objective=NextToken(SEQ_LEN), global_batch=4, seed=0)
    epochs = [[n for k in range(10 * e, 10 * e + 10) for n in ids(batches[k])] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(1, 41))
    other = Batches(numbered(40), objective=NextToken(SEQ_LEN), global_batch=4, seed=1)
    orders = [*epochs, [n for k in range(10) for n in ids(other[k])], list(range(1, 41))]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_batch_does_not_depend_on_what_was_read_before():
    options = {"objective": NextToken(SEQ_LEN), "global_batch": 4, "seed": 3}
    batches = Batches(numbered(10), **options)
    with stream_of(10, seed=3) as in_order, stream_of(10, seed=3, start=6) as later:
        for k, batch in zip(range(6), in_order, strict=False):
            assert_equal(batch, batches[k])
        assert_equal(next(later), batches[6])
    assert_equal(batches[2], Batches(numbered(10), **options)[2])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_have_runs_of_the_same_batch(count):
    options = {"objective": NextToken(SEQ_LEN), "global_batch": 4, "seed": 0}
    whole = Batches(numbered(10), **options)[5]
    parts = [Batches(numbered(10), **options, process_index=i, process_count=count)[5] for i in range(count)]
    assert parts[0]["inputs"].shape == (4 // count, SEQ_LEN)
    assert_equal({key: np.concatenate([part[key] for part in parts]) for key in KEYS}, whole)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"process_count": 3}, "data.global_batch 4 does not divide evenly over 3 processes; use 3 or 6."),
        ({"process_count": 8}, "data.global_batch 4 does not divide evenly over 8 processes; use 8."),
        ({"process_index": 2, "process_count": 2}, "Process 2 of 2 has no rows of a batch; processes count from 0."),
        ({"global_batch": 0}, "data.global_batch is 0; it must be at least 1."),
        ({"num_workers": -1}, "A stream of batches has start 0 and num_workers -1; use 0 or more for both."),
    ],
)
def test_stream_refuses(options, sentence):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole sentence is compared
        stream_of(10, **options)
    assert str(caught.value) == sentence


def test_position_among_other_batches_is_refused():
    state = stream_of(10).get_state()
    stream = stream_of(12, seed=7)
    with pytest.raises(ValueError, match=r"other batches \(num_rows was 10, is 12, seed was 0, is 7\)"):
        stream.set_state(state)
    for broken in ({}, {"next_batch": -1, "fingerprint": {}}, {"next_batch": "3", "fingerprint": {}}):
        with pytest.raises(ValueError, match="is not a data position"):
            stream.set_state(broken)
    assert stream.get_state()["next_batch"] == 0


class Records:
    """Numbered documents whose reading can be watched, and made to fail."""

    def __init__(self, count: int) -> None:
        self.read: set[int] = set()
        self.failing = False
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict:
        if self.failing:
            raise RuntimeError("no disk")
        self.read.add(index)
        return {"text": bytes([index + 1]) * (SEQ_LEN - 1)}


def test_failed_read_loses_no_batch():
    records = Records(10)
    with BatchStream(TextSource("test", records), objective=NextToken(SEQ_LEN), global_batch=2, seed=0) as stream:
        records.failing = True
        for _ in range(2):
            with pytest.raises(ValueError, match=r"Record \d of test cannot be read \(no disk\)"):
                next(stream)
        assert stream.get_state()["next_batch"] == 0
        records.failing = False
        whole = BatchStream(numbered(10), objective=NextToken(SEQ_LEN), global_batch=2, seed=0)
        assert read([stream], 3) == read([whole], 3)


def test_reads_ahead_until_closed():
    records = Records(40)
    before = set(threading.enumerate())
    stream = BatchStream(TextSource("test", records), objective=NextToken(SEQ_LEN), global_batch=4, seed=0)
    records.read.clear()
    next(stream)
    deadline = time.monotonic() + 20
    while len(records.read) < 12 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(records.read) >= 12  # nobody asked for more than the first 4
    assert stream.get_state()["next_batch"] == 1
    stream.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(20)
        assert not thread.is_alive()
    assert ids(next(stream)) == ids(Batches(numbered(40), objective=NextToken(SEQ_LEN), global_batch=4, seed=0)[1])
    stream.close()


@pytest.mark.slow
def test_worker_processes_change_nothing():
    batches = Batches(numbered(40), objective=NextToken(SEQ_LEN), global_batch=4, seed=0)
    with stream_of(40, num_workers=2, start=5) as stream:
        for k in range(5, 12):
            assert_equal(next(stream), batches[k])
        assert len(multiprocessing.active_children()) == 2
    assert multiprocessing.active_children() == []


def test_changed_document_is_refused():
    records = [{"text": b"abc"}, {"text": b"de"}]
    source = TextSource("test", records)
    records[1] = {"text": b"def"}
    with pytest.raises(ValueError, match="Record 1 of test has 3 bytes of text where 2 were counted before"):
        Rows(source, SEQ_LEN)[1]


def evaluation(count: int, **options) -> list:
    return list(eval_batches(numbered(count), **{"objective": NextToken(SEQ_LEN), "global_batch": 4, **options}))


def test_evaluation_reads_everything_once_in_order():
    batches = evaluation(10)
    assert [ids(batch) for batch in batches] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0]]
    assert batches[2]["mask"].tolist() == [[1] * 4, [1] * 4, [0] * 4, [0] * 4]
    assert batches[2]["segments"].tolist() == [[1] * 4, [1] * 4, [0] * 4, [0] * 4]
    assert [ids(batch) for batch in evaluation(10, num_batches=7)] == [ids(batch) for batch in batches]


def test_short_evaluation_is_spread_over_the_source():
    assert [ids(batch) for batch in evaluation(40, num_batches=2)] == [[1, 6, 11, 16], [21, 26, 31, 36]]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 20), st.sampled_from([1, 2, 4]), st.sampled_from([None, 1, 3]))
def test_evaluation_is_the_same_for_every_number_of_processes(count, processes, number):
    whole = evaluation(count, num_batches=number)
    parts = [evaluation(count, num_batches=number, process_index=i, process_count=processes) for i in range(processes)]
    for batch, *own in zip(whole, *parts, strict=True):
        assert_equal({key: np.concatenate([part[key] for part in own]) for key in KEYS}, batch)


def test_evaluation_refuses():
    with pytest.raises(ValueError, match="number of evaluation batches is 0"):
        evaluation(10, num_batches=0)
    with pytest.raises(ValueError, match="does not divide evenly over 3 processes"):
        eval_batches(numbered(10), objective=NextToken(SEQ_LEN), global_batch=4, process_count=3)
