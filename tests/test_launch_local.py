"""Several processes on this machine: one path with the cluster, one failure ends all, nothing is left behind."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from launch import local
from launch.arguments import USER_ERROR
from launch.identity import identify
from launch.launch import main
from launch.rendezvous import EXIT_NOT_TOGETHER

PROJECT = pathlib.Path(__file__).resolve().parent.parent
SMALL = (
    "--config=configs/gpt.py:tiny",
    *("--config.model.num_layers=1", "--config.model.d_model=32", "--config.model.d_ff=32"),
    *("--config.model.num_heads=2", "--config.model.num_kv_heads=2", "--config.model.head_dim=8"),
    *("--config.model.seq_len=16", "--config.mesh.y=2", "--config.mesh.x=2", "--config.data.global_batch=4"),
    *("--config.optimizer.warmup_steps=1", "--config.train.eval_batches=1", "--config.train.checkpoint_every=3"),
    *("--config.sample.num_tokens=1", "--config.overlap.mode=on"),
)


def environs(count: int, devices: int = 2, timeout_s: float = 120.0, **extra: str) -> list[dict[str, str]]:
    return [
        {**environ, **extra}
        for environ in local.environments(count, devices, timeout_s, local.free_port(), dict(os.environ))
    ]


def script(text: str) -> list[str]:
    return [sys.executable, "-c", f"import os, signal, sys, time\nme = int(os.environ['OVERLAPFX_WORKER'])\n{text}"]


# ---- the parent process, with children that import nothing ----


def test_every_process_knows_its_place() -> None:
    places = [identify(environ) for environ in environs(3, devices=5)]
    assert [(place.index, place.count) for place in places] == [(0, 3), (1, 3), (2, 3)]
    assert len({(place.host, place.port) for place in places}) == 1
    (flags,) = {environ["XLA_FLAGS"] for environ in environs(3, devices=5)}
    assert flags.split().count("--xla_force_host_platform_device_count=5") == 1
    assert "device_count=8" not in flags, "the count of the parent's own devices went along"


def test_only_process_0_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    text = "print('[Gloo] Rank 0 is connected'); print('hello from', me); print('warning of', me, file=sys.stderr)"
    assert local.run(script(text), environs(3)) == 0
    assert capfd.readouterr() == ("hello from 0\n", "warning of 0\n")


def test_one_failure_ends_all_and_is_explained(capfd: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    text = (
        f"open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').close()\n"
        "if me == 1:\n"
        "    time.sleep(0.3)\n"
        "    for i in range(50): print('line', i)\n"
        "    sys.exit('the disk is full')\n"
        "time.sleep(600)"
    )
    begun = time.monotonic()
    assert local.run(script(text), environs(3)) == 1
    assert time.monotonic() - begun < 30
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "overlapfx launch: process 1 failed with exit code 1; its last lines:"
    assert {"  line 49", "  the disk is full"} <= set(said)
    assert "  line 20" not in said, "only the last lines are shown"
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) == 3
    assert not any(alive(pid) for pid in started), "a process was left behind"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_that_ignores_the_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_GRACE_S", 0.5)
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif me == 0: sys.exit(7)\ntime.sleep(600)"
    begun = time.monotonic()
    assert local.run(script(text), environs(2)) == 7
    assert time.monotonic() - begun < 15


def test_what_was_started_is_ended_if_the_next_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = environs(2)
    second["BROKEN"] = "\0"
    started: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def remember(*args: Any, **kwargs: Any) -> subprocess.Popen[str]:
        started.append(real(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(local.subprocess, "Popen", remember)
    with pytest.raises(ValueError, match="null byte"):
        local.run(script("time.sleep(600)"), [first, second])
    (only,) = started
    assert only.poll() is not None, "a process was left behind"


def test_a_killed_process_has_the_exit_code_of_a_shell(capfd: pytest.CaptureFixture[str]) -> None:
    assert local.run(script("if me: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)"), environs(2)) == 137
    assert "process 1 was ended by SIGKILL; its last lines:" in capfd.readouterr().err


def test_a_signal_reaches_every_process_once_and_saving_is_no_failure(tmp_path: pathlib.Path) -> None:
    text = (
        f"mark = os.path.join({str(tmp_path)!r}, str(me))\n"
        "def stop(*_):\n"
        "    open(mark, 'a').write('stopped')\n"
        "    time.sleep(0.2 * me)\n"
        "    sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open(mark, 'w').close()\n"
        "time.sleep(600)"
    )

    def interrupt() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    assert local.run(script(text), environs(2)) == 75
    assert [path.read_text() for path in tmp_path.iterdir()] == ["stopped", "stopped"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--processes=3"],
            "the mesh replica=1, y=4, x=2 has 8 devices but 3 processes with 4 devices each have 12; change one",
        ),
        (["--processes=0"], "--processes is 0; it must be at least 1."),
        (["--devices-per-process=-1"], "--devices-per-process is -1; it must be at least 1."),
        (["--startup-timeout=inf"], "--startup-timeout is inf; it must be more than 0."),
        (
            ["--flag=xla_tpu_scoped_vmem_limit_kib=1"],
            "--flag has --xla_tpu_scoped_vmem_limit_kib=1, which the compiler for CPUs does not know; leave it out.",
        ),
    ],
)
def test_what_cannot_work_locally_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "run", lambda *_: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as stop:
        main(["--local", "--config=configs/gpt.py:tiny", *words])
    assert stop.value.code == USER_ERROR
    assert capsys.readouterr().err.startswith(f"overlapfx launch: {sentence}")


def test_a_local_dry_run_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--local", "--dry-run", "--config=configs/gpt.py:tiny", "--run_dir=a b"]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("env ")]
    assert len(shown) == 2
    assert "OVERLAPFX_WORKER=1" in shown[1]
    assert shown[0].endswith("-m launch.train --config=configs/gpt.py:tiny '--run_dir=a b'")


# ---- real processes ----


def start(environ: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "importtime", "-m", "launch.train", *SMALL, *words]
    return subprocess.Popen(command, cwd=PROJECT, env=environ, stderr=subprocess.PIPE, text=True)


def ending(process: subprocess.Popen[str]) -> tuple[int, str, bool]:
    """Exit code, what was said, whether JAX had been imported by then."""
    _, errors = process.communicate(timeout=120)
    lines = errors.splitlines()
    said = [line for line in lines if not line.startswith("import time:")]
    return process.returncode, "\n".join(said), any(line.split()[-1:] == ["jax"] for line in lines)


def test_a_process_that_never_starts_is_named_within_the_limit(tmp_path: pathlib.Path) -> None:
    begun = time.monotonic()
    code, said, jax = ending(start(environs(2, timeout_s=1.0)[0], f"--run_dir={tmp_path / 'run'}"))
    assert time.monotonic() - begun < 60
    assert code == EXIT_NOT_TOGETHER
    assert said == (
        "overlapfx train: of 2 processes, at the start of the job process 1 did not come within 1 s; see their own "
        "messages."
    )
    assert not jax
    assert not (tmp_path / "run").exists()


def test_processes_with_different_configs_and_flags_say_so(tmp_path: pathlib.Path) -> None:
    first, second = environs(2)
    second["XLA_FLAGS"] += " --xla_dump_hlo_as_text=false"
    run = f"--run_dir={tmp_path / 'run'}"
    both = [start(first, run), start(second, run, "--config.seed=5")]
    for process in both:
        code, said, jax = ending(process)
        assert code == USER_ERROR
        assert said.startswith("overlapfx train: the processes differ: config.seed is 0 on process 0, 5 on process 1; ")
        assert "XLA_FLAGS is " in said
        assert said.endswith("start all of them alike.")
        assert not jax
    assert not (tmp_path / "run").exists()


def launch(tmp_path: pathlib.Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", "launch", "--local", *SMALL, *words]
    return subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=400, check=False, env=dict(os.environ)
    )


def losses(run: pathlib.Path) -> dict[int, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


def records(run: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in found if record["kind"] == kind]


TWO = ("--processes=2", "--devices-per-process=2")
ONE = ("--processes=1", "--devices-per-process=4")


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_one_resumes_what_two_saved(tmp_path: pathlib.Path) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    done = launch(tmp_path, *TWO, "--config.train.num_steps=3", f"--run_dir={together}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("step 1/3") == 1, "one process prints"
    assert "Gloo" not in done.stdout
    assert sorted(losses(together)) == [1, 2, 3]
    assert len(records(together, "start")) == 1, "one process writes metrics"
    assert "device_count=2" in records(together, "start")[0]["XLA_FLAGS"]

    resumed = launch(tmp_path, *ONE, "--config.train.num_steps=5", f"--run_dir={together}")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert "resumes after step 3" in resumed.stdout
    whole = launch(tmp_path, *ONE, "--config.train.num_steps=5", f"--run_dir={alone}")
    assert whole.returncode == 0, whole.stderr[-2000:]
    assert sorted(losses(together)) == sorted(losses(alone)) == [1, 2, 3, 4, 5]
    # The schedule of the first run ends at step 3, so that only its first steps can be compared.
    assert [losses(together)[step] for step in (1, 2)] == pytest.approx(
        [losses(alone)[step] for step in (1, 2)], rel=1e-5
    )


@pytest.mark.slow
def test_an_error_of_process_0_ends_both_at_once(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "thesis.txt").write_text("not a run")
    begun = time.monotonic()
    done = launch(tmp_path, *TWO, f"--run_dir={run}")
    # JAX by itself would wait five minutes at exit.
    assert time.monotonic() - begun < 120
    assert done.returncode == USER_ERROR
    assert f"The directory {run} holds thesis.txt but no config.json, so it is no run directory" in done.stderr
    assert os.listdir(run) == ["thesis.txt"]


def launched(run: pathlib.Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launch.cli", "launch", "--local", *SMALL, *TWO, f"--run_dir={run}", *words]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_step(job: subprocess.Popen[str], run: pathlib.Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while not (run / "metrics.jsonl").exists() or max(losses(run), default=0) < step:
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline, f"no step {step} in {run}"
        time.sleep(0.02)


def workers(parent: int) -> dict[int, int]:
    """Process number by place in the job."""
    children = pathlib.Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    places = {}
    for child in children:
        environ = dict(
            word.split("=", 1) for word in pathlib.Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in word
        )
        places[int(environ["OVERLAPFX_WORKER"])] = int(child)
    return places


FORTY = ("--config.train.num_steps=40", "--config.train.checkpoint_every=30", "--config.train.eval_every=40")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a job that nobody disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    done = launch(directory, *TWO, *FORTY, f"--run_dir={directory / 'run'}")
    assert done.returncode == 0, done.stderr[-2000:]
    return losses(directory / "run")


@pytest.mark.slow
def test_c20_two_processes_save_once_and_go_on_as_if_nothing_had_happened(
    tmp_path: pathlib.Path, whole: dict[int, float]
) -> None:
    run = tmp_path / "run"
    job = launched(run, *FORTY)
    wait_for_step(job, run, 3)
    os.kill(workers(job.pid)[1], signal.SIGTERM)  # one is told; that a signal to the launcher reaches all is above
    said, errors = job.communicate(timeout=200)
    assert job.returncode == 75, errors[-2000:]
    stopped = max(losses(run))
    assert 3 <= stopped < 30, "the signal came too late to tell anything"
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit()] == [str(stopped)]
    assert said.count("before the run stops") == 1, said

    done = launch(tmp_path, *TWO, *FORTY, f"--run_dir={run}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(run) == whole


@pytest.mark.slow
def test_c17_a_process_that_freezes_in_a_step_ends_both(tmp_path: pathlib.Path) -> None:
    run = tmp_path / "run"
    job = launched(run, "--config.train.num_steps=100000", "--config.train.step_timeout_s=10")
    wait_for_step(job, run, 5)
    os.kill(workers(job.pid)[1], signal.SIGSTOP)
    begun = time.monotonic()
    _, errors = job.communicate(timeout=200)
    assert time.monotonic() - begun < 90
    assert job.returncode == 76, errors[-2000:]
    assert "did not finish within 10 s on process 0" in records(run, "hung")[0]["reason"]
    assert "Thread" in (run / "stacks.0.txt").read_text()
