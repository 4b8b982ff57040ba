"""Beyond the paper: how the gain depends on the batch of a chip."""

from __future__ import annotations

import sys

from experiments.paper import command, draw
from experiments.paper.applications import smallest_gpt
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.measurement import Measurement, plan
from experiments.paper.programs import BLOCKING, OURS
from experiments.paper.results import Results
from experiments.paper.text import percent, ratio, speed_up, step_time
from overlapfx.aot.slices import parse_slice


def _batches(quick: bool) -> tuple[int, ...]:
    return (8, 16) if quick else (128, 256, 512)


def _plan(batch: int, program: str, quick: bool) -> Measurement:
    return plan(smallest_gpt(quick), program, f"data.global_batch={batch}")


def _content(quick: bool, results: Results) -> Content:
    one = smallest_gpt(quick)
    chips = parse_slice(one.topology).num_chips
    rows, points = [], []
    for batch in _batches(quick):
        blocking, ours = (results.find(_plan(batch, program, quick)) for program in (BLOCKING, OURS))
        tokens = batch * one.config().model.seq_len / chips
        gain = speed_up(blocking, ours)
        if gain is not None:
            points.append((tokens, gain))
        share = None if blocking is None else blocking["communication_share"]
        times = [step_time(result) for result in (blocking, ours)]
        rows.append((f"{tokens:g}", *times, percent(share), ratio(gain)))
    columns = ("tokens per chip", "blocking", "ours", "communication of blocking", "gain")
    picture = draw.lines(
        "Gain by batch (estimate)", "tokens per chip", "times", {one.name: points}, "x", [t for t, _ in points], 1.0
    )
    return Content((Table(columns, rows),), picture)


FIGURE = Figure(
    name="fig_batch",
    title="Beyond the paper: batch per chip",
    simulated="all of it: the smallest GPT of the series on its slice.",
    measured="",
    published="",
    measurements=lambda quick: [_plan(b, program, quick) for b in _batches(quick) for program in (BLOCKING, OURS)],
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
