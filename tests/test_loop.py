"""The loop on a toy model: what it logs, when it saves, that a resumed run is the uninterrupted one."""

import functools
import io
import os
import pathlib
import signal
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.chips import Chip
from overlapfx.train.checkpoint import Checkpointer
from overlapfx.train.console import Console
from overlapfx.train.loop import RunLog, Schedule, make_eval_fn, run, to_global
from overlapfx.train.metrics import MetricsWriter, StepTimer, Utilization, read_metrics
from overlapfx.train.stops import EXIT_INTERRUPTED, StorageError

CHIP = Chip("toy", 1e15, None, None, None, None, 0, "made up")
D = 4


class State(NamedTuple):
    step: jax.Array
    params: jax.Array  # float32[D, D]
    key: jax.Array


class Numbers:
    """A stream of numbered batches; `log` has the numbers that were read, `size` how many there are."""

    def __init__(self, size: int = 10**6) -> None:
        self.next, self.size, self.log = 0, size, []

    def __iter__(self) -> "Numbers":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self.next >= self.size:
            raise StopIteration
        self.log.append(self.next)
        self.next += 1
        return host_batch(self.next - 1)

    def get_state(self) -> dict:
        return {"next": self.next}

    def set_state(self, state: dict) -> None:
        self.next = state["next"]


def host_batch(number: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(number).normal(size=(8, D)).astype(np.float32)
    return {"x": x, "number": np.full(8, number, np.int32)}


@functools.cache
def mesh() -> Mesh:
    return jax.make_mesh((4, 2), ("y", "x"), axis_types=(AxisType.Auto,) * 2)


def shardings() -> State:
    return State(*(NamedSharding(mesh(), spec) for spec in (P(), P("y", "x"), P())))


def first_state() -> State:
    w = np.arange(D * D, dtype=np.float32).reshape(D, D) / 10
    return jax.device_put(State(np.int32(0), w, jax.random.key(7)), shardings())


def loss_of(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w - x) ** 2)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
    key = jax.random.fold_in(state.key, state.step)
    kept = jax.random.bernoulli(key, 0.8, batch["x"].shape) * batch["x"]  # dropout: the key has to be resumed, too
    loss, grad = jax.value_and_grad(loss_of)(state.params, kept)
    w = jax.lax.with_sharding_constraint(state.params - 0.05 * grad, shardings().params)
    metrics = {
        "loss": loss,
        "grad_norm": jnp.linalg.norm(grad),
        "learning_rate": jnp.float32(0.05),
        "tokens": jnp.float32(64),
        "number": batch["number"][0].astype(jnp.float32),
    }
    return State(state.step + 1, w, state.key), metrics


