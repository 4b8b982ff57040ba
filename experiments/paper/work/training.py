"""A real training run on simulated devices, in a process of its own."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from launch.config_file import PROJECT
from overlapfx.train.metrics import read_metrics


def find(task: Mapping[str, Any]) -> dict[str, Any]:
    """The loss of every step. Raises ValueError with the last words of a run that failed."""
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        command = [sys.executable, "-m", "launch.train", f"--config={task['config_name']}", f"--run_dir={run}"]
        command += [f"--config.{change}" for change in task["changes"]]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
        if done.returncode:
            words = done.stderr.strip().splitlines() or ["it printed nothing"]
            raise ValueError(f"overlapfx train ended with exit code {done.returncode}: {words[-1]}")
        records = [r for r in read_metrics(run / "metrics.jsonl") if r["kind"] == "train"]
    return {"losses": [record["loss"] for record in records]}
