"""Works off whatever has no stored result yet, such as the points of a sweep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from launch.sweep_machine import WORKER_BYTES, Machine, fitting_workers
from launch.sweep_points import Point
from launch.sweep_pool import Limits, Pool, Serve, Task
from launch.sweep_progress import SweepProgress
from launch.sweep_rank import Row
from launch.sweep_store import Store
from overlapfx.config import to_dict

RECYCLE_BYTES = 3 * 2**30
# Outcomes that say nothing about the point: the next call tries again.
PASSING = ("killed", "timeout")


class CodeChanged(Exception):
    """The code is another than when the sweep began; the message is one sentence."""


class Work(Protocol):
    """Things to find out, each known by a key under which its result is stored."""

    @property
    def basis(self) -> Mapping[str, Any]:
        """What decides results besides the tasks."""

    @property
    def num_workers(self) -> int | None:
        """Processes at a time; None is as many as fit the machine."""

    @property
    def timeout_s(self) -> float:
        """Of one task."""

    def wanted(self) -> Collection[str]:
        """All keys."""

    def name(self, key: str) -> str:
        """For people."""

    def task(self, key: str) -> Task:
        """What a worker is given."""

    def is_quick(self, key: str) -> bool:
        """Whether it takes less time than most."""

    def about(self, key: str) -> dict[str, Any]:
        """What is stored with the result."""

    def done(self, key: str, record: Mapping[str, Any], progress: SweepProgress) -> None:
        """Tells of a result."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What to find out: legal `points` by key, what else decides their results, what workers are told besides.

    num_workers: None is as many as fit the machine.
    """

    points: Mapping[str, Point]
    basis: Mapping[str, Any]
    told: Mapping[str, Any]
    num_workers: int | None
    timeout_s: float

    def wanted(self) -> Collection[str]:
        """The keys of the points."""
        return self.points.keys()

    def name(self, key: str) -> str:
        """That of the point."""
        return str(self.points[key])

    def task(self, key: str) -> Task:
        """What a worker is given."""
        return {"config": self._config(key), "target": self.points[key].target.name, **self.told}

    def is_quick(self, key: str) -> bool:
        """Decomposed programs compile several times as long."""
        config = self.points[key].config
        assert config is not None
        return config.overlap.mode == "off"

    def about(self, key: str) -> dict[str, Any]:
        """What identifies the point."""
        return {"point": self.name(key), "config": self._config(key)}

    def done(self, key: str, record: Mapping[str, Any], progress: SweepProgress) -> None:
        """A line with the time of the step."""
        progress.done(Row(self.points[key], record))

    def _config(self, key: str) -> dict[str, Any]:
        config = self.points[key].config
        assert config is not None
        return to_dict(config)


def missing(work: Work, store: Store, retry: bool) -> list[str]:
    """Keys without a result that lasts, those that take the longest first.

    retry: failures do not last.
    """

    def lasts(key: str) -> bool:
        outcome = store.results.get(key, {}).get("outcome")
        return outcome is not None and outcome not in PASSING and not (retry and outcome == "error")

    # A long one at the end would leave the other workers idle.
    return sorted((key for key in work.wanted() if not lasts(key)), key=work.is_quick)


def work_off(
    work: Work, store: Store, keys: Sequence[str], machine: Machine, serve: Serve, progress: SweepProgress
) -> None:
    """Stores a result for every key. What a worker was killed over is tried once more, alone.

    Raises CodeChanged, and StartError if workers cannot start.
    """
    used = max((record.get("peak_rss_bytes", 0) for record in store.results.values()), default=0)
    fitting = fitting_workers(machine, len(keys), max(used, WORKER_BYTES))
    first, alone = work.num_workers or fitting, 1
    killed = _round(work, store, keys, first, serve, progress, is_last=False)
    if killed:
        progress.note(f"{len(killed)} whose worker was killed are tried again, one at a time")
        _round(work, store, killed, alone, serve, progress, is_last=True)


def _round(
    work: Work,
    store: Store,
    keys: Sequence[str],
    num_workers: int,
    serve: Serve,
    progress: SweepProgress,
    is_last: bool,
) -> list[str]:
    """Returns the keys over which a worker was killed; stores that only if it `is_last`."""
    killed = []
    limits = Limits(num_workers, work.timeout_s, RECYCLE_BYTES)
    pool = Pool(serve, limits, store.folder / "logs", started=lambda key: progress.started(work.name(key)))
    for key, outcome in pool.run({key: work.task(key) for key in keys}):
        if outcome["outcome"] == "killed" and not is_last:
            killed.append(key)
            continue
        if outcome.get("code", work.basis["code"]) != work.basis["code"]:
            raise CodeChanged("the code changed while the sweep ran; run the same command again.")
        record = {"key": key, **work.about(key), "basis": work.basis, **outcome}
        store.add({**record, "unix_s": round(time.time(), 3)})
        work.done(key, store.results[key], progress)
    return killed