def place(batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return to_global(batch, mesh(), P("y"))


class Trainer:
    """One attempt in a run directory, as a launcher makes it: restore what is there, then run."""

    def __init__(self, directory: pathlib.Path, **options: object) -> None:
        self.directory, self.out, self.numbers = directory, io.StringIO(), Numbers()
        self.step = options.pop("train_step", train_step)
        self.timer = options.pop("timer", None)
        self.utilization = options.pop("utilization", Utilization(64.0, 96.0, 8, CHIP))
        self.eval_fn = options.pop("eval_fn", None)
        self.schedule = options.pop("schedule", Schedule)
        assert not options

    def run(self, num_steps: int, eval_every: int = 0, checkpoint_every: int = 0) -> tuple[State, object]:
        with Checkpointer(self.directory / "checkpoints", keep=2) as checkpointer:
            state, start = first_state(), checkpointer.latest_step() or 0
            if start:
                state, position = checkpointer.restore(state)
                self.numbers.set_state(position)
            writer = MetricsWriter(self.directory / "metrics.jsonl", from_step=start)
            try:
                return run(
                    state=state,
                    train_step=self.step,
                    batches=self.numbers,
                    place=place,
                    schedule=self.schedule(num_steps, eval_every, checkpoint_every),
                    log=RunLog(writer, Console(num_steps, file=self.out), self.utilization, self.timer),
                    start_step=start,
                    eval_fn=self.eval_fn,
                    checkpointer=checkpointer,
                )
            finally:
                writer.close()

    def records(self, kind: str) -> list[dict]:
        return [record for record in read_metrics(self.directory / "metrics.jsonl") if record["kind"] == kind]


def saved_steps(directory: pathlib.Path) -> list[int]:
    return sorted(int(p.name) for p in (directory / "checkpoints").iterdir() if p.name.isdigit())


def same(a: State, b: State) -> None:
    for left, right in zip(a, b, strict=True):
        is_key = jax.dtypes.issubdtype(left.dtype, jax.dtypes.prng_key)
        np.testing.assert_array_equal(*((jax.random.key_data(k) for k in (left, right)) if is_key else (left, right)))


def test_every_step_is_logged(tmp_path: pathlib.Path) -> None:
    trainer = Trainer(tmp_path)
    state, summary = trainer.run(5)
    assert int(state.step) == 5
    records = trainer.records("train")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert [record["number"] for record in records] == [0, 1, 2, 3, 4]  # step k consumes batch k-1
    want = {"loss", "grad_norm", "learning_rate", "tokens", "step_s", "tokens_per_s"}
    want |= {"model_tflops_per_device", "mfu_percent", "hfu_percent"}
    for record in records:
        assert want <= record.keys()
        assert record["tokens_per_s"] == pytest.approx(64 / record["step_s"])
        assert record["model_tflops_per_device"] == pytest.approx(64 / 8 / record["step_s"] / 1e12)
        assert record["hfu_percent"] == pytest.approx(1.5 * record["mfu_percent"])
    (compiled,) = trainer.records("compile")
    assert compiled["compile_s"] > 0
    lines = trainer.out.getvalue().splitlines()
    assert lines[0].startswith("MFU counts model FLOPs")
    assert sum(line.startswith("step ") and "tokens/s" in line for line in lines) == 5
    assert lines[-1] == summary.describe()
    assert (summary.step, summary.steps_run, summary.interrupted, summary.exit_code) == (5, 5, False, 0)
    assert summary.loss == records[-1]["loss"]
    assert trainer.numbers.log == [0, 1, 2, 3, 4]  # nothing is read that no step needs


def test_loss_is_that_of_the_model(tmp_path: pathlib.Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.run(2)
    state, losses = first_state(), []
    for number in range(2):
        state, metrics = train_step(state, place(host_batch(number)))
        losses.append(float(metrics["loss"]))
    assert [record["loss"] for record in trainer.records("train")] == pytest.approx(losses, rel=1e-6)


def test_c22_resumed_run_equals_the_uninterrupted_one(tmp_path: pathlib.Path) -> None:
    whole = Trainer(tmp_path / "whole")
    whole_state, _ = whole.run(9, checkpoint_every=4)
    first, second, third = (Trainer(tmp_path / "parts") for _ in range(3))
    first.run(3)  # saves at its last step, away from the interval
    second.run(7, checkpoint_every=4)
    state, summary = third.run(9, checkpoint_every=4)
    assert summary.steps_run == 2
    assert first.numbers.log + second.numbers.log + third.numbers.log == whole.numbers.log
    same(state, whole_state)
    # Bit for bit: JSON keeps all digits of a float.
    assert [r["loss"] for r in third.records("train")] == [r["loss"] for r in whole.records("train")]
    assert [r["step"] for r in third.records("checkpoint")] == [3, 4, 7, 8, 9]


def test_steps_after_the_last_checkpoint_are_redone_and_logged_once(tmp_path: pathlib.Path) -> None:
    class Crash(Exception):
        pass

    class Failing(Numbers):
        def __next__(self) -> dict[str, np.ndarray]:
            if self.next == 6:
                raise Crash
            return super().__next__()

    trainer = Trainer(tmp_path)
    trainer.numbers = Failing()
    with pytest.raises(Crash):
        trainer.run(8, checkpoint_every=2)
    assert [r["step"] for r in trainer.records("train")] == [1, 2, 3, 4, 5]
    assert saved_steps(tmp_path) == [2, 4]
    again = Trainer(tmp_path)
    again.run(8, checkpoint_every=2)
    assert again.numbers.log == [4, 5, 6, 7]
    whole = Trainer(tmp_path / "whole")
    whole.run(8)
    assert [r["loss"] for r in again.records("train")] == [r["loss"] for r in whole.records("train")]
    assert [(r["attempt"], r["step"]) for r in again.records("train")] == [(1, k) for k in range(1, 5)] + [
        (2, k) for k in range(5, 9)
    ]


def eval_step(params: jax.Array, batch: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
    assert params.shape == (D, D)
    loss_sum, tokens = batch["number"][0].astype(jnp.float32), batch["number"][1].astype(jnp.float32)
    return {"loss": (loss_sum, tokens), "wins": (loss_sum, 2 * tokens)}  # not everything is counted in tokens


def weighted_batches() -> list[dict[str, np.ndarray]]:
    """Summed losses 6, 5, 0 over 3, 1, 0 tokens: the mean is 11 / 4."""
    pairs = [(6, 3), (5, 1), (0, 0)]
    return [{"number": np.array([loss_sum, tokens] * 4, np.int32)} for loss_sum, tokens in pairs]


def test_evaluation_is_weighted_by_tokens_and_timed_apart(tmp_path: pathlib.Path) -> None:
    eval_fn = make_eval_fn(eval_step, weighted_batches, place)
    trainer = Trainer(tmp_path, eval_fn=eval_fn)
    _, summary = trainer.run(5, eval_every=2)
    assert [(r["step"], r["loss"], r["tokens"]) for r in trainer.records("eval")] == [(k, 2.75, 4) for k in (2, 4, 5)]
    assert {r["wins"] for r in trainer.records("eval")} == {1.375}
    assert summary.eval_loss == 2.75
    empty = make_eval_fn(eval_step, lambda: weighted_batches()[2:], place)
    with pytest.raises(ValueError, match="1 evaluation batches hold no token"):
        empty(first_state())


def test_finished_run_evaluates_only(tmp_path: pathlib.Path) -> None:
    Trainer(tmp_path).run(2)
    again = Trainer(tmp_path, eval_fn=make_eval_fn(eval_step, weighted_batches, place))
    state, summary = again.run(2)
    assert int(state.step) == 2
    assert (summary.steps_run, summary.loss, summary.eval_loss) == (0, None, 2.75)
    assert again.numbers.log == []
    assert summary.describe().startswith("Finished step 2; evaluation loss 2.7500; ")


class FakeClock:
    """Advances by one second whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_c24_step_time_excludes_compilation_evaluation_saving(tmp_path: pathlib.Path) -> None:
    # The clock is read once per start or lap and twice per block timed apart; between two reads lies a second. So a
    # step lasts a second, plus one for the block before it, which itself takes a second that must not count.
    trainer = Trainer(tmp_path, timer=StepTimer(FakeClock()), eval_fn=make_eval_fn(eval_step, weighted_batches, place))
    _, summary = trainer.run(6, eval_every=2, checkpoint_every=3)
    assert [r["step_s"] for r in trainer.records("train")] == [1, 1, 2, 2, 2, 1]
    assert [r["eval_s"] for r in trainer.records("eval")] == [1, 1, 1]
    assert summary.compile_s == 1


def test_c24_step_time_waits_for_the_devices(tmp_path: pathlib.Path) -> None:
    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.2)
        return x

    @jax.jit
    def slow_step(state: State, batch: dict[str, jax.Array]) -> tuple[State, dict[str, jax.Array]]:
        loss = jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), loss_of(state.params, batch["x"]))
        one = jnp.float32(1)
        return state, {"loss": loss, "grad_norm": one, "learning_rate": one, "tokens": one}

    trainer = Trainer(tmp_path, train_step=slow_step)
    trainer.run(2)
    assert all(r["step_s"] >= 0.2 for r in trainer.records("train"))


def test_c24_more_than_the_peak_stops_the_run_and_is_on_record(tmp_path: pathlib.Path) -> None:
    trainer = Trainer(tmp_path, utilization=Utilization(1e18, 1e18, 8, CHIP))
    with pytest.raises(ValueError, match=r"Step 1 took .* of the 1000 TFLOP/s of toy \(made up\)"):
        trainer.run(2)
    (record,) = trainer.records("train")
    assert record["step_s"] > 0
    assert "mfu_percent" not in record


def test_c19_error_of_the_background_writer_reaches_the_loop(tmp_path: pathlib.Path, monkeypatch) -> None:
    rename = os.rename

    def full(source: str, target: str) -> None:
        if os.path.basename(target) == "2":
            raise OSError(28, "no space left on device")
        rename(source, target)

    class SavesOnce(Schedule):
        def saves_at(self, step: int) -> bool:
            return step == 2

    monkeypatch.setattr(os, "rename", full)
    trainer = Trainer(tmp_path, schedule=SavesOnce)
    with pytest.raises(StorageError, match="no space left"):
        trainer.run(500)
    assert trainer.records("train")[-1]["step"] < 500  # soon, not at the end
    monkeypatch.undo()
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", [1, 3])
def test_signal_finishes_the_step_saves_once_and_resumes(tmp_path: pathlib.Path, number: int, when: int) -> None:
    class Interrupting(Numbers):
        def __next__(self) -> dict[str, np.ndarray]:
            if self.next == when:
                signal.raise_signal(number)
            return super().__next__()

    before = signal.getsignal(number)
    trainer = Trainer(tmp_path, eval_fn=make_eval_fn(eval_step, weighted_batches, place))
    trainer.numbers = Interrupting()
    state, summary = trainer.run(6, eval_every=1, checkpoint_every=2)
    assert signal.getsignal(number) is before
    assert int(state.step) == when  # batch `when` is read while step `when` runs
    assert (summary.interrupted, summary.exit_code) == (True, EXIT_INTERRUPTED)
    assert saved_steps(tmp_path)[-1] == when
    assert [r["step"] for r in trainer.records("checkpoint")].count(when) == 1
    assert [r["step"] for r in trainer.records("eval")] == list(range(1, when))  # no time for a last evaluation
    assert f"{signal.Signals(number).name} received: saving step {when}" in trainer.out.getvalue()

    again = Trainer(tmp_path)
    state, _ = again.run(6)
    whole = Trainer(tmp_path / "whole")
    whole_state, _ = whole.run(6)
    same(state, whole_state)
    assert [r["loss"] for r in again.records("train")] == [r["loss"] for r in whole.records("train")]


def test_signal_before_the_first_step_saves_the_start(tmp_path: pathlib.Path) -> None:
    class Interrupting(Numbers):
        def __next__(self) -> dict[str, np.ndarray]:
            signal.raise_signal(signal.SIGTERM)
            return super().__next__()

    trainer = Trainer(tmp_path)
    trainer.numbers = Interrupting()
    _, summary = trainer.run(3)
    assert (summary.steps_run, summary.loss, summary.exit_code) == (0, None, EXIT_INTERRUPTED)
    assert saved_steps(tmp_path) == [0]


def test_second_signal_stops_at_once(tmp_path: pathlib.Path) -> None:
    class Impatient(Numbers):
        def __next__(self) -> dict[str, np.ndarray]:
            if self.next == 2:
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            return super().__next__()

    trainer = Trainer(tmp_path)
    trainer.numbers = Impatient()
    # A process that a shell started in the background begins with Ctrl-C ignored, and so would this test.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.run(5)
    finally:
        signal.signal(signal.SIGINT, before)


def test_data_that_ends_early_is_said_in_one_sentence(tmp_path: pathlib.Path) -> None:
    trainer = Trainer(tmp_path)
    trainer.numbers = Numbers(size=3)
    with pytest.raises(ValueError, match=r"^The data ended after 3 steps; lower train\.num_steps to 3 or"):
        trainer.run(5)


def test_to_global_shards_the_batch_over_the_mesh() -> None:
    batch = place(host_batch(3))
    assert batch["x"].shape == (8, D)
    assert batch["x"].sharding == NamedSharding(mesh(), P("y"))
    assert {shard.data.shape for shard in batch["x"].addressable_shards} == {(2, D)}
    np.testing.assert_array_equal(batch["x"], host_batch(3)["x"])
    assert batch["number"].dtype == jnp.int32
