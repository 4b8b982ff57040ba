"""Two processes of one job: a signal to either stops both at one step; a hang of one ends both."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from overlapfx.train.metrics import read_metrics
from overlapfx.train.stops import EXIT_HUNG, EXIT_INTERRUPTED

PROJECT = pathlib.Path(__file__).resolve().parent.parent.parent


def job(directory: pathlib.Path, faults: tuple[str, str]) -> list[tuple[int, str]]:
    """Runs both processes to their end; exit code and output of each."""
    directory.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faults.toy_worker", str(i), "2", str(port), str(directory), fault],
            cwd=PROJECT,
            env=environment | {"PYTHONPATH": str(PROJECT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, fault in enumerate(faults)
    ]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def losses(directory: pathlib.Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(directory / "metrics.jsonl") if r["kind"] == "train"}


def saved(directory: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (directory / "checkpoints").iterdir() if p.name.isdigit())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, float]:
    """Losses of a job that nobody disturbs."""
    directory = tmp_path_factory.mktemp("whole")
    done = job(directory, ("", ""))
    assert [code for code, _ in done] == [0, 0], done
    assert saved(directory) == [20, 30, 40]
    return losses(directory)


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_c20_both_stop_at_one_step_and_save_once(tmp_path: pathlib.Path, whole: dict[int, float], process: int) -> None:
    faults = ("sigterm-at=13", "") if process == 0 else ("", "sigterm-at=13")
    done = job(tmp_path, faults)
    assert [code for code, _ in done] == [EXIT_INTERRUPTED] * 2, done
    stopped = max(losses(tmp_path))
    assert stopped in (13, 14, 15)  # the question of a step may be on its way when the signal comes
    assert saved(tmp_path) == [10, stopped]
    assert done[0][1].count("before the run stops") == 1
    done = job(tmp_path, ("", ""))
    assert [code for code, _ in done] == [0, 0], done
    assert losses(tmp_path) == whole


@pytest.mark.slow
def test_c17_one_sleeps_in_a_step_and_both_end(tmp_path: pathlib.Path, whole: dict[int, float]) -> None:
    begun = time.monotonic()
    done = job(tmp_path, ("", "sleep-at=13"))
    assert time.monotonic() - begun < 120
    assert all(code != 0 for code, _ in done), done
    assert EXIT_HUNG in [code for code, _ in done], done
    stacks = "".join(path.read_text() for path in tmp_path.glob("stacks.*.txt"))
    assert "step 13 did not finish within 5 s" in stacks
    done = job(tmp_path, ("", ""))  # and nothing was lost but the steps since the last save
    assert [code for code, _ in done] == [0, 0], done
    assert losses(tmp_path) == whole
