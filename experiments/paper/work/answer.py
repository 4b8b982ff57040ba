"""Answers one task of a figure in a worker process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from experiments.paper.code import code_hash
from launch.sweep_work import outcome_of
from overlapfx.train.rundir import versions

_CODE = code_hash()  # of what this process has imported by now


def do(task: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a task, as JSON values: what the module of its "kind" finds under "result", or "why" not."""
    module = importlib.import_module(f"experiments.paper.work.{task['kind']}")
    found = outcome_of(lambda: {"outcome": "ok", "result": module.find(task)})
    return {**found, "code": _CODE, "commit": versions()["commit"]}
