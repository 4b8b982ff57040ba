"""Faults of one run each, from the command line to the exit code: python -m tests.faults.scenarios.

Scenarios end with a run that goes on from what was kept, and compare its losses with those of a run that was
left alone.
"""

from __future__ import annotations

import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from tests.faults import tiny_run
from tests.faults.kill_points import count, wrap

LIMIT_S = 8  # for a step; much more than one takes on a busy machine


class Runs:
    """Tiny runs in one directory after another."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root, self.directory = root, root / "whole"
        assert self.run()[0] == 0, self.said
        self.whole = self.losses()

    def begin(self, name: str) -> None:
        self.directory = self.root / name

    def run(self, *flags: str, plant: Callable[[], None] = lambda: None, **fields: object) -> tuple[int, str]:
        """Exit code and the last line of what the run said."""
        argv = [*tiny_run.arguments(self.directory, **fields), *flags]
        log = self.root / "log"
        # Through a pipe: a disk that is full must not cut short what the run says.
        with log.open("w") as out, subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=out) as collector:
            code = tiny_run.wait(tiny_run.start(argv, pathlib.Path(f"/dev/fd/{collector.stdin.fileno()}"), plant))
        self.said = log.read_text()
        return code, self.said.rstrip().rpartition("\n")[2]

    def losses(self) -> dict[int, float]:
        from overlapfx.train.metrics import read_metrics

        return {r["step"]: r["loss"] for r in read_metrics(self.directory / "metrics.jsonl") if r["kind"] == "train"}

    def records(self, kind: str) -> list[dict]:
        from overlapfx.train.metrics import read_metrics

        return [r for r in read_metrics(self.directory / "metrics.jsonl") if r["kind"] == kind]

    def saved(self) -> list[int]:
        return sorted(int(p.name) for p in (self.directory / "checkpoints").iterdir() if p.name.isdigit())

    def finishes(self, *flags: str, **fields: object) -> None:
        code, _ = self.run(*flags, **fields)
        assert code == 0, self.said[-3000:]
        assert self.losses() == self.whole, (self.losses(), self.whole)


def poison(first: int, last: int) -> Callable[[], None]:
    """Batches from `first` to `last` give a loss that is not a number."""

    def plant() -> None:
        import numpy as np

        from launch import session

        opened = session.open_inputs

        def open_inputs(*args: object) -> object:
            inputs = opened(*args)
            following = inputs.batches.__class__.__next__

            def poisoned(stream: object) -> dict:
                number = stream.get_state()["next_batch"]
                batch = following(stream)
                return {**batch, "mask": batch["mask"] * np.nan} if first <= number <= last else batch

            inputs.batches.__class__.__next__ = poisoned
            return inputs

        session.open_inputs = open_inputs

    return plant


def numbers_that_are_not_finite(runs: Runs) -> None:
    code, said = runs.run(plant=poison(6, 11), train__max_skipped_steps=2)
    assert code == 65, runs.said
    assert "Step 9: batch 8 gives a loss of nan and gradients that are not finite for" in said, said
    assert runs.saved() == [6, 8]  # of the state before, which is good
    assert [r["skipped"] for r in runs.records("train")] == [0] * 6 + [1] * 3
    shutil.rmtree(runs.directory / "checkpoints" / "8")  # which holds the state of step 6 behind two lost batches
    runs.finishes(train__max_skipped_steps=2)


def few_skips_go_on(runs: Runs) -> None:
    code, _ = runs.run(plant=poison(6, 7))
    assert code == 0, runs.said
    assert "step 7: batch 6 gives a loss of nan" in runs.said and "update skipped (2 in a row, at most 3)" in runs.said
    assert all(loss == loss for step, loss in runs.losses().items() if step not in (7, 8))


def damaged_checkpoint(runs: Runs) -> None:
    assert runs.run(train__num_steps=8)[0] == 0
    kept = shutil.copytree(runs.directory, runs.root / "undamaged")
    assert runs.run()[0] == 0, runs.said
    undamaged, code, said = runs.losses(), 0, ""
    for eighth in (4, 2, 6, 1, 3, 5, 7):
        shutil.rmtree(runs.directory)
        shutil.copytree(kept, runs.directory)
        largest = max((runs.directory / "checkpoints" / "8").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
        content = bytearray(largest.read_bytes())
        content[len(content) * eighth // 8] ^= 1
        largest.write_bytes(content)
        code, said = runs.run()
        if code:
            break
        # Orbax leaves holes in its files: nobody reads this bit again, and nothing is lost.
        assert runs.losses() == undamaged, (runs.losses(), undamaged)
    assert code == 74, runs.said
    assert "checkpoints/8 is damaged" in said and "--use-older-checkpoint goes back to an older one (6)" in said, said
    assert "Traceback" not in runs.said and "compiled" not in runs.said
    code, _ = runs.run("--use-older-checkpoint", "--check-replicas")
    assert code == 0 and "resumes after step 6" in runs.said and "It is now 8.damaged." in runs.said, runs.said


def full_disk(runs: Runs) -> None:
    def plant() -> None:
        from overlapfx.train.checkpoint import Checkpointer

        def full() -> None:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit))

        wrap(Checkpointer, "save", before=count(3, full))

    code, said = runs.run(plant=plant)
    assert code == 74, runs.said
    # The last line is ours; before it TensorStore may print what its callbacks found closed.
    # Step 4 may still have been on its way to the disk.
    assert re.search(r"could not be written \(File too large\); the newest one is that of step [24]", said), said
    runs.finishes()


def vanished_directory(runs: Runs) -> None:
    def plant() -> None:
        from overlapfx.train.loop import RunLog

        def move() -> None:
            while not (runs.directory / "checkpoints" / "4").is_dir():  # a writer would make its directory again
                time.sleep(0.02)
            os.rename(runs.directory, runs.root / "moved")

        wrap(RunLog, "step", after=count(5, move))

    code, said = runs.run(plant=plant)
    assert code == 74, runs.said
    assert "has vanished, so step 6 cannot be saved" in said, said
    assert not runs.directory.exists()
    os.rename(runs.root / "moved", runs.directory)
    runs.finishes()


def hung_step(runs: Runs) -> None:
    def plant() -> None:
        from launch import session

        wrap(session.data.BatchStream, "__next__", before=count(8, lambda: time.sleep(600)))

    begun = time.monotonic()
    code, _ = runs.run(plant=plant, train__step_timeout_s=LIMIT_S)
    assert code == 76, runs.said
    assert time.monotonic() - begun < 200
    (mark,) = runs.records("hung")
    assert mark["step"] == 6 and f"step 7 did not finish within {LIMIT_S} s on process 0" in mark["reason"], mark
    assert "_next_batch" in (runs.directory / "stacks.0.txt").read_text()
    runs.finishes()
    assert "The watchdog ended an earlier attempt; where it hung is in stacks.0.txt." in runs.said


def different_replicas(runs: Runs) -> None:
    def plant() -> None:
        import jax
        import numpy as np

        from overlapfx.train import loop

        def spoil(log: object, step: int, checkpointer: object, state: object, position: object) -> None:
            raise AssertionError("a state with a fault was saved")

        def fault(step: int, state: object) -> None:
            leaf = state.params["final_norm"]
            leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf
            shards = [np.array(shard.data) for shard in leaf.addressable_shards]
            shards[-1].view(np.uint8)[0] ^= 1
            placed = [jax.device_put(data, s.device) for data, s in zip(shards, leaf.addressable_shards, strict=True)]
            bad = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed)
            check(step, {"final_norm": bad})

        from overlapfx.train import replicas

        check = replicas.check_replicas
        replicas.check_replicas = fault
        loop.RunLog.save = spoil

    code, said = runs.run("--check-replicas", plant=plant)
    assert code == 65, runs.said
    assert "Step 2: " in said and "hold different values of final_norm, which should be equal" in said, said
    runs.finishes("--check-replicas")


SCENARIOS = (
    numbers_that_are_not_finite,
    few_skips_go_on,
    damaged_checkpoint,
    full_disk,
    vanished_directory,
    hung_step,
    different_replicas,
)


def main() -> int:
    tiny_run.prepare()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(pathlib.Path(folder))
        for scenario in [known for known in SCENARIOS if known.__name__ in (sys.argv[1:] or known.__name__)]:
            runs.begin(scenario.__name__)
            try:
                scenario(runs)
            except (AssertionError, OSError, ValueError) as error:
                failed += 1
                print(f"{scenario.__name__}: FAILED: {error}", flush=True)
            else:
                print(f"{scenario.__name__}: as it should", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
