"""The training loop: plain to read, the same for every model."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from overlapfx.train.checkpoint import Checkpointer
from overlapfx.train.console import Console, clock_time, percent
from overlapfx.train.guard import Guard, split_metrics
from overlapfx.train.metrics import MetricsWriter, Rates, StepTimer, Utilization
from overlapfx.train.preemption import StopOnSignal
from overlapfx.train.stops import EXIT_INTERRUPTED
from overlapfx.train.watchdog import Watchdog

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
        self,
        writer: MetricsWriter,
        console: Console,
        utilization: Utilization,
        timer: StepTimer | None = None,
        guard: Guard | None = None,
    ):
        self.timer = timer or StepTimer()
        self.console = console
        self.eval_step: int | None = None  # where the last evaluation was
        self._writer, self._utilization, self._guard = writer, utilization, guard
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
        """Ends the time of a step whose results are there, logs it, and raises what the guard has against it."""
        step_s = self.timer.lap()
        scalars, finite = split_metrics(metrics)
        values: dict[str, Any] = {**scalars, "step_s": step_s, "tokens_per_s": scalars["tokens"] / step_s}
        if self._guard is not None:
            values |= self._guard.flags(values["loss"])
        try:
            values |= dataclasses.asdict(self._utilization.rates(step, step_s))
        finally:  # what an impossible rate was computed from should be on record, too
            self._writer.write("train", step, **values)
        self.console.step(step, values)
        self._loss = values["loss"]
        self._step_times_s.append(step_s)
        self._tokens.append(values["tokens"])
        if self._guard is not None:
            assert finite is not None, "a step that is guarded returns finite_leaves"
            self._guard.check(step, values, finite, self.console.note)

    def hung(self, sentence: str) -> None:
        """Marks the run as ended by the watchdog; called from its thread."""
        self._writer.write("hung", self._writer.last_step, reason=sentence)

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
        in_order = sorted(values, key=lambda name: name != "loss")
        shown = ", ".join(f"{name} {values[name]:.4f}" for name in in_order if name != "tokens")
        self.console.note(f"step {step}: evaluation {shown} in {span.seconds:.1f} s")
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
    check: Callable[[int, Any], None] | None = None,
    stop: StopOnSignal | None = None,
    watchdog: Watchdog | None = None,
) -> tuple[Any, Summary]:
    """Trains from `start_step` to `schedule.num_steps`; returns the state and a summary.

    Steps are counted by how many are finished. Step k consumes batch k-1 of the stream, its loss is that of the
    parameters before its update, its checkpoint is named k. From there a run goes on exactly as an uninterrupted one.

    SIGTERM or Ctrl-C in any process of a job lets all of them finish the same step, save once and return; the process
    should then exit with `summary.exit_code`. During a compilation the signal is heard when that ends.

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
      check: (step, state) -> None, called before each save: what it refuses, by raising, is not saved.
      stop: catches signals, if the caller does so already; None catches them here.
      watchdog: limits the time of each step and evaluation.
    """
    with contextlib.nullcontext(stop) if stop else StopOnSignal() as stopper, log.console:
        loop = _Loop(
            state=state,
            step=start_step,
            position=batches.get_state(),
            batches=batches,
            place=place,
            schedule=schedule,
            log=log,
            eval_fn=eval_fn,
            checkpointer=checkpointer,
            check=check,
            stop=stopper,
            watchdog=watchdog or Watchdog(0, pathlib.Path()),
            stopped=stopper.ask(),
        )
        loop.train(train_step)
        interrupted = loop.end()
        summary = log.finish(loop.step, loop.step - start_step, interrupted=interrupted)
    return loop.state, summary


@dataclasses.dataclass
class _Loop:
    """A run under way: `state` and the data's `position` are those after `step`; `stopped` is the last answer."""

    state: Any
    step: int
    position: dict[str, Any]
    batches: Stream
    place: Callable[[HostBatch], Batch]
    schedule: Schedule
    log: RunLog
    eval_fn: Callable[[Any], Mapping[str, float]] | None
    checkpointer: Checkpointer | None
    check: Callable[[int, Any], None] | None
    stop: StopOnSignal
    watchdog: Watchdog
    stopped: Callable[[], bool]

    def train(self, train_step: Any) -> None:
        """Steps until the last one or until all processes agree to stop."""
        num_steps = self.schedule.num_steps
        if self.step == num_steps or self.stopped():
            return
        ahead = _next_batch(self.batches, self.place, self.step)
        compiled = self.log.compile(self.step, train_step, self.state, ahead)
        self.stopped = self.stop.ask()
        self.log.timer.start()
        while self.step < num_steps and not self.stopped():
            self.watchdog.expect(f"step {self.step + 1}")
            self.state, metrics = compiled(self.state, ahead)  # returns while the devices are still at work
            self.stopped = self.stop.ask()
            self.step, self.position = self.step + 1, self.batches.get_state()
            if self.step < num_steps:
                # Read and placed while the devices work.
                ahead = _next_batch(self.batches, self.place, self.step)
            jax.block_until_ready((self.state, metrics))
            self.watchdog.rest()
            self.log.step(self.step, metrics)
            if self.checkpointer is not None:
                self.checkpointer.check_for_errors()
                if self.schedule.saves_at(self.step):
                    self.save(self.checkpointer)
            if self.schedule.evaluates_at(self.step):
                self.evaluate()

    def end(self) -> bool:
        """An evaluation if there was nothing to train, the save of a run that was stopped; says whether it was."""
        if self.log.eval_step != self.step:
            self.evaluate()
        interrupted = self.stopped()  # asked once: a signal from now on changes nothing
        if self.checkpointer is not None:
            if interrupted:
                self.log.console.note(f"{self.stop.reason}: saving step {self.step} before the run stops.")
                self.save(self.checkpointer)
            self.checkpointer.wait()
        return interrupted

    def save(self, checkpointer: Checkpointer) -> None:
        """Starts a checkpoint of a state that passes the check."""
        if self.check is not None:
            self.check(self.step, self.state)
        self.log.save(self.step, checkpointer, self.state, self.position)

    def evaluate(self) -> None:
        """Evaluates unless there is nothing to evaluate with, or no time left for it."""
        if self.eval_fn is not None and not self.stopped():
            self.watchdog.expect(f"the evaluation after step {self.step}")
            self.log.evaluate(self.step, self.eval_fn, self.state)
            self.watchdog.rest()


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
    eval_step: Callable[[Any, Any], Mapping[str, tuple[jax.Array, jax.Array]]],
    batches: Callable[[], Iterable[HostBatch]],
    place: Callable[[HostBatch], Batch],
    watchdog: Watchdog | None = None,
) -> Callable[[Any], dict[str, float]]:
    """Makes the `eval_fn` of `run`: means over all that counts in a fixed set of batches.

    Args:
      eval_step: (state.params, batch) -> name -> (sum, how much was counted), scalars; among the names loss, whose
        count is that of tokens.
      batches: called at every evaluation; returns the batches, each time the same ones.
      place: as for `run`.
      watchdog: limits the time of every batch; the first one of all includes compilation and has no limit.
    """
    dog = watchdog or Watchdog(0, pathlib.Path())
    compiled = False

    def evaluate(state: Any) -> dict[str, float]:
        nonlocal compiled
        results = []
        for batch in batches():  # all are dispatched before the first result is waited for
            with dog.resting() if not compiled else contextlib.nullcontext():
                results.append(eval_step(state.params, place(batch)))
            compiled = True
            dog.again()
        sums: dict[str, tuple[float, float]] = {}
        for result in results:
            for name, (value, counted) in result.items():
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + float(np.asarray(value)), before[1] + float(np.asarray(counted)))
            dog.again()
        tokens = sums["loss"][1] if sums else 0.0
        if tokens == 0:
            raise ValueError(
                f"The {len(results)} evaluation batches hold no token that counts; raise train.eval_batches or "
                "choose other validation data."
            )
        return {name: value / counted for name, (value, counted) in sums.items() if counted} | {"tokens": tokens}

    return evaluate
