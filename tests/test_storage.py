"""Files that cannot be written, or are no longer what was written: one sentence, and nothing else is lost."""

import errno
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from overlapfx.train.checkpoint import Checkpointer
from overlapfx.train.metrics import MetricsWriter
from overlapfx.train.rundir import RunDir
from overlapfx.train.stops import EXIT_STORAGE, StorageError

W = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)


def state(step: int) -> dict:
    return {"params": {"w": jax.numpy.asarray(W + step)}, "count": jax.numpy.int32(step)}


ABSTRACT = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state(0))


def save(directory: pathlib.Path, *steps: int, keep: int = 5) -> None:
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), {"next": step})


def one_sentence(error: object) -> str:
    text = str(error)
    assert "\n" not in text and text.endswith("."), text
    return text


def big_file(checkpoint: pathlib.Path) -> pathlib.Path:
    """The file with the values of the largest leaf."""
    return max((p for p in checkpoint.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: pathlib.Path) -> None:
    """One bit in the middle: of compressed values that is not noticed by whoever reads the file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def flip_position(checkpoint: pathlib.Path) -> None:
    """A manifest that is still JSON, but says another batch."""
    manifest = checkpoint / "manifest" / "metadata"
    text = manifest.read_text()
    assert '"next": 4' in text or '"next":4' in text
    manifest.write_text(text.replace('"next": 4', '"next": 6').replace('"next":4', '"next":6'))


DAMAGE = {
    "values truncated": lambda c: truncate(big_file(c)),
    "values flipped": lambda c: flip(big_file(c)),
    "values gone": lambda c: big_file(c).unlink(),
    "index truncated": lambda c: truncate(c / "state" / "manifest.ocdbt"),
    "names flipped": lambda c: flip(c / "state" / "_METADATA"),
    "manifest truncated": lambda c: truncate(c / "manifest" / "metadata"),
    "manifest changed": flip_position,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoint_is_refused_then_passed_over_if_asked(tmp_path: pathlib.Path, name: str) -> None:
    save(tmp_path, 2, 4)
    DAMAGE[name](tmp_path / "4")
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        with pytest.raises(StorageError) as error:
            checkpointer.restore_newest(ABSTRACT, fall_back=False)
        sentence = one_sentence(error.value)
        assert f"{tmp_path / '4'} is damaged" in sentence
        assert "--use-older-checkpoint goes back to an older one (2)" in sentence
        assert checkpointer.steps() == [2, 4]  # refused, not touched

        step, found, position = checkpointer.restore_newest(ABSTRACT, fall_back=True)
        assert (step, position) == (2, {"next": 2})
        np.testing.assert_array_equal(found["params"]["w"], W + 2)
        (skipped,) = checkpointer.skipped
        assert "Skipped step 4" in skipped and "It is now 4.damaged." in skipped
        assert (tmp_path / "4.damaged").is_dir()
        assert checkpointer.save(4, state(4), {"next": 4})  # the step can be written anew
        assert checkpointer.steps() == [2, 4]
        assert checkpointer.restore_newest(ABSTRACT, fall_back=False)[0] == 4


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 2, 4)
    for step in ("2", "4"):
        flip(big_file(tmp_path / step))
    with (
        Checkpointer(tmp_path, keep=2) as checkpointer,
        pytest.raises(StorageError, match=r"All checkpoints in .* are damaged \(steps 2, 4\)"),
    ):
        checkpointer.restore_newest(ABSTRACT, fall_back=True)


def test_flipped_values_name_the_leaf(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 4)
    flip(big_file(tmp_path / "4"))
    with (
        Checkpointer(tmp_path, keep=2) as checkpointer,
        pytest.raises(StorageError, match=r"the values of params\.w are not those .*; there is no older one"),
    ):
        checkpointer.restore(ABSTRACT)


def test_full_disk_keeps_what_is_there(tmp_path: pathlib.Path) -> None:
    """The limit on the size of files stands for a disk that has no room for the arrays, but has for small files."""
    script = """
        import resource, sys
        import numpy as np
        from overlapfx.train.checkpoint import Checkpointer
        from overlapfx.train.stops import StorageError
        w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        checkpointer = Checkpointer(sys.argv[1], keep=1)
        checkpointer.save(1, {"w": w}, {"next": 1})
        checkpointer.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
        checkpointer.save(2, {"w": w + 1}, {"next": 2})
        try:
            checkpointer.wait()
        except StorageError as error:
            print(error)
            sys.exit(error.exit_code)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_STORAGE, done.stderr[-2000:]
    sentence = one_sentence(done.stdout.strip())
    assert f"The checkpoint of step 2 in {tmp_path} could not be written" in sentence
    assert "File too large" in sentence
    assert "the newest one is that of step 1" in sentence
    with Checkpointer(tmp_path, keep=1) as checkpointer:  # keep is 1, yet the old one was not given up for a failed one
        restored, position = checkpointer.restore({"w": jax.ShapeDtypeStruct((64, 64), np.float32)})
        np.testing.assert_array_equal(restored["w"], W)
        assert position == {"next": 1}


def test_nothing_is_deleted_before_its_replacement_is_committed(tmp_path: pathlib.Path, monkeypatch) -> None:
    events: list[tuple[str, str]] = []
    rename, rmdir = os.rename, os.rmdir

    def renamed(source: str, target: str, **options: object) -> None:
        rename(source, target, **options)
        events.append(("committed", os.path.basename(target)))

    def removed(path: str, **options: object) -> None:
        rmdir(path, **options)
        events.append(("deleted", os.path.basename(path)))

    monkeypatch.setattr(os, "rename", renamed)
    monkeypatch.setattr(os, "rmdir", removed)
    save(tmp_path, 1, 2, 3, keep=1)
    numbered = [event for event in events if event[1].isdigit()]
    assert numbered == [
        ("committed", "1"),
        ("committed", "2"),
        ("deleted", "1"),
        ("committed", "3"),
        ("deleted", "2"),
    ]


def test_vanished_directory_is_said(tmp_path: pathlib.Path) -> None:
    with Checkpointer(tmp_path / "run" / "checkpoints", keep=1) as checkpointer:
        checkpointer.save(1, state(1), {})
        checkpointer.wait()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(StorageError, match=r"run/checkpoints has vanished, so step 2 cannot be saved") as error:
            checkpointer.save(2, state(2), {})
    one_sentence(error.value)
    assert not (tmp_path / "run").exists()


def test_directory_that_vanishes_under_the_writer_is_said(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", keep=1)
    checkpointer.save(1, state(1), {})
    wait = checkpointer._manager.wait_until_finished

    def vanish() -> None:
        wait()
        (tmp_path / "run").rename(tmp_path / "moved")
        (tmp_path / "run" / "checkpoints" / "1.orbax-checkpoint-tmp").mkdir(parents=True)  # as a writer does
        raise FileNotFoundError("commit_success.txt")

    monkeypatch.setattr(checkpointer._manager, "wait_until_finished", vanish)
    with pytest.raises(StorageError, match=r"run/checkpoints has vanished, so step 1 cannot be saved") as error:
        checkpointer.wait()
    one_sentence(error.value)


def test_metrics_that_cannot_be_opened_stop_the_start(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tb").write_text("in the way")
    with pytest.raises(StorageError, match="metrics of the start cannot be written to") as error:
        MetricsWriter(tmp_path / "metrics.jsonl", tmp_path / "tb")
    one_sentence(error.value)


def test_metrics_that_cannot_be_written_stop_the_run(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 10, limit[1]))
    try:
        with pytest.raises(
            StorageError, match=r"metrics of step 7 cannot be written to .*metrics\.jsonl or beside it \(File too large"
        ):
            writer.write("train", 7, loss=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_a_full_disk_under_the_event_file_stops_the_run_and_does_not_hang(tmp_path: pathlib.Path) -> None:
    """Each record would grow the event file by more than the line in metrics.jsonl, which is cut short each time."""
    script = """
        import os, resource, sys, pathlib
        from overlapfx.train import events
        from overlapfx.train.metrics import MetricsWriter
        from overlapfx.train.stops import StorageError
        events._FLUSH_S = 0.0
        folder = pathlib.Path(sys.argv[1])
        writer = MetricsWriter(folder / "metrics.jsonl", folder / "tb")
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
        try:
            for step in range(1000):
                writer.write("train", step, loss=1.0, grad_norm=2.0, tokens=3.0, learning_rate=4.0)
                os.truncate(folder / "metrics.jsonl", 0)
        except StorageError as error:
            print(error)
        writer.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "File too large" in one_sentence(done.stdout.strip())
    assert max(p.stat().st_size for p in (tmp_path / "tb").iterdir()) == 6000  # it was the event file


CONFIG = {"name": "tiny", "train": {"num_steps": 3}}


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_run_directory_that_cannot_be_written_is_refused(tmp_path: pathlib.Path, monkeypatch, number: int) -> None:
    replace = os.replace

    def fails(source: object, target: object) -> None:
        raise OSError(number, os.strerror(number), str(target))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fails)
        with pytest.raises(ValueError, match=os.strerror(number)) as error:
            RunDir(tmp_path / "run", CONFIG)
    assert "--run_dir" in one_sentence(error.value)
    assert os.replace is replace
    RunDir(tmp_path / "run", CONFIG).close()  # it was not left locked, and is still good for a run


@pytest.mark.parametrize("name", ["a" * 5000, "a/" * 3000, "nul\x00", "README.md/run"])
def test_impossible_names_of_run_directories_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "README.md").touch()
    with pytest.raises(ValueError, match="."):
        RunDir(tmp_path / name, CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["README.md"]


def test_damaged_config_is_refused(tmp_path: pathlib.Path) -> None:
    RunDir(tmp_path, CONFIG).close()
    truncate(tmp_path / "config.json")
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match=r"config\.json is damaged") as error:
        RunDir(tmp_path, CONFIG)
    one_sentence(error.value)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("name", ["checkpoints", "metrics.jsonl", "tb"])
def test_links_that_lead_out_are_refused(tmp_path: pathlib.Path, name: str) -> None:
    RunDir(tmp_path / "run", CONFIG).close()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=rf"run/{name} is a link to .*elsewhere, outside of the run directory"
    ) as error:
        RunDir(tmp_path / "run", CONFIG)
    one_sentence(error.value)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to("config.json")  # inside is fine
    RunDir(tmp_path / "run", CONFIG).close()
