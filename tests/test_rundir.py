"""Run directories are created, resumed, refused."""

import dataclasses
import json
import pathlib
import signal
import subprocess
import sys
import textwrap
from types import MappingProxyType

import jax
import pytest

from overlapfx.train.rundir import RunDir, to_plain, versions

CONFIG = {
    "name": "tiny",
    "seed": 0,
    "model": {"d_model": 64, "gated": False},
    "mesh": {"y": 4, "x": 2},
    "overlap": {"mode": "auto", "sites": {}},
    "data": {"seed": 1, "num_workers": 0},
    "train": {"num_steps": 10, "log_every": 1},
    "sample": {"prompt": "def "},
}


def changed(**fields: object) -> dict:
    """CONFIG with dotted fields (`train__num_steps=3`) replaced or added."""
    config = json.loads(json.dumps(CONFIG))
    for name, value in fields.items():
        *sections, last = name.split("__")
        section = config
        for key in sections:
            section = section[key]
        section[last] = value
    return config


def read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


def test_new_directory_gets_config_and_versions(tmp_path: pathlib.Path) -> None:
    with RunDir(tmp_path / "runs" / "a", CONFIG) as run:
        assert not run.resumed
        assert run.notes == ()
        assert read(run.config_file) == CONFIG
        found = read(run.path / "versions.json")
    assert found["jax"] == jax.__version__
    assert found["python"] == sys.version.split()[0]
    assert {"flax", "optax", "orbax-checkpoint", "overlapfx", "commit"} <= found.keys()
    assert found == versions()


def test_same_config_resumes(tmp_path: pathlib.Path) -> None:
    RunDir(tmp_path, CONFIG).close()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with RunDir(tmp_path, CONFIG) as run:
        assert run.resumed
        assert run.notes == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "config.json", "metrics.jsonl", "versions.json"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model__d_model": 128}, "(model.d_model was 64, is 128)"),
        ({"seed": 1, "data__seed": 2}, "(data.seed was 1, is 2; seed was 0, is 1)"),
        ({"train__num_steps": 9}, "(train.num_steps was 10, is 9, but may only grow)"),
        ({"model__extra": "x"}, '(model.extra was absent, is "x")'),
        ({"mesh__y": 8, "name": "other"}, '(name was "tiny", is "other")'),
    ],
)
def test_another_config_is_refused_in_one_sentence(tmp_path: pathlib.Path, fields: dict, words: str) -> None:
    RunDir(tmp_path, CONFIG).close()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"set this back or choose a new directory\.$") as error:
        RunDir(tmp_path, changed(**fields))
    assert words in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    RunDir(tmp_path, CONFIG).close()  # the refusal did not leave it locked


def test_harmless_changes_resume_and_the_history_is_kept(tmp_path: pathlib.Path) -> None:
    second = changed(
        train__num_steps=20,
        train__log_every=5,
        mesh__x=1,
        overlap__mode="off",
        data__num_workers=2,
        sample__prompt="class",
    )
    third = changed(train__num_steps=30, overlap__sites={"mlp.up": {"mode": "on"}})
    RunDir(tmp_path, CONFIG).close()
    with RunDir(tmp_path, second) as run:
        assert run.resumed
        assert len(run.notes) == 7
        assert "Resuming with a changed configuration: train.num_steps was 10, is 20." in run.notes
        assert "Resuming with a changed configuration: mesh.x was 2, is 1." in run.notes
        assert run.notes[-1] == "The earlier configuration is kept in config.1.json."
    RunDir(tmp_path, second).close()
    RunDir(tmp_path, third).close()
    assert read(tmp_path / "config.1.json") == CONFIG
    assert read(tmp_path / "config.2.json") == second
    assert read(tmp_path / "config.json") == third
    assert not (tmp_path / "config.3.json").exists()


def test_versions_of_an_earlier_attempt_are_kept(tmp_path: pathlib.Path) -> None:
    RunDir(tmp_path, CONFIG).close()
    old = read(tmp_path / "versions.json") | {"jax": "0.0.1"}
    (tmp_path / "versions.json").write_text(json.dumps(old))
    RunDir(tmp_path, CONFIG).close()
    assert read(tmp_path / "versions.1.json") == old
    assert read(tmp_path / "versions.json")["jax"] == jax.__version__


def test_what_is_no_run_directory_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds thesis\.tex but no config\.json, so it is no run directory"):
        RunDir(tmp_path, CONFIG)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ValueError, match="is a file"):
        RunDir(tmp_path / "thesis.tex", CONFIG)


def test_directory_of_a_run_that_was_killed_at_birth_is_used(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".lock").write_text("process 1 on nowhere\n")
    (tmp_path / "config.json.tmp").write_text("{")
    with RunDir(tmp_path, CONFIG) as run:
        assert not run.resumed
        assert read(run.config_file) == CONFIG


def test_second_run_in_the_same_directory_is_refused(tmp_path: pathlib.Path) -> None:
    script = """
        import json, sys
        from overlapfx.train.rundir import RunDir
        run = RunDir(sys.argv[1], json.loads(sys.argv[2]))
        print("open", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), json.dumps(CONFIG)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(ValueError, match=f"in use by process {other.pid} on .*; wait until it ends"):
            RunDir(tmp_path, CONFIG)
        other.send_signal(signal.SIGKILL)
        other.wait(30)
        RunDir(tmp_path, CONFIG).close()  # a killed holder leaves no lock behind
    with RunDir(tmp_path, CONFIG), pytest.raises(ValueError, match="in use"):
        RunDir(tmp_path, CONFIG)


def test_other_processes_of_a_job_only_learn_the_paths(tmp_path: pathlib.Path) -> None:
    with RunDir(tmp_path, CONFIG) as run, RunDir(tmp_path, CONFIG, primary=False) as other:
        assert other.checkpoint_dir == run.checkpoint_dir == tmp_path / "checkpoints"
    RunDir(tmp_path / "new", CONFIG, primary=False).close()
    assert not (tmp_path / "new").exists()


def test_to_plain_covers_what_a_config_holds() -> None:
    @dataclasses.dataclass(frozen=True)
    class Inner:
        sites: MappingProxyType
        sizes: tuple[int, ...]

    @dataclasses.dataclass(frozen=True)
    class Outer:
        inner: Inner
        rate: float
        name: str | None

    got = to_plain(Outer(Inner(MappingProxyType({"a": {"mode": "on"}}), (1, 2)), 3e-4, None))
    assert got == {"inner": {"sites": {"a": {"mode": "on"}}, "sizes": [1, 2]}, "rate": 3e-4, "name": None}
    with pytest.raises(TypeError, match="of type complex"):
        to_plain({"z": 1j})
