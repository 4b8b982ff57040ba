"""Finds out what is not stored yet, in worker processes."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Collection, Mapping
from typing import Any

from experiments.paper.measurement import Measurement
from launch import sweep_worker
from launch.environment import device_environment, has_accelerator
from launch.sweep_progress import SweepProgress
from overlapfx.aot import slices

# Of a simulated mesh: what the tiny configs ask for.
NUM_DEVICES = 8
_UNOPTIMISED = "--xla_backend_optimization_level"
serve = functools.partial(sweep_worker.serve, module="experiments.paper.work.answer")


@dataclasses.dataclass(frozen=True)
class Job:
    """Measurements by key, as `launch.sweep_run.Work`."""

    measurements: Mapping[str, Measurement]
    basis: Mapping[str, Any]
    num_workers: int | None
    timeout_s: float

    def wanted(self) -> Collection[str]:
        """All keys."""
        return self.measurements.keys()

    def name(self, key: str) -> str:
        """That of the measurement."""
        return self.measurements[key].name

    def task(self, key: str) -> dict[str, Any]:
        """What a worker is given."""
        return {"kind": self.measurements[key].kind, **self.measurements[key].task}

    def is_quick(self, key: str) -> bool:
        """Whether it takes less time than most."""
        return self.measurements[key].is_quick

    def about(self, key: str) -> dict[str, Any]:
        """What is stored with the result: what was asked."""
        wanted = self.measurements[key]
        return {"identity": wanted.identity(), "name": wanted.name, "kind": wanted.kind, "task": dict(wanted.task)}

    def done(self, key: str, record: Mapping[str, Any], progress: SweepProgress) -> None:
        """A line with what matters most of the result."""
        text, good = in_short(record)
        progress.finished(self.name(key), f"{text} ({record['took_s']:.0f} s)", good)


def in_short(record: Mapping[str, Any]) -> tuple[str, bool]:
    """A result in a few words, and whether it is one."""
    result = record.get("result")
    if result is None or "why" in result:
        return f"{record['outcome']}: {(result or record)['why']}", False
    return (f"{result['step_s']:.4g} s per step" if "step_s" in result else "done"), True


def prepare_environment(quick: bool) -> None:
    """What workers inherit: a compiler for slices that are not there, simulated devices.

    quick: programs for simulated devices are compiled without optimisations, which takes half the time.
    """
    slices.require_compiler()
    slices.prepare_environment()
    flags = os.environ.get("XLA_FLAGS", "")
    if quick and _UNOPTIMISED not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_UNOPTIMISED}=0".strip()
    os.environ.update(device_environment(NUM_DEVICES, None, os.environ, has_accelerator()))
