"""Watches the figures of every step for numbers that must not be trained on."""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from overlapfx.train.stops import NumericalError

_WINDOW = 50  # losses that a new one is compared with
_ENOUGH = 20  # of them, before anything is called a spike
_SIGMAS = 6.0
_LEAST_RISE = 0.1  # of the mean: on a plateau six standard deviations can be next to nothing


class Guard:
    """Bounds how many updates in a row may be skipped, and flags losses that stand out.

    The step itself leaves the state alone when its loss or a gradient is not finite; here that is counted, said, and
    in the end refused.

    Args:
      names: of the parameter arrays, in the order of the flags `finite_leaves` of a step.
      max_skipped: how many steps in a row may be skipped; the next one stops the run.
    """

    def __init__(self, names: Sequence[str], max_skipped: int) -> None:
        self._names = names
        self._max_skipped = max_skipped
        self._in_a_row = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=_WINDOW)

    def flags(self, loss: float) -> dict[str, float]:
        """What to log besides the figures of the step: loss_spike, 1 where the loss stands out from those before it."""
        spike = self.is_spike(loss)
        if math.isfinite(loss):
            self._losses.append(loss)
        return {"loss_spike": float(spike)}

    def is_spike(self, loss: float) -> bool:
        """Whether `loss` lies far above the last ones: six standard deviations, and a tenth of their mean."""
        if len(self._losses) < _ENOUGH or not math.isfinite(loss):
            return False
        mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
        return loss - mean > max(_SIGMAS * deviation, _LEAST_RISE * abs(mean))

    def check(self, step: int, values: Mapping[str, Any], finite: np.ndarray, note: Callable[[str], None]) -> None:
        """Notes a spike or a skipped update of `step`, which consumed batch step - 1.

        Args:
          step: number of the step that is finished.
          values: its scalars, among them loss, grad_norm, skipped, loss_spike.
          finite: whether each parameter's gradient was finite, in the order of the leaves.
          note: prints a line.

        Raises:
          NumericalError: more updates in a row were skipped than allowed.
        """
        if values["loss_spike"]:
            note(
                f"step {step}: the loss {values['loss']:.4f} of batch {step - 1} is a spike; the mean of the "
                f"{len(self._losses) - 1} before is {statistics.fmean(list(self._losses)[:-1]):.4f}."
            )
        if not values["skipped"]:
            self._in_a_row = 0
            return
        self._in_a_row += 1
        what = f"batch {step - 1} gives a loss of {values['loss']:g} and {self._broken(finite)}"
        if self._in_a_row > self._max_skipped:
            raise NumericalError(
                f"Step {step}: {what}, the update number {self._in_a_row} in a row that cannot be applied "
                f"(train.max_skipped_steps is {self._max_skipped}); the state is as before them, and the newest "
                "checkpoint is good: lower optimizer.learning_rate or inspect the batch."
            )
        note(f"step {step}: {what}; update skipped ({self._in_a_row} in a row, at most {self._max_skipped}).")

    def _broken(self, finite: np.ndarray) -> str:
        names = [name for name, good in zip(self._names, finite, strict=True) if not good]
        if not names:
            return "finite gradients, but their norm is not"
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        return f"gradients that are not finite for {shown}"


def split_metrics(metrics: Mapping[str, jax.Array]) -> tuple[dict[str, float], np.ndarray | None]:
    """The scalars of a step as numbers, and its flags `finite_leaves`; None where the step has none."""
    scalars = {name: float(np.asarray(value)) for name, value in metrics.items() if name != "finite_leaves"}
    return scalars, np.asarray(metrics["finite_leaves"]) if "finite_leaves" in metrics else None
