"""The training loop: plain to read, the same for every model."""

from __future__ import annotations

import dataclasses
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from overlapfx.train.checkpoint import Checkpointer
from overlapfx.train.console import Console, clock_time, percent
from overlapfx.train.metrics import MetricsWriter, Rates, StepTimer, Utilization

EXIT_INTERRUPTED = 75
"""Exit code of a run that a signal ended after it was saved: sysexits' "temporary failure, try again"."""

HostBatch = Mapping[str, np.ndarray]
Batch = dict[str, jax.Array]


class Stream(Protocol):
    """Host batches with a position that can be saved."""

    def __next__(self) -> HostBatch: ...

    def get_state(self) -> dict[str, Any]:
        """Position of the next batch, as JSON can hold it."""
        ...


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When the loop evaluates and saves: at multiples of an interval (0: never) and at the last step."""

    num_steps: int
    eval_every: int = 0
    checkpoint_every: int = 0

    def evaluates_at(self, step: int) -> bool:
        """Whether an evaluation follows step `step`."""
        return step == self.num_steps or (self.eval_every > 0 and step % self.eval_every == 0)

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint follows step `step`."""
        return step == self.num_steps or (self.checkpoint_every > 0 and step % self.checkpoint_every == 0)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a call of `run` did; rates are those of the median step, None where no step ran or the chip is unknown."""

    step: int
    steps_run: int
    interrupted: bool
    loss: float | None
    eval_loss: float | None
    compile_s: float
    step_s: float | None
    wall_s: float
    tokens_per_s: float | None
    model_tflops_per_device: float | None
    mfu_percent: float | None
    hfu_percent: float | None

    @property
    def exit_code(self) -> int:
        """0, or EXIT_INTERRUPTED."""
        return EXIT_INTERRUPTED if self.interrupted else 0

    def describe(self) -> str:
        """The summary as one line for a person."""
        parts = [f"{'Interrupted after' if self.interrupted else 'Finished'} step {self.step}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.eval_loss is not None:
            parts.append(f"evaluation loss {self.eval_loss:.4f}")
        if self.step_s is not None:
            parts.append(
                f"median step {self.step_s * 1e3:.1f} ms, {self.tokens_per_s:,.0f} tokens/s, "
                f"{self.model_tflops_per_device:.3g} TFLOP/s/device, MFU {percent(self.mfu_percent)}, "
                f"HFU {percent(self.hfu_percent)}"
            )
        parts.append(f"{clock_time(self.wall_s)} in all, of it {self.compile_s:.1f} s compilation")
        return "; ".join(parts) + "."


class RunLog:
    """Times, records and shows what the loop does; one method per event."""

    def __init__(
        self, writer: MetricsWriter, console: Console, utilization: Utilization, timer: StepTimer | None = None
    ):
        self.timer = timer or StepTimer()
        self.console = console
        self.eval_step: int | None = None  # where the last evaluation was
        self._writer, self._utilization = writer, utilization
        self._begun = time.perf_counter()
        self._loss: float | None = None
        self._eval_loss: float | None = None
        self._step_times_s: list[float] = []
        self._tokens: list[float] = []

    def compile(self, step: int, train_step: Any, state: Any, batch: Batch) -> Callable[..., Any]:
        """Compiles the jitted step ahead of its first call, so that no step's time contains compilation."""
        self.console.note(self._utilization.convention())
        with self.timer.apart("compile") as span:
            compiled = train_step.lower(state, batch).compile()
        self._writer.write("compile", step, compile_s=span.seconds)
        self.console.note(f"compiled the training step in {span.seconds:.1f} s")
        return compiled

    def step(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Ends the time of a step whose results are there, and logs it."""
        step_s = self.timer.lap()
        values: dict[str, Any] = {name: float(np.asarray(value)) for name, value in metrics.items()}
        values |= {"step_s": step_s, "tokens_per_s": values["tokens"] / step_s}
        try:
            values |= dataclasses.asdict(self._utilization.rates(step, step_s))
        finally:  # what an impossible rate was computed from should be on record, too
            self._writer.write("train", step, **values)
        self.console.step(step, values)
        self._loss = values["loss"]
        self._step_times_s.append(step_s)
        self._tokens.append(values["tokens"])

    def save(self, step: int, checkpointer: Checkpointer, state: Any, position: Mapping[str, Any]) -> None:
        """Starts a checkpoint and logs how long that held the loop up."""
        with self.timer.apart("checkpoint") as span:
            started = checkpointer.save(step, state, position)
        if started:
            self._writer.write("checkpoint", step, blocked_s=span.seconds)
            self.console.note(f"step {step}: checkpoint; the loop waited {span.seconds:.2f} s")

    def evaluate(self, step: int, eval_fn: Callable[[Any], Mapping[str, float]], state: Any) -> None:
        """Evaluates and logs the result."""
        with self.timer.apart("eval") as span:
            values = {name: float(value) for name, value in eval_fn(state).items()}
        self._writer.write("eval", step, **values, eval_s=span.seconds)
        self.console.note(f"step {step}: evaluation loss {values['loss']:.4f} in {span.seconds:.1f} s")
        self.eval_step, self._eval_loss = step, values["loss"]

    def finish(self, step: int, steps_run: int, *, interrupted: bool) -> Summary:
        """Logs and returns the summary of the run."""
        step_s = statistics.median(self._step_times_s) if self._step_times_s else None
        no_rates = dict.fromkeys(field.name for field in dataclasses.fields(Rates))
        rates = no_rates if step_s is None else dataclasses.asdict(self._utilization.rates(step, step_s))
        summary = Summary(
            step=step,
            steps_run=steps_run,
            interrupted=interrupted,
            loss=self._loss,
            eval_loss=self._eval_loss,
            compile_s=self.timer.apart_s.get("compile", 0.0),
            step_s=step_s,
            wall_s=time.perf_counter() - self._begun,
            tokens_per_s=None if step_s is None else statistics.median(self._tokens) / step_s,
            **rates,
        )
        self._writer.write("end", step, **{k: v for k, v in dataclasses.asdict(summary).items() if k != "step"})
        self.console.note(summary.describe())
        return summary


def run(
    *,
    state: Any,
    train_step: Any,
    batches: Stream,
    place: Callable[[HostBatch], Batch],
    schedule: Schedule,
    log: RunLog,
    start_step: int = 0,
    eval_fn: Callable[[Any], Mapping[str, float]] | None = None,
    checkpointer: Checkpointer | None = None,
) -> tuple[Any, Summary]:
    """Trains from `start_step` to `schedule.num_steps`; returns the state and a summary.

    Steps are counted by how many are finished. Step k consumes batch k-1 of the stream, its loss is that of the
    parameters before its update, its checkpoint is named k. From there a run goes on exactly as an uninterrupted one.

    SIGTERM or Ctrl-C lets the current step finish, saves once and returns; the process should then exit with
    `summary.exit_code`. All processes of a job have to receive the signal during the same step.

    Args:
      state: the state after `start_step` steps; may be donated.
      train_step: jitted (state, batch) -> (state, scalars loss, grad_norm, learning_rate, tokens, ...).
      batches: the stream at the position that belongs to `start_step`.
      place: makes global arrays of a host batch, such as `functools.partial(to_global, mesh=mesh, spec=P("y"))`.
      schedule: when to do what.
      log: where to say it.
      start_step: how many steps the state has been through.
      eval_fn: (state) -> numbers, among them loss; see `make_eval_fn`.
      checkpointer: None trains without saving. The error of a save in the background is raised after the next step.
    """
    step, position = start_step, batches.get_state()
    with _StopOnSignal() as stop, log.console:
        if step < schedule.num_steps:
            ahead = _next_batch(batches, place, step)
            compiled = log.compile(step, train_step, state, ahead)
        log.timer.start()
        while step < schedule.num_steps and not stop.requested:
            state, metrics = compiled(state, ahead)  # returns while the devices are still at work
            step, position = step + 1, batches.get_state()
            if step < schedule.num_steps:
                ahead = _next_batch(batches, place, step)  # read and placed while the devices work
            jax.block_until_ready((state, metrics))
            log.step(step, metrics)
            if checkpointer is not None:
                checkpointer.check_for_errors()
                if schedule.saves_at(step):
                    log.save(step, checkpointer, state, position)
            if eval_fn is not None and schedule.evaluates_at(step) and not stop.requested:
                log.evaluate(step, eval_fn, state)
        if eval_fn is not None and log.eval_step != step and not stop.requested:
            log.evaluate(step, eval_fn, state)  # there was nothing left to train
        if checkpointer is not None:
            if stop.requested:
                log.console.note(f"{stop.name} received: saving step {step} before the run stops.")
                log.save(step, checkpointer, state, position)
            checkpointer.wait()
        summary = log.finish(step, step - start_step, interrupted=stop.requested)
    return state, summary


class _StopOnSignal:
    """Turns the first SIGTERM or Ctrl-C within the block into a flag; a second one has its usual effect."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.name is not None

    def __enter__(self) -> _StopOnSignal:
        # Python delivers signals to the main thread only; elsewhere the loop runs without this service.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.__exit__()


def _next_batch(batches: Stream, place: Callable[[HostBatch], Batch], step: int) -> Batch:
    try:
        batch = next(batches)
    except StopIteration:
        raise ValueError(
            f"The data ended after {step} steps; lower train.num_steps to {step} or use a stream that repeats."
        ) from None
    return place(batch)


def to_global(batch: HostBatch, mesh: Mesh, spec: PartitionSpec) -> Batch:
    """Makes global arrays, sharded as `spec` says, of this process's share of a batch.

    Args:
      batch: arrays [B, ...] with B = this process's rows, any dtype; the same names on every process.
      mesh: the devices of all processes.
      spec: how every array is laid out over them, for example `PartitionSpec("y")`.
    """
    sharding = NamedSharding(mesh, spec)
    return {name: jax.make_array_from_process_local_data(sharding, local) for name, local in batch.items()}


def make_eval_fn(
    eval_step: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    batches: Callable[[], Iterable[HostBatch]],
    place: Callable[[HostBatch], Batch],
) -> Callable[[Any], dict[str, float]]:
    """Makes the `eval_fn` of `run`: the mean loss over all counted tokens of a fixed set of batches.

    Args:
      eval_step: (state.params, batch) -> summed loss, number of counted tokens, both scalars.
      batches: called at every evaluation; returns the batches, each time the same ones.
      place: as for `run`.
    """

    def evaluate(state: Any) -> dict[str, float]:
        # All batches are dispatched before the first result is waited for.
        results = [eval_step(state.params, place(batch)) for batch in batches()]
        loss_sum = sum(float(np.asarray(loss)) for loss, _ in results)
        tokens = sum(float(np.asarray(count)) for _, count in results)
        if tokens == 0:
            raise ValueError(
                f"The {len(results)} evaluation batches hold no token that counts; raise train.eval_batches or "
                "choose other validation data."
            )
        return {"loss": loss_sum / tokens, "tokens": tokens}

    return evaluate
