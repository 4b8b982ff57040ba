"""`overlapfx launch` with the real planner: the plan comes first, and what does not fit goes no further."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from launch.launch import main
from launch.plan import DOES_NOT_FIT
from overlapfx.aot import step_plan

pytest.importorskip("libtpu")
PROJECT = pathlib.Path(__file__).resolve().parent.parent
SMALL = (
    "--config=configs/gpt.py:tiny",
    *("--config.model.num_layers=1", "--config.mesh.y=1", "--config.mesh.x=1", "--topology=v5e:1x1"),
    *("--project=my-project", "--zone=us-west4-a", "--image=registry/overlapfx:1", "--mount=/mnt/runs"),
)


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.cli", "launch", "--cloud-tpu", "--dry-run", *SMALL, *words]
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, cwd=PROJECT, env=environ, capture_output=True, text=True, timeout=400, check=False)


def test_the_planner_is_asked_and_believed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def plan(*_: Any) -> Any:
        raise step_plan.DoesNotFit("there is no room.")

    monkeypatch.setattr(step_plan.Planner, "plan", plan)  # everything but the compilation
    assert main(["--cloud-tpu", "--dry-run", *SMALL]) == DOES_NOT_FIT
    printed = capsys.readouterr()
    assert printed.out.startswith("gpt_tiny on v5e:1x1: 1 x TPU v5e, mesh y=1, x=1,")
    assert "ours: memory: DOES NOT FIT: there is no room." in printed.out
    assert "would be submitted" not in printed.out
    assert printed.err.endswith("overlapfx launch: gpt_tiny does not fit on v5e:1x1; nothing was submitted.\n")


@pytest.mark.slow
def test_the_full_plan_comes_before_the_commands() -> None:
    done = launch("--flag=xla_tpu_scoped_vmem_limit_kib=16384")
    assert done.returncode == 0, done.stderr[-2000:]
    plan, shown = done.stdout.split("# What would be submitted (--dry-run):")
    assert plan.startswith("gpt_tiny on v5e:1x1: 1 x TPU v5e, mesh y=1, x=1,")
    assert "memory per chip: " in plan
    assert "fits, " in plan
    assert "--accelerator-type=v5litepod-1 --runtime-version=v2-alpha-tpuv5-lite" in shown
    assert "--env=LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=16384" in shown


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_the_plan() -> None:
    done = launch("--config.data.global_batch=65536")
    assert done.returncode == DOES_NOT_FIT, done.stderr[-2000:]
    assert "DOES NOT FIT" in done.stdout
    assert "would be submitted" not in done.stdout
    assert done.stderr.endswith("overlapfx launch: gpt_tiny does not fit on v5e:1x1; nothing was submitted.\n")
