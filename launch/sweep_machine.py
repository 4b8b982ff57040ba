"""How many workers a machine has room for."""

from __future__ import annotations

import dataclasses
import os
import pathlib

# Peak resident memory of a process that planned the 32B config on v4:4x4x4: 2.4 GiB once, 3.7 GiB after three plans.
WORKER_BYTES = 4 * 2**30


@dataclasses.dataclass(frozen=True)
class Machine:
    """What this process may use: `cores`, and `free_bytes` of memory, None where the system does not tell."""

    cores: int
    free_bytes: int | None


def this_machine() -> Machine:
    """Cores and memory as the scheduler and the control group of this process limit them."""
    return Machine(_cores(), _free_bytes())


def fitting_workers(machine: Machine, num_points: int, worker_bytes: int = WORKER_BYTES) -> int:
    """Workers that fit, each with a core and `worker_bytes` of memory; one at least, no more than there are points."""
    room = num_points if machine.free_bytes is None else machine.free_bytes // worker_bytes
    return max(1, min(machine.cores, room, num_points))


def _cores() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words("/sys/fs/cgroup/cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        return max(1, min(available, int(quota[0]) // int(quota[1])))
    return available


def _free_bytes() -> int | None:
    free: list[int] = []
    words = _words("/proc/meminfo")
    if "MemAvailable:" in words:
        free.append(int(words[words.index("MemAvailable:") + 1]) * 1024)
    limit, used = _words("/sys/fs/cgroup/memory.max"), _words("/sys/fs/cgroup/memory.current")
    if limit and used and limit[0] != "max":
        free.append(int(limit[0]) - int(used[0]))
    return min(free, default=None)


def _words(path: str) -> list[str]:
    """The words of a file of the kernel; none where there is no such file."""
    file = pathlib.Path(path)
    return file.read_text(encoding="utf-8").split() if file.is_file() else []
