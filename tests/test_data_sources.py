"""Data sets: the standard library is prepared once, safely and without TensorFlow; others are taken as they are."""

import collections
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from overlapfx.config import DataConfig
from overlapfx.train import pystdlib
from overlapfx.train.data import make_source
from overlapfx.train.directories import cache_dir
from overlapfx.train.documents import TextSource

PROJECT = Path(__file__).resolve().parent.parent
FILES = [pystdlib.SourceFile(f"module_{i}.py", f"VALUE = {i}\n".encode()) for i in range(60)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "overlapfx"


@pytest.fixture
def small_library(monkeypatch) -> list[pystdlib.SourceFile]:
    monkeypatch.setattr(pystdlib, "collect", lambda: FILES)
    return FILES


def config(name: str = "pystdlib", data_dir: object = "") -> DataConfig:
    return DataConfig(name=name, data_dir=str(data_dir), global_batch=8, num_workers=0, seed=0)


def texts(source: TextSource) -> list[bytes]:
    return [source[i].tobytes() for i in range(len(source))]


def snapshot(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


def test_collect_takes_library_files_in_order(tmp_path):
    kept = {"b.py": b"b", "a.py": b"", "pkg/__init__.py": "\N{SNOWMAN}".encode(), "pkg/z.py": b"z"}
    skipped = {
        "test/t.py": b"t", "pkg/tests/t.py": b"t", "idlelib/i.py": b"i", "site-packages/s.py": b"s", "a.txt": b"a",
        "pkg/__pycache__/c.py": b"c", "config-3/c.py": b"c", "_sysconfigdata_x.py": b"d", "pkg/latin.py": b"\xe4",
    }  # fmt: skip
    for name, text in (kept | skipped).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    files = pystdlib.collect(tmp_path)
    assert [(file.name, file.text) for file in files] == sorted(kept.items())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"No Python source file was found .*empty; use a Python installation"):
        pystdlib.collect(tmp_path / "empty")


def test_split_depends_on_the_name_alone():
    assert [pystdlib.split_of(name) for name in ("pydoc.py", "os.py", "ast.py")] == ["train", "validation", "test"]
    shares = collections.Counter(pystdlib.split_of(f"file_{i}.py") for i in range(4000))
    assert shares.keys() == set(pystdlib.SPLITS)
    assert abs(shares["validation"] / 4000 - 0.05) < 0.01
    assert abs(shares["test"] / 4000 - 0.05) < 0.01


def test_fingerprint_changes_with_names_and_bytes():
    a, b = pystdlib.SourceFile("a.py", b"xy"), pystdlib.SourceFile("b.py", b"z")
    others = [[b, a], [a], [a, pystdlib.SourceFile("b.py", b"Z")], [pystdlib.SourceFile("a.py", b"x"), b]]
    digests = {pystdlib.fingerprint(files) for files in [[a, b], *others]}
    assert len(digests) == 5
    assert pystdlib.fingerprint([a, b]) == pystdlib.fingerprint([a, b])


def test_splits_hold_the_library_of_this_python(cache):
    sources = {split: make_source(config(), split) for split in pystdlib.SPLITS}
    before = snapshot(cache)
    expected = collections.defaultdict(list)
    for file in pystdlib.collect():
        expected[pystdlib.split_of(file.name)].append(file.text.replace(b"\0", b""))
    version = ".".join(map(str, sys.version_info[:3]))
    for split, source in sources.items():
        found = texts(source)
        assert sorted(found) == sorted(expected[split])
        assert source.lengths.tolist() == [len(text) for text in found]
        assert source.name.startswith("pystdlib/files_")
        assert source.name.endswith(f"/{version}:{split}")
    again = make_source(config(), "test")
    assert (again.name, texts(again)) == (sources["test"].name, texts(sources["test"]))
    assert snapshot(cache) == before
    assert len(sources["train"]) > 10 * len(sources["validation"]) > 0


def test_another_library_is_another_data_set(small_library, monkeypatch):
    first = make_source(config(), "train")
    changed = [pystdlib.SourceFile(file.name, file.text + b"#") for file in FILES]
    monkeypatch.setattr(pystdlib, "collect", lambda: changed)
    second = make_source(config(), "train")
    assert first.name != second.name
    assert sorted(texts(second)) == sorted(text + b"#" for text in texts(first))


def test_two_at_once_prepare_once(small_library, monkeypatch, tmp_path):
    running, most, calls = 0, 0, 0
    prepare = tfds.core.DatasetBuilder.download_and_prepare

    def slow(self, **options):
        nonlocal running, most, calls
        running, calls = running + 1, calls + 1
        most = max(most, running)
        time.sleep(0.3)
        prepare(self, **options)
        running -= 1

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", slow)
    results: list[TextSource] = []
    threads = [
        threading.Thread(target=lambda: results.append(make_source(config(data_dir=tmp_path), "train")))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, calls) == (1, 1)
    assert [texts(source) for source in results] == [texts(results[0])] * 3


def test_killed_preparation_leaves_nothing_in_the_way(small_library, monkeypatch, tmp_path):
    def killed(self, **options):
        partial = Path(self.data_dir).parent / "incomplete.ABCDEF_0.0.0"
        partial.mkdir(parents=True)
        (partial / "pystdlib-train.array_record-00000-of-00001").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", killed)
        with pytest.raises(KeyboardInterrupt):
            make_source(config(data_dir=tmp_path), "train")
    assert list(tmp_path.rglob("incomplete.*"))
    assert len(make_source(config(data_dir=tmp_path), "train")) > 40
    assert not list(tmp_path.rglob("incomplete.*"))


@pytest.mark.slow
def test_processes_need_no_tensorflow_and_write_to_the_cache_only(cache, tmp_path):
    program = textwrap.dedent("""
        import sys
        from overlapfx.config import DataConfig
        from overlapfx.train.data import BatchStream, make_source
        from overlapfx.train.objectives import NextToken
        source = make_source(DataConfig("pystdlib", "", 8, 0, 0), "train")
        with BatchStream(source, objective=NextToken(16), global_batch=2, seed=0) as stream:
            print(next(stream)["inputs"].tolist())
        assert "tensorflow" not in sys.modules
    """)
    here = tmp_path / "here"
    here.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(PROJECT),
        "JAX_PLATFORMS": "cpu",
        "XDG_CACHE_HOME": str(cache.parent),
    }
    command = [sys.executable, "-c", program]
    processes = [
        subprocess.Popen(command, cwd=here, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    (first, errors), (second, more_errors) = (process.communicate(timeout=300) for process in processes)
    assert [process.returncode for process in processes] == [0, 0], errors + more_errors
    assert first == second != ""
    assert list(here.iterdir()) == []
    assert len(list(cache.glob("pystdlib/files_*/*"))) == 1


def test_cache_follows_the_convention(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_dir() == Path("/elsewhere/overlapfx")
    for ignored in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_dir() == Path.home() / ".cache" / "overlapfx"


def test_lengths_are_counted_once(small_library, cache, monkeypatch):
    first = make_source(config(), "train")
    monkeypatch.setattr(TextSource, "_count_lengths", lambda self: pytest.fail("counted again"))
    np.testing.assert_array_equal(make_source(config(), "train").lengths, first.lengths)


def test_unwritable_cache_is_no_obstacle(small_library, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    source = make_source(config(data_dir=tmp_path / "data"), "train")
    assert source.lengths.tolist() == [len(text) for text in texts(source)]
    assert "could not be kept" in caplog.text


def prepare_other(data_dir: Path, features: dict, file_format: str = "array_record", repeat: int = 50) -> Path:
    """A small TFDS data set named "other", as somebody else would have prepared it."""

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "other"
        VERSION = tfds.core.Version("2.1.0")
        url_infos = None

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(range(100)), "test": self._generate_examples(range(100, 120))}

        def _generate_examples(self, numbers):
            for i in numbers:
                yield (
                    i,
                    {
                        key: (f"text {i} " * repeat if isinstance(kind, tfds.features.Text) else i)
                        for key, kind in features.items()
                    },
                )

    builder = Builder(data_dir=data_dir, file_format="array_record")
    builder.download_and_prepare()
    directory = Path(builder.data_dir)
    info = json.loads((directory / "dataset_info.json").read_text())
    (directory / "dataset_info.json").write_text(json.dumps({**info, "fileFormat": file_format}))
    return directory


TEXT = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=200)}


def test_lengths_follow_files_written_anew(tmp_path):
    for repeat in (50, 30):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        prepare_other(tmp_path / "data", TEXT, repeat=repeat)
        source = make_source(config("other", tmp_path / "data"), "test")
        assert source.lengths.tolist() == [len("text 100 ") * repeat] * 20


def test_any_prepared_text_data_set_can_be_named(tmp_path):
    prepare_other(tmp_path, TEXT)
    for name in ("other", "other:2.1.0"):
        source = make_source(config(name, tmp_path), "train")
        assert source.name == "other/2.1.0:train"
        assert sorted(texts(source)) == sorted((f"text {i} " * 50).encode() for i in range(100))
    assert len(make_source(config("other", tmp_path), "train[:10%]+test")) == 30


@pytest.mark.parametrize(
    ("features", "file_format", "name", "split", "sentence"),
    [
        (
            TEXT,
            "array_record",
            "nonesuch",
            "train",
            r"'nonesuch' is not prepared below .*TFDS knows no data set of this name",
        ),
        (
            TEXT,
            "array_record",
            "lm1b",
            "train",
            r"'lm1b' is not prepared below .*`tfds build lm1b --file_format=array_record",
        ),
        (TEXT, "array_record", "other:9.0.0", "train", r"'other:9.0.0' is not prepared below"),
        (TEXT, "array_record", "other", "validation", r"other/2.1.0 has no split 'validation'; its splits are .*train"),
        (TEXT, "array_record", "other", "train[:0]", r"Split 'train\[:0\]' of other/2.1.0 .*is empty"),
        (TEXT, "tfrecord", "other", "train", r"is prepared as tfrecord, which has no random access"),
        ({"label": TEXT["label"]}, "array_record", "other", "train", r"has no text feature named 'text', only label"),
        ({"text": TEXT["label"]}, "array_record", "other", "train", r"has no text feature named 'text', only text"),
    ],
)
def test_refuses_in_one_sentence(tmp_path, features, file_format, name, split, sentence):
    prepare_other(tmp_path, features, file_format)
    with pytest.raises(ValueError, match=sentence) as caught:
        make_source(config(name, tmp_path), split)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda content: b"", r"Record 0 of {file} cannot be read \(ArrayRecord file should be"),
        (lambda content: content[:65536], r"Record 0 of {file} cannot be read \(its text is None\)"),
        (
            lambda content: content[:5000] + bytes(50) + content[5050:],
            r"Record \d\d of {file} cannot be read \(Corrupted",
        ),
    ],
    ids=["empty", "cut short", "overwritten"],
)
def test_damaged_record_is_named(tmp_path, damage, sentence):
    (file,) = prepare_other(tmp_path, TEXT).glob("*train*")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=sentence.format(file=file)):
        make_source(config("other", tmp_path), "train")


def test_missing_file_is_named(tmp_path):
    (file,) = prepare_other(tmp_path, TEXT).glob("*train*")
    file.unlink()
    with pytest.raises(ValueError, match=f"{file}, a file of other/2.1.0, is missing"):
        make_source(config("other", tmp_path), "train")
    assert len(make_source(config("other", tmp_path), "test")) == 20
