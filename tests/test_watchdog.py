"""A step that does not finish ends its process, with the stacks of all threads and a mark on the run."""

import pathlib
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from overlapfx.train.metrics import MetricsWriter, read_metrics
from overlapfx.train.rundir import RunDir
from overlapfx.train.stops import EXIT_HUNG
from overlapfx.train.watchdog import Watchdog


class Ended:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.happened = threading.Event()

    def __call__(self, code: int) -> None:
        self.code = code
        self.happened.set()


def stuck_in_a_step_with_this_name(event: threading.Event) -> None:
    event.wait(60)


def test_hung_step_leaves_stacks_and_a_mark(tmp_path: pathlib.Path, capfd) -> None:
    ended, release, said = Ended(), threading.Event(), []
    worker = threading.Thread(target=stuck_in_a_step_with_this_name, args=(release,))
    worker.start()
    with Watchdog(0.3, tmp_path, process=2, on_hang=said.append, leave=ended) as watchdog:
        watchdog.expect("step 5")
        assert ended.happened.wait(20)
        watchdog.rest()
    release.set()
    worker.join()
    assert ended.code == EXIT_HUNG
    (sentence,) = said
    assert sentence.startswith("step 5 did not finish within 0.3 s on process 2; the stacks of all threads are in ")
    stacks = (tmp_path / "stacks.2.txt").read_text()
    assert sentence in stacks
    assert "stuck_in_a_step_with_this_name" in stacks  # another thread than the one that waits
    assert "test_hung_step_leaves_stacks_and_a_mark" in stacks
    assert "stuck_in_a_step_with_this_name" in capfd.readouterr().err


def test_steps_that_finish_are_left_alone(tmp_path: pathlib.Path) -> None:
    ended = Ended()
    with Watchdog(0.4, tmp_path, leave=ended) as watchdog:
        for step in range(8):  # longer than the limit in all
            watchdog.expect(f"step {step}")
            time.sleep(0.1)
        watchdog.rest()
        time.sleep(0.6)  # a save, for example
        watchdog.expect("the evaluation")
        with watchdog.resting():
            time.sleep(0.6)  # compilation
        for _ in range(6):
            time.sleep(0.1)
            watchdog.again()
    assert ended.code is None
    assert list(tmp_path.iterdir()) == []


def test_a_shorter_wait_after_a_rest_is_noticed(tmp_path: pathlib.Path) -> None:
    ended = Ended()
    with Watchdog(0.3, tmp_path, leave=ended) as watchdog:
        watchdog.expect("step 1")
        watchdog.rest()
        time.sleep(0.5)
        watchdog.expect("step 2")
        assert ended.happened.wait(20)
    assert "step 2 did not finish" in (tmp_path / "stacks.0.txt").read_text()


def test_no_limit_starts_nothing(tmp_path: pathlib.Path) -> None:
    before = threading.active_count()
    with Watchdog(0, tmp_path / "nowhere") as watchdog:
        watchdog.expect("step 1")
        assert threading.active_count() == before


def test_a_mark_that_fails_does_not_keep_the_process_alive(tmp_path: pathlib.Path) -> None:
    ended = Ended()

    def full(_: str) -> None:
        raise OSError(28, "no space left on device")

    watchdog = Watchdog(0.2, tmp_path, on_hang=full, leave=ended)
    with watchdog:
        # The thread dies of the error after it has ended the process.
        hook, threading.excepthook = threading.excepthook, lambda _: None
        try:
            watchdog.expect("step 1")
            assert ended.happened.wait(20)
            watchdog._thread.join()
        finally:
            threading.excepthook = hook
    assert ended.code == EXIT_HUNG


def test_c17_process_that_cannot_run_python_ends_too(tmp_path: pathlib.Path) -> None:
    """Code that keeps Python's lock: no Python thread gets to run, yet the process ends, with its stacks."""
    script = """
        import pathlib, re, sys
        from overlapfx.train.watchdog import Watchdog
        with Watchdog(0.5, pathlib.Path(sys.argv[1])) as watchdog:
            watchdog.expect("step 5")
            re.match(r"(a+)+$", "a" * 40 + "b")  # minutes, without giving the lock away
    """
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, check=False, timeout=120
    )
    assert done.returncode != 0
    assert time.monotonic() - begun < 60
    assert "re/__init__.py" in (tmp_path / "stacks.0.txt").read_text()


def test_next_attempt_says_where_to_look(tmp_path: pathlib.Path) -> None:
    config = {"name": "tiny", "train": {"num_steps": 3}}
    RunDir(tmp_path, config).close()
    (tmp_path / "stacks.1.txt").write_text("step 5 did not finish")
    with RunDir(tmp_path, config) as run:
        assert run.notes == ("The watchdog ended an earlier attempt; where it hung is in stacks.1.txt.",)


def test_hung_is_a_record(tmp_path: pathlib.Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write("train", 4, loss=1.0)
    assert writer.last_step == 4
    writer.write("hung", writer.last_step, reason="step 5 did not finish")
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["reason"] == "step 5 did not finish"


@pytest.mark.parametrize("sleep_in", ["batch", "evaluation"])
def test_c17_the_loop_is_watched(tmp_path: pathlib.Path, sleep_in: str) -> None:
    """A toy run that sleeps in its fifth step, or in its second evaluation."""
    script = f"""
        import functools, pathlib, sys, time
        import numpy as np, jax, jax.numpy as jnp
        from overlapfx.train import loop, metrics, watchdog
        from overlapfx.train.console import Console
        calls = {{"batch": 0, "evaluation": 0}}
        def slow(name, at):
            calls[name] += 1
            if name == {sleep_in!r} and calls[name] == at:
                time.sleep(60)
        class Numbers:
            def __next__(self):
                slow("batch", 5)
                return {{"x": np.ones(2, np.float32)}}
            def get_state(self):
                return {{}}
        @jax.jit
        def step(state, batch):
            one = jnp.float32(1)
            return state, {{"loss": batch["x"].sum(), "grad_norm": one, "learning_rate": one, "tokens": one}}
        folder = pathlib.Path(sys.argv[1])
        writer = metrics.MetricsWriter(folder / "metrics.jsonl")
        log = loop.RunLog(writer, Console(9), metrics.Utilization(1.0, 1.0, 1, None))
        def evaluate(state):
            slow("evaluation", 2)
            return {{"loss": 1.0}}
        with watchdog.Watchdog(2.0, folder, on_hang=log.hung) as dog:
            loop.run(state=jnp.ones(2), train_step=step, batches=Numbers(), place=lambda b: b, log=log,
                     schedule=loop.Schedule(9, eval_every=2), eval_fn=evaluate, watchdog=dog)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == EXIT_HUNG, done.stderr[-3000:]
    what = "step 4" if sleep_in == "batch" else "the evaluation after step 4"  # a batch is read during the step before
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert (last["kind"], last["step"]) == ("hung", 3 if sleep_in == "batch" else 4)
    assert last["reason"].startswith(f"{what} did not finish within 2 s")
    assert f"in {'__next__' if sleep_in == 'batch' else 'evaluate'}" in (tmp_path / "stacks.0.txt").read_text()
