"""Progress as a person sees it: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_SMOOTHING = 0.2  # weight of the newest step in the step time that the ETA is computed from


class Console:
    """Shows the steps of a run, notes between them, and the time left.

    On a terminal a bar with the latest loss and the time left stays at the bottom while lines scroll above it.
    Elsewhere (a file, a pipe, a job log) every line is printed plainly and flushed at once.

    Args:
      num_steps: the step at which the run ends.
      log_every: every how many steps a line is printed; the bar moves at every step.
      file: where to print, standard output if None.
      live: whether to draw the bar; None asks the file whether it is a terminal.
      primary: False on all processes of a job but one: nothing is shown.
    """

    def __init__(
        self,
        num_steps: int,
        log_every: int = 1,
        *,
        file: TextIO | None = None,
        live: bool | None = None,
        primary: bool = True,
    ):
        self._num_steps, self._log_every, self._primary = num_steps, log_every, primary
        self._file = sys.stdout if file is None else file
        self._step_s: float | None = None
        self._seen_a_step = False
        self._progress: Progress | None = None
        if primary and (self._file.isatty() if live is None else live):
            self._progress = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                console=RichConsole(file=self._file, force_terminal=True),
                refresh_per_second=4,  # the cores belong to the training
            )
            self._task = self._progress.add_task("", total=num_steps, text="compiling")

    def __enter__(self) -> Console:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def note(self, text: str) -> None:
        """Prints one line that is not a step: a restore, an evaluation, a warning."""
        if self._progress is not None:
            # Values are not markup, nor are they to be coloured or wrapped.
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._primary:
            print(text, file=self._file, flush=True)

    def step(self, step: int, values: Mapping[str, Any]) -> None:
        """Shows the figures of a finished step, as `metrics.jsonl` has them."""
        seconds = values["step_s"]
        self._step_s = seconds if self._step_s is None else (1 - _SMOOTHING) * self._step_s + _SMOOTHING * seconds
        eta = f"ETA {clock_time((self._num_steps - step) * self._step_s)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, text=f"loss {values['loss']:.4f}  {eta}")
        if not self._seen_a_step or step % self._log_every == 0 or step == self._num_steps:
            self.note(f"{step_line(step, self._num_steps, values)}  {eta}")
        self._seen_a_step = True


def step_line(step: int, num_steps: int, values: Mapping[str, Any]) -> str:
    """One step in one line, columns aligned from step to step."""
    width = len(str(num_steps))
    dropped = f"dropped {percent(100 * values['dropped_tokens'])}  " if "dropped_tokens" in values else ""
    return (
        f"step {step:>{width}}/{num_steps}  loss {values['loss']:.4f}  grad norm {values['grad_norm']:.3g}  "
        f"lr {values['learning_rate']:.2e}  {values['step_s'] * 1e3:.1f} ms  {values['tokens_per_s']:,.0f} tokens/s  "
        f"{dropped}"
        f"{values['model_tflops_per_device']:.3g} TFLOP/s/device  "
        f"MFU {percent(values['mfu_percent'])}  HFU {percent(values['hfu_percent'])}"
    )


def percent(value: float | None) -> str:
    """`12.3 %`, or n/a where there is nothing to compare with."""
    return "n/a" if value is None else f"{value:.1f} %"


def clock_time(seconds: float) -> str:
    """`0:07`, `12:34` or `1:02:03`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
