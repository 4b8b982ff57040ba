"""A long run of tiny steps with saves, evaluations and three resumes: what grows, what slows down, what leaks.

python -m tests.faults.long_run --steps=2000
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time

from tests.faults import tiny_run
from tests.faults.kill_points import wrap

RESUMES = 3
MEASUREMENTS = 100  # in the whole run


def measure(file: pathlib.Path, every: int) -> None:
    """Planted into a run: after `every` steps its memory and open files go to `file`."""
    from overlapfx.train.loop import RunLog

    def after(log: object, step: int, *_: object) -> None:
        if step % every == 0:
            gc.collect()
            pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
            record = {
                "pid": os.getpid(),
                "step": step,
                "cpu_s": time.process_time(),
                "rss_mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                "files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
            }
            with file.open("a") as out:
                out.write(json.dumps(record) + "\n")

    wrap(RunLog, "step", after=after)


def growth(values: list[float]) -> float:
    """Percent by which the median of the last quarter exceeds that of the second; the first is warm-up."""
    quarter = len(values) // 4
    second, last = (statistics.median(values[i * quarter : (i + 1) * quarter]) for i in (1, 3))
    return 100 * (last / second - 1)


def more(counts: list[int]) -> int:
    """By how much the median of the last quarter exceeds that of the first half; a save opens some for a moment."""
    return round(statistics.median(counts[-len(counts) // 4 :]) - statistics.median(counts[: len(counts) // 2]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    every = max(1, steps // MEASUREMENTS)
    tiny_run.prepare()
    from overlapfx.train.metrics import read_metrics

    failed = False
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        fields = {"train__checkpoint_every": 25, "train__eval_every": 50, "optimizer__warmup_steps": 10}
        for attempt in range(RESUMES + 1):
            last = steps * (attempt + 1) // (RESUMES + 1)
            # The run is stopped as a scheduler would stop it, at a quarter, a half, three quarters.
            argv = tiny_run.arguments(root / "run", train__num_steps=steps, **fields)

            def plant(last: int = last) -> None:
                measure(root / "measured.jsonl", every)
                from overlapfx.train.loop import RunLog

                wrap(RunLog, "step", after=lambda _, step, *__: step == last < steps and os.kill(os.getpid(), 15))

            code = tiny_run.wait(tiny_run.start(argv, root / "log", plant), 3600)
            if code != (0 if last == steps else 75):
                print((root / "log").read_text()[-3000:])
                return 1
        measured = [json.loads(line) for line in (root / "measured.jsonl").read_text().splitlines()]
        records = read_metrics(root / "run" / "metrics.jsonl")
        train = [r for r in records if r["kind"] == "train"]
        assert [r["step"] for r in train] == list(range(1, steps + 1))
        for number, pid in enumerate(dict.fromkeys(m["pid"] for m in measured)):
            own = [m for m in measured if m["pid"] == pid]
            first, final = own[0]["step"], own[-1]["step"]
            # Processor time, since other work on the machine does not slow that down.
            cpu_ms = [1e3 * (b["cpu_s"] - a["cpu_s"]) / every for a, b in itertools.pairwise(own)]
            wall_ms = [1e3 * r["step_s"] for r in train if first <= r["step"] <= final]
            memory, slower = growth([m["rss_mb"] for m in own]), growth(cpu_ms)
            files, threads = (more([m[what] for m in own]) for what in ("files", "threads"))
            print(
                f"attempt {number + 1}, steps {first} to {final}: memory {own[-1]['rss_mb']:.0f} MB ({memory:+.1f} %), "
                f"processor time of a step {statistics.median(cpu_ms):.1f} ms ({slower:+.1f} %), step "
                f"{statistics.median(wall_ms):.1f} ms, {own[-1]['files']} open files ({files:+d}), "
                f"{own[-1]['threads']} threads ({threads:+d})"
            )
            failed |= memory >= 5 or slower >= 10 or files > 0 or threads > 0
        saves = sum(r["kind"] == "checkpoint" for r in records)
        evaluations = sum(r["kind"] == "eval" for r in records)
        print(f"{steps} steps, {RESUMES} resumes, {saves} checkpoints, {evaluations} evaluations.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
