"""Ends tiny runs at random moments, runs each again until it is finished, compares with a run that was left alone.

python -m tests.faults.kill_runs --runs=50 --seed=0                   kill -9
python -m tests.faults.kill_runs --runs=20 --seed=0 --signal=TERM     preemption
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import pathlib
import random
import re
import signal
import sys
import tempfile
import time

from tests.faults import tiny_run
from tests.faults.kill_points import POINTS, Blow

EXIT_INTERRUPTED = 75
EXIT_CODES = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: EXIT_INTERRUPTED}


class Failure(Exception):
    """A run did not come back as it must."""


def committed(run_dir: pathlib.Path) -> list[int]:
    """Steps of the checkpoints that were committed: their directories were renamed and no deletion has begun."""
    folder = run_dir / "checkpoints"
    steps = [int(p.name) for p in folder.iterdir() if p.name.isdigit()] if folder.is_dir() else []
    return sorted(steps)


def outcome(run_dir: pathlib.Path) -> dict[str, object]:
    """What has to be equal bit for bit: every loss (by step), and the digests of the final state and data position."""
    from overlapfx.train.metrics import read_metrics

    records = read_metrics(run_dir / "metrics.jsonl")
    losses = {r["step"]: (r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"}
    evaluations = {r["step"]: r["loss"] for r in records if r["kind"] == "eval"}
    manifest = json.loads((run_dir / "checkpoints" / "12" / "manifest" / "metadata").read_text())
    digests = {name: leaf["digest"] for name, leaf in manifest["leaves"].items()}
    return {"losses": losses, "evaluations": evaluations, "digests": digests, "data": manifest["data"]}


def one_run(run_dir: pathlib.Path, blows: list[Blow], chance: random.Random, log: pathlib.Path) -> list[str]:
    """Strikes a run with each of `blows` in turn, then lets it finish; returns what happened."""
    story = []
    for blow in [*blows, None]:
        before = committed(run_dir)
        log.write_text("")
        seed = chance.randrange(2**32)
        plant = functools.partial(blow.plant, random.Random(seed)) if blow else lambda: None
        code = tiny_run.wait(tiny_run.start(tiny_run.arguments(run_dir), log, plant))
        said = log.read_text()
        resumed = re.search(r"resumes after step (\d+)", said)
        if re.search(r"resumes after|starts in", said):
            wanted = before[-1] if before else 0
            if (int(resumed[1]) if resumed else 0) != wanted:
                raise Failure(f"committed {before}, but: {said[:300]}")
        if code not in ((0, EXIT_CODES[blow.number]) if blow else (0,)):
            raise Failure(f"exit code {code} after {story}: {said[-3000:]}")
        if code == EXIT_INTERRUPTED:
            check_saved_once(run_dir, before, said)
        if blow:
            story.append(f"{blow} at {committed(run_dir) or 'nothing'}" if code else f"{blow} missed")
    return story


def check_saved_once(run_dir: pathlib.Path, before: list[int], said: str) -> None:
    """What SIGTERM promises: one save of the last step that was finished, and no other out of turn."""
    finished = [int(step) for step in re.findall(r"^step +(\d+)/", said, re.MULTILINE)]
    last = finished[-1] if finished else max(before, default=0)
    saved = [int(step) for step in re.findall(r"^step (\d+): checkpoint;", said, re.MULTILINE)]
    out_of_turn = [step for step in saved if step % tiny_run.FIELDS["train.checkpoint_every"]]
    if committed(run_dir)[-1] != last or said.count("before the run stops") != 1 or out_of_turn not in ([], [last]):
        raise Failure(f"stopped after step {last}, committed {committed(run_dir)}, saved {saved}")


def plan(runs: int, number: int, chance: random.Random) -> list[list[Blow]]:
    """Per run where it is struck: every point in turn, now and then a second one in the same run."""
    return [
        [Blow(point, number) for point in (POINTS[run % len(POINTS)], *chance.sample(POINTS, chance.choice([0, 0, 1])))]
        for run in range(runs)
    ]


def short_plan() -> list[list[Blow]]:
    """For the suite: kill -9 at every point, SIGTERM during compilation, a step, an evaluation and a save (C20)."""
    kill, term = signal.SIGKILL, signal.SIGTERM
    return [
        [Blow(point, kill) for point in POINTS[:4]],
        [Blow(point, kill) for point in POINTS[4:]],
        [Blow(point, term) for point in POINTS[1:5]],
    ]


def compare(found: dict[str, dict], wanted: dict[str, dict], story: list[str]) -> None:
    # An evaluation that was due when the signal came is not made up for.
    found["evaluations"] = wanted["evaluations"] | found["evaluations"]
    differing = [name for name in wanted if found[name] != wanted[name]]
    if differing:
        raise Failure(f"{', '.join(differing)} differ from the uninterrupted run after {story}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signal", choices=("KILL", "TERM"), default="KILL")
    parser.add_argument("--short", action="store_true", help="few runs, several signals each")
    options = parser.parse_args()
    tiny_run.prepare()
    chance = random.Random(options.seed)
    number = signal.Signals[f"SIG{options.signal}"]
    blows = short_plan() if options.short else plan(options.runs, number, chance)
    struck: collections.Counter[str] = collections.Counter()
    begun, failures = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        one_run(root / "whole", [], chance, root / "log")
        wanted = outcome(root / "whole")
        for index, chosen in enumerate(blows):
            try:
                story = one_run(root / f"run{index}", chosen, chance, root / "log")
                compare(outcome(root / f"run{index}"), wanted, story)
            except (Failure, OSError, ValueError) as error:
                failures += 1
                print(f"run {index}: FAILED: {error}", flush=True)
                continue
            struck.update(line.rpartition(" at ")[0] for line in story if not line.endswith("missed"))
            print(f"run {index}: {'; '.join(story)}; equal bit for bit", flush=True)
    by_point = ", ".join(f"{name} {struck[name]}" for name in sorted(struck))
    print(
        f"{len(blows)} runs (seed {options.seed}), struck {struck.total()} times ({by_point}): {len(blows) - failures} "
        f"ended as the uninterrupted run, bit for bit, {failures} did not; {time.monotonic() - begun:.0f} s."
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
