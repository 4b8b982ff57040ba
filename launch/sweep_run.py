"""Works off the points of a sweep that have no stored result yet."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

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

    def task(self, key: str) -> Task:
        """What a worker is given."""
        point = self.points[key]
        assert point.config is not None
        return {"config": to_dict(point.config), "target": point.target.name, **self.told}


def missing(sweep: Sweep, store: Store, retry: bool) -> list[str]:
    """Keys without a result that lasts, those that take the longest first.

    retry: failures do not last.
    """

    def lasts(key: str) -> bool:
        outcome = store.results.get(key, {}).get("outcome")
        return outcome is not None and outcome not in PASSING and not (retry and outcome == "error")

    def is_quick(key: str) -> bool:
        config = sweep.points[key].config
        assert config is not None
        return config.overlap.mode == "off"

    # A long one at the end would leave the other workers idle; decomposed programs compile several times as long.
    return sorted((key for key in sweep.points if not lasts(key)), key=is_quick)


def work_off(
    sweep: Sweep, store: Store, keys: Sequence[str], machine: Machine, serve: Serve, progress: SweepProgress
) -> None:
    """Stores a result for every key. What a worker was killed over is tried once more, alone.

    Raises CodeChanged, and StartError if workers cannot start.
    """
    used = max((record.get("peak_rss_bytes", 0) for record in store.results.values()), default=0)
    fitting = fitting_workers(machine, len(keys), max(used, WORKER_BYTES))
    first, alone = sweep.num_workers or fitting, 1
    killed = _round(sweep, store, keys, first, serve, progress, is_last=False)
    if killed:
        progress.note(f"{len(killed)} points whose worker was killed are tried again, one at a time")
        _round(sweep, store, killed, alone, serve, progress, is_last=True)


def _round(
    sweep: Sweep,
    store: Store,
    keys: Sequence[str],
    num_workers: int,
    serve: Serve,
    progress: SweepProgress,
    is_last: bool,
) -> list[str]:
    """Returns the keys over which a worker was killed; stores that only if it `is_last`."""
    killed = []
    limits = Limits(num_workers, sweep.timeout_s, RECYCLE_BYTES)
    pool = Pool(serve, limits, store.folder / "logs", started=lambda key: progress.started(str(sweep.points[key])))
    for key, outcome in pool.run({key: sweep.task(key) for key in keys}):
        point = sweep.points[key]
        if outcome["outcome"] == "killed" and not is_last:
            killed.append(key)
            continue
        if outcome.get("code", sweep.basis["code"]) != sweep.basis["code"]:
            raise CodeChanged("the code changed while the sweep ran; run the same command again.")
        record = {"key": key, "point": str(point), "config": to_dict(point.config), "basis": sweep.basis, **outcome}
        store.add({**record, "unix_s": round(time.time(), 3)})
        progress.done(Row(point, store.results[key]))
    return killed
