"""Numerical reproduction: losses with overlap against losses without."""

from __future__ import annotations

import sys

from experiments.paper import command, draw
from experiments.paper.applications import Application, applications
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import Measurement, training
from experiments.paper.results import Results
from experiments.paper.text import NONE

_MODES = {"off": "blocking", "on": "overlapped"}
# Float32 sums of another order drift apart as training amplifies them.
_SAME = 0.01
# No evaluation, no checkpoint, no text: only the losses are wanted. Five steps are too few for a warm-up.
_SHORT = ("train.eval_every=1000", "train.eval_batches=1", "train.checkpoint_every=1000", "sample.num_tokens=0")
_QUICK = ("optimizer.warmup_steps=2", "model.num_layers=2", "data.global_batch=8")


def _ones(quick: bool) -> list[Application]:
    ones = list({one.tiny: one for one in applications(quick)}.values())
    return ones[:2] if quick else ones  # each run compiles for a while


def _training(one: Application, mode: str, quick: bool) -> Measurement:
    return training(one, mode, 5, *_SHORT, *_QUICK) if quick else training(one, mode, 200, *_SHORT)


def _content(quick: bool, results: Results) -> Content:
    rows, series = [], {}
    worst = []
    for one in _ones(quick):
        losses = {}
        for mode, what in _MODES.items():
            result = results.find(_training(one, mode, quick))
            if result is not None:
                losses[mode] = result["losses"]
                series[f"{one.tiny.removeprefix('configs/')}, {what}"] = list(enumerate(result["losses"], start=1))
        difference = None
        if len(losses) == 2:
            difference = max(abs(a - b) for a, b in zip(losses["off"], losses["on"], strict=True))
            worst.append(difference / max(losses["off"]))
        ends = [f"{losses[mode][-1]:.6f}" if mode in losses else NONE for mode in _MODES]
        steps = str(len(next(iter(losses.values())))) if losses else NONE
        first = f"{losses['off'][0]:.6f}" if "off" in losses else NONE
        rows.append((one.tiny, steps, first, *ends, NONE if difference is None else f"{difference:.2e}"))
    columns = ("config", "steps", "first loss", "last loss, blocking", "overlapped", "largest difference")
    picture = draw.lines("Loss on simulated devices (measured)", "step", "loss", series)
    return Content((Table(columns, rows),), picture, (_finding(worst),))


def _finding(worst: list[float]) -> Finding:
    return Finding(
        "overlap does not change what is learned",
        max(worst) < _SAME if worst else None,
        f"losses differ by {max(worst):.1e} of the largest loss at most" if worst else "none",
        f"sums are taken in another order, so the last bits differ and training amplifies them; agreeing means less "
        f"than {_SAME:g} of the largest loss",
    )


FIGURE = Figure(
    name="fig_training",
    title="Numerical reproduction: training with and without overlap",
    simulated="the devices: eight on the processor of one machine.",
    measured="the losses of real runs from the same seed over the same batches, every site decomposed against none.",
    published="",
    measurements=lambda quick: [_training(one, mode, quick) for one in _ones(quick) for mode in _MODES],
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
