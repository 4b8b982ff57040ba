"""Records that cannot be read are named and counted; a run passes over as many as it may, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_data_sources import TEXT, config, prepare_other

from overlapfx.train import directories
from overlapfx.train.data import BatchStream, make_source
from overlapfx.train.documents import Shard, TextSource
from overlapfx.train.objectives import NextToken
from overlapfx.train.packing import Rows
from overlapfx.train.stops import EXIT_STORAGE, DataError


class Records:
    """Ten documents in two files; those in `broken` raise, or have no text."""

    def __init__(self, broken: dict[int, object]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, object]:
        fault = self.broken.get(index)
        if isinstance(fault, Exception):
            raise fault
        return {"text": None if fault == "empty" else b"%d" % index * 20}


SHARDS = (Shard("a.array_record", 0, 6), Shard("b.array_record", 4, 4))
BROKEN = {3: RuntimeError("Corrupted chunk"), 7: "empty"}


def source(broken: dict, max_skipped: int, cache: Path | None = None) -> TextSource:
    for shard in SHARDS if cache else ():
        if not Path(shard.file).exists():  # a file that is written anew is counted anew
            Path(shard.file).touch()
    return TextSource("toy", Records(broken), SHARDS, cache, max_skipped)


def test_the_first_of_too_many_is_named_with_its_file_and_number() -> None:
    with pytest.raises(DataError) as error:
        source(BROKEN, 1)
    sentence = str(error.value)
    assert sentence.startswith("Record 3 of a.array_record cannot be read (Corrupted chunk)")
    assert sentence.endswith("(2 such records, data.max_skipped_records is 1).") and "\n" not in sentence
    assert isinstance(error.value, ValueError)  # at the start it is the user's to mend
    assert error.value.exit_code == EXIT_STORAGE  # in the middle of a run it ends it


def test_as_many_as_allowed_are_empty_documents() -> None:
    found = source(BROKEN, 2)
    assert found.skipped == (
        "Record 3 of a.array_record cannot be read and is skipped.",
        "Record 5 of b.array_record cannot be read and is skipped.",  # its second, which is number 5 of the file
    )
    assert found.lengths.tolist() == [20, 20, 20, 0, 20, 20, 20, 0, 20, 20]
    rows = Rows(found, 8)
    seen = b"".join(bytes(rows[i]["targets"].astype(np.uint8).tobytes()) for i in range(len(rows)))
    assert b"3" not in seen and b"7" not in seen and seen.count(b"9") == 20
    assert source({}, 0).skipped == ()


def test_kept_lengths_remember_what_is_broken(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = source(BROKEN, 2, tmp_path / "cache")
    monkeypatch.setattr(TextSource, "_count_lengths", lambda self: pytest.fail("counted again"))
    assert source(BROKEN, 2, tmp_path / "cache").skipped == first.skipped
    with pytest.raises(DataError, match=r"Record 3 of a.array_record .*\(2 such records"):
        source(BROKEN, 0, tmp_path / "cache")


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"pickle", None])
def test_a_damaged_list_of_lengths_is_made_anew_and_never_unpickled(tmp_path: Path, monkeypatch, content) -> None:
    monkeypatch.chdir(tmp_path)
    want = source({}, 0, tmp_path / "cache").lengths
    (kept,) = (tmp_path / "cache").iterdir()
    if content is None:  # an array of objects, which NumPy would unpickle, and so run, if it were allowed to
        np.save(kept, np.array([Bomb()], dtype=object), allow_pickle=True)
    else:
        kept.write_bytes(content)
    np.testing.assert_array_equal(source({}, 0, tmp_path / "cache").lengths, want)
    np.testing.assert_array_equal(np.load(kept, allow_pickle=False), want)


class Bomb:
    def __reduce__(self) -> tuple:
        return pytest.fail, ("a file was unpickled",)


def test_a_record_that_breaks_later_ends_the_run_with_its_name() -> None:
    records = Records({})
    text = TextSource("toy", records, SHARDS)
    records.broken = {i: RuntimeError("Input/output error") for i in range(10)}
    with (
        BatchStream(text, objective=NextToken(8), global_batch=2, seed=0) as stream,
        pytest.raises(DataError, match=r"Record \d of [ab]\.array_record cannot be read \(Input/output error\)"),
    ):
        next(stream)


def test_a_damaged_file_loses_its_records_only(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (file,) = prepare_other(tmp_path, TEXT).glob("*train*")
    content = file.read_bytes()
    file.write_bytes(content[:5000] + bytes(50) + content[5050:])
    data = config("other", tmp_path)
    with pytest.raises(ValueError, match=rf"Record \d+ of {file} cannot be read .* data\.max_skipped_records is 0"):
        make_source(data, "train")
    allowed = type(data)(**{**vars(data), "max_skipped_records": 100})
    found = make_source(allowed, "train")
    assert 0 < len(found.skipped) < 100
    assert all(str(file) in sentence for sentence in found.skipped)
    assert (found.lengths > 0).sum() == 100 - len(found.skipped)
    assert directories.cache_dir().is_relative_to(tmp_path)
