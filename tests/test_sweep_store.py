"""What a sweep keeps on disk, whatever happens to it."""

from __future__ import annotations

import json
import os

import pytest

from launch.sweep_store import FORMAT, Store, read


def filled(folder, *keys):
    with Store(folder) as store:
        for key in keys:
            store.add({"key": key, "outcome": "ok", "step_s": 1.5})
    return folder / "results.jsonl"


class TestStore:
    def test_records_come_back(self, tmp_path):
        path = filled(tmp_path / "deep" / "er", "a", "b")
        with Store(tmp_path / "deep" / "er") as store:
            assert store.results == {
                key: {"format": FORMAT, "key": key, "outcome": "ok", "step_s": 1.5} for key in ("a", "b")
            }
            assert store.torn == 0
        assert path.read_text().count("\n") == 2

    def test_newest_record_of_a_key_counts_and_older_ones_stay(self, tmp_path):
        path = filled(tmp_path, "a")
        with Store(tmp_path) as store:
            store.add({"key": "a", "outcome": "error"})
        with Store(tmp_path) as store:
            assert store.results["a"]["outcome"] == "error"
        assert path.read_text().count("\n") == 2

    @pytest.mark.parametrize("left", range(1, 50, 7))
    def test_torn_line_costs_only_itself(self, tmp_path, left):
        path = filled(tmp_path, "a", "b")
        whole = path.read_bytes()
        second = whole.index(b"\n") + 1
        path.write_bytes(whole[: second + left])
        with Store(tmp_path) as store:
            assert (list(store.results), store.torn) == (["a"], 1)
            store.add({"key": "c"})
        with Store(tmp_path) as store:
            assert (list(store.results), store.torn) == (["a", "c"], 1)
        assert path.read_bytes().startswith(whole[: second + left])

    def test_line_that_only_lacks_its_end_counts(self, tmp_path):
        path = filled(tmp_path, "a", "b")
        path.write_bytes(path.read_bytes()[:-1])
        with Store(tmp_path) as store:
            assert (list(store.results), store.torn) == (["a", "b"], 0)
            store.add({"key": "c"})
        with Store(tmp_path) as store:
            assert list(store.results) == ["a", "b", "c"]

    def test_every_record_is_on_disk_before_the_next(self, tmp_path, monkeypatch):
        synced = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
        with Store(tmp_path) as store:
            store.add({"key": "a"})
            store.add({"key": "b"})
            sizes = [len(line) + 1 for line in store.path.read_text().split("\n")[:2]]
        assert synced[-2:] == [sizes[0], sum(sizes)]

    def test_records_of_another_format_are_left_alone(self, tmp_path):
        path = filled(tmp_path, "a")
        path.write_text(path.read_text() + json.dumps({"format": FORMAT + 1, "key": "b"}) + "\n")
        with Store(tmp_path) as store:
            assert list(store.results) == ["a"]

    def test_in_use(self, tmp_path):
        with Store(tmp_path), pytest.raises(ValueError, match=f"in use by process {os.getpid()} on "):
            Store(tmp_path)
        Store(tmp_path).close()

    def test_foreign_file_is_refused_and_not_touched(self, tmp_path):
        path = tmp_path / "results.jsonl"
        path.write_text('{"step": 1}\nprecious\n')
        with pytest.raises(ValueError, match="line 1 of .*results.jsonl is no result of a sweep"):
            Store(tmp_path)
        assert path.read_text() == '{"step": 1}\nprecious\n'
        path.unlink()
        Store(tmp_path).close()  # the refusal left no lock

    def test_file_in_place_of_the_directory(self, tmp_path):
        (tmp_path / "file").write_text("x")
        with pytest.raises(ValueError, match="which is a file; give a directory"):
            Store(tmp_path / "file")
        with pytest.raises(ValueError, match="cannot be written to"):
            Store(tmp_path / "file" / "below")


def test_results_can_be_read_while_another_process_adds_to_them(tmp_path):
    with Store(tmp_path) as store:
        store.add({"key": "a", "step_s": 1.0})
        assert read(tmp_path).results["a"]["step_s"] == 1.0
        store.add({"key": "b"})
        assert set(read(tmp_path).results) == {"a", "b"}
    assert read(tmp_path / "elsewhere").results == {}
    (tmp_path / "results.jsonl").write_text("something else\n")
    with pytest.raises(ValueError, match="line 1 of .* is no result of a sweep; choose another --results."):
        read(tmp_path, "--results")
    with pytest.raises(ValueError, match=r"--results is .*results\.jsonl, which is a file; give a directory\."):
        read(tmp_path / "results.jsonl", "--results")
