"""Sweeps as a whole: workers that die, sweeps that are killed, what a second call does."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
import sweep_stub

from launch import cli, sweep, sweep_basis
from overlapfx.aot import slices

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
PROJECT = pathlib.Path(__file__).resolve().parent.parent
TINY = "--config=configs/gpt.py:tiny"
PLAN = [TINY, "--topology=v5e:2x4", "--overlap=off,auto", "--workers=2"]
LEGAL = {f"y={8 // x} x={x} {mode}" for x in (1, 2, 4) for mode in ("off", "auto")}


@pytest.fixture
def stubbed(tmp_path, monkeypatch, capsys):
    """Runs a sweep with workers of the stub in this process; returns exit code, output, names worked off."""
    worked = tmp_path / "worked"
    monkeypatch.setattr(slices, "require_compiler", lambda: None)
    # So that nobody who edits the code meanwhile makes these tests fail.
    monkeypatch.setattr(sweep_basis, "code_hash", lambda: "code")
    monkeypatch.setenv(sweep_stub.CODE, "code")
    monkeypatch.setenv(sweep_stub.WORKED, str(worked))

    def run(*arguments, misbehave=""):
        monkeypatch.setenv(sweep_stub.MISBEHAVE, misbehave)
        before = len(lines(worked))
        code = sweep.main([*PLAN, f"--out={tmp_path}/out", *arguments], serve=sweep_stub.serve)
        return code, capsys.readouterr().out, lines(worked)[before:]

    return run


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def records(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


class TestFailures:
    def test_the_rest_goes_on(self, stubbed, tmp_path):
        planted = "y=8 x=1 off:raise,y=4 x=2 off:kill,y=2 x=4 off:hang"
        code, text, worked = stubbed("--timeout=6", misbehave=planted)
        assert code == 0 and set(worked) == {name for name in LEGAL if "off" not in name}
        assert "RuntimeError: planted in the middle of a point (exit code 1; more in " in text
        assert "the worker was killed by SIGKILL, by the system if memory ran out" in text
        assert "it took more than 6 s" in text
        assert "8 points: 2 fit, 1 do not fit, 3 failed, 2 illegal" in text
        log = (tmp_path / "out" / "logs").glob("worker-*.log")
        assert "planted in the middle of a point" in "".join(path.read_text() for path in log)
        # What says nothing about the point is tried again, what failed by itself is not, unless asked for.
        code, text, worked = stubbed()
        assert set(worked) == {"y=4 x=2 off", "y=2 x=4 off"} and "1 failed" in text
        code, text, worked = stubbed("--retry")
        assert worked == ["y=8 x=1 off"] and "failed" not in text.replace("failed: ", "")

    def test_killed_worker_gets_a_second_try_alone(self, stubbed, monkeypatch, tmp_path):
        once = tmp_path / "once"
        once.touch()
        monkeypatch.setenv(sweep_stub.ONCE, str(once))
        code, text, worked = stubbed(misbehave="y=4 x=2 off:kill-once")
        assert code == 0 and set(worked) == LEGAL and "failed" not in text

    def test_worker_that_cannot_start(self, stubbed, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(sweep_stub, "serve", sweep_stub.broken)
        code = sweep.main([*PLAN, f"--out={tmp_path}/out"], serve=sweep_stub.broken)
        assert code == 1
        assert "a worker of the sweep could not start: ModuleNotFoundError: planted" in capsys.readouterr().err

    def test_code_that_changes_meanwhile(self, stubbed, monkeypatch, capsys, tmp_path):
        monkeypatch.setenv(sweep_stub.CODE, "another")
        assert sweep.main([*PLAN, f"--out={tmp_path}/out"], serve=sweep_stub.serve) == 1
        assert "the code changed while the sweep ran" in capsys.readouterr().err
        assert records(tmp_path / "out") == []


class TestSecondCall:
    def test_nothing_is_computed_or_written_twice(self, stubbed, tmp_path):
        first = stubbed()
        assert set(first[2]) == LEGAL and len(first[2]) == 6
        before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
        code, text, worked = stubbed()
        assert (code, worked) == (0, []) and "6 with a stored result" in text and "the same as in" in text
        assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before
        # More points: only those are worked off, in a report of their own.
        code, text, worked = stubbed("--overlap=off,auto,on")
        assert {name.split()[-1] for name in worked} == {"on"}
        assert sorted(path.name for path in (tmp_path / "out").glob("report-*")) == ["report-1", "report-2"]
        assert records(tmp_path / "out")[0]["config"]["model"]["d_model"] == 128

    def test_command_starts_the_best(self, stubbed):
        _, text, _ = stubbed("--config.sample.prompt=it's; rm -rf $HOME")
        (command,) = [line.strip() for line in text.splitlines() if line.startswith("  overlapfx launch")]
        assert "--topology=v5e:2x4 --config.mesh.y=4 --config.mesh.x=2" in command
        assert command.endswith("--config.overlap.mode=off")
        words = subprocess.run(
            ["sh", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert "--config.sample.prompt=it's; rm -rf $HOME" in words

    def test_command_is_one_that_launch_understands(self, stubbed, capsys):
        _, text, _ = stubbed("--flag=xla_tpu_scoped_vmem_limit_kib=32768")
        (command,) = [line for line in text.splitlines() if line.startswith("  overlapfx launch")]
        assert "--flag=xla_tpu_scoped_vmem_limit_kib=32768" in command
        with pytest.raises(SystemExit):
            cli.main([*shlex.split(command)[1:], "--cloud-tpu", "--dry-run"])
        assert "--project" in capsys.readouterr().err  # all else is accepted


class TestExitCodes:
    def test_nothing_fits(self, stubbed):
        code, text, _ = stubbed("--mesh=8x1")
        assert code == 3 and "NO" in text and "use mesh" not in text

    def test_nothing_but_failures(self, stubbed):
        assert stubbed("--mesh=8x1", "--overlap=on")[0] == 1


def script(folder, *arguments, **environment):
    """`overlapfx sweep` with the stub's workers in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.Popen(
        [sys.executable, str(PROJECT / "tests" / "sweep_stub.py"), *PLAN, f"--out={folder}", *arguments],
        cwd=PROJECT,
        env={**kept, "PYTHONPATH": str(PROJECT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell starts what it runs in the background with interrupts ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def alive(pattern):
    """Processes whose environment holds `pattern`."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if pattern.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


needs_proc = pytest.mark.skipif(not pathlib.Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


@needs_compiler
@needs_proc
def test_workers_do_not_outlive_a_killed_sweep(tmp_path):
    running = script(tmp_path / "out", **{sweep_stub.SLEEP_S: "600", "SWEEP_TEST": str(tmp_path)})
    log = tmp_path / "out" / "logs" / "worker-0.log"
    while not log.exists() or "begins" not in log.read_text():
        assert running.poll() is None, running.stdout.read()
        time.sleep(0.02)
    running.kill()
    running.wait()
    running.stdout.close()
    deadline = time.monotonic() + 60
    while alive(f"SWEEP_TEST={tmp_path}"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_compiler
@needs_proc
def test_killed_again_and_again_it_ends_with_every_point_once(tmp_path):
    out, worked = tmp_path / "out", tmp_path / "worked"
    environment = {sweep_stub.WORKED: str(worked), sweep_stub.SLEEP_S: "0.2", "SWEEP_TEST": str(tmp_path)}
    stored: list[str] = []
    for _ in range(5):
        worked_before = len(lines(worked))
        running = script(out, "--mesh=4x2,2x4", **environment)
        # Killed as soon as another result is stored, in the middle of the points that follow.
        while running.poll() is None:
            if (out / "results.jsonl").exists() and len(lines(out / "results.jsonl")) > len(stored):
                running.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        running.wait()
        assert running.returncode in (0, -signal.SIGKILL), running.stdout.read()
        running.stdout.close()
        deadline = time.monotonic() + 20
        while alive(f"SWEEP_TEST={tmp_path}"):  # workers do not outlive their sweep
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert set(lines(worked)[worked_before:]).isdisjoint(stored)  # nothing is computed twice
        now = [record["point"].removeprefix("v5e:2x4 ") for record in records(out)]
        assert now[: len(stored)] == stored  # nothing is lost
        assert len(now) > len(stored) or running.returncode == 0
        stored = now
    assert running.returncode == 0
    assert sorted(stored) == sorted(name for name in LEGAL if "x=1" not in name)


@needs_compiler
def test_interrupted_from_the_keyboard(tmp_path):
    out = tmp_path / "out"
    running = script(out, **{sweep_stub.SLEEP_S: "0.3"})
    while (running.poll() is None and not (out / "results.jsonl").exists()) or not lines(out / "results.jsonl"):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    text, _ = running.communicate(timeout=60)
    assert running.returncode == 130 and "the same command goes on from there" in text
    assert "Traceback" not in text


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ([], "--topology is missing; name a slice such as v4:4x4x4"),
            (["--topology=v9:4"], "unknown topology 'v9:4'"),
            (["--topology=v5e:2x4", "--overlap=of"], "overlap.mode is 'of'"),
            (["--topology=v5e:2x4", "--mesh=1x8"], "none of the 1 points is legal"),
            (["--topology=v5e:2x4", "--devices=8"], "which only --measure needs"),
            (["--topology=v5e:2x4", "--assume=warp=9"], "no assumption is called 'warp'"),
            (["--topology=v5e:2x4", "--measure"], "--topology is for plans"),
            (["--topology=v5e:2x4", "--steps=0"], "--steps: 0 is less than 1"),
            (["--topology=v5e:2x4", "--workers=-1"], "--workers: -1 is less than 1"),
            (["--topology=v5e:2x4", "--frobnicate"], "'--frobnicate' is not an argument"),
        ],
    )
    def test_one_sentence_and_nothing_written(self, arguments, sentence, capsys, tmp_path):
        with pytest.raises(SystemExit) as stop:
            cli.main(["sweep", TINY, f"--out={tmp_path}/out", *arguments])
        assert stop.value.code == 2
        text = capsys.readouterr().err
        assert text.startswith("overlapfx sweep: ") and text.count("\n") == 1 and sentence in text
        assert not (tmp_path / "out").exists()


def command(*arguments):
    """The real command in a process of its own, which says at its end whether it ever imported JAX."""
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    code = (
        "import sys; from launch import cli; code = cli.main(sys.argv[1:]); "
        "print('jax' in sys.modules, 'matplotlib' in sys.modules); sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "sweep", TINY, *arguments],
        cwd=PROJECT,
        env=kept,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@needs_compiler
@pytest.mark.slow
def test_real_plans_and_a_second_call_without_jax(tmp_path):
    arguments = ["--topology=v5e:2x2", "--mesh=2x2", "--overlap=off,auto", f"--out={tmp_path}", "--workers=1"]
    arguments.append("--config.model.num_layers=2")
    first = command(*arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "2 points: 2 fit" in first.stdout and "[2/2] v5e:2x2 " in first.stderr
    for record in records(tmp_path):
        assert record["outcome"] == "ok" and record["fits"] and record["not_understood"] == 0
        assert 0 < record["communication_s"] < record["step_s"] and 0 < record["mfu"] <= record["hfu"] < 1
        assert record["step_s_by_link_factor"]["0.8"] > record["step_s"] > record["step_s_by_link_factor"]["1.25"]
        assert record["hbm_bytes"] == 16 * 2**30 and record["num_chips"] == 4
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(16 * 128)
    begun = time.monotonic()
    second = command(*arguments)
    assert second.returncode == 0 and "2 with a stored result" in second.stdout
    assert second.stdout.rstrip().endswith("False False")
    assert time.monotonic() - begun < 30  # 1 s where nothing else runs
    table = [line for line in first.stdout.splitlines() if line.startswith("   1 ")]
    assert table and table[0] in second.stdout


@pytest.mark.slow
def test_measures_real_steps_on_simulated_devices(tmp_path):
    arguments = ["--measure", "--devices=2", "--steps=2", "--mesh=2x1,1x2", "--overlap=off", f"--out={tmp_path}"]
    arguments += ["--config.model.num_layers=1", "--config.data.global_batch=4"]
    done = command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "For configs/gpt.py:tiny on 2 x cpu, use mesh" in done.stdout
    assert "overlapfx train --config=configs/gpt.py:tiny --devices=2 --config.mesh.y=" in done.stdout
    for record in records(tmp_path):
        assert record["step_s_min"] <= record["step_s"] <= record["step_s_max"]
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(4 * 128)
