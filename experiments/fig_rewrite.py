"""Beyond the paper: programs that others wrote, rewritten."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.foreign import PROGRAMS
from experiments.paper import command, draw
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.measurement import Measurement, rewrite
from experiments.paper.results import Results
from experiments.paper.text import NONE, percent, ratio, speed_up, step_time, trade
from experiments.paper.work.rewrite import ASYNCHRONOUS, PLAIN, REWRITTEN

# 16 sequences of 1024 tokens per y shard of 64 chips.
_SIZES = {
    "batch": 256,
    "time": 1024,
    "width": 8192,
    "heads": 64,
    "head_dim": 128,
    "hidden": 32768,
    "experts": 16,
    "layers": 2,
}
_TINY = {
    "batch": 4,
    "time": 128,
    "width": 256,
    "heads": 4,
    "head_dim": 64,
    "hidden": 512,
    "experts": 4,
    "layers": 2,
}
_COLUMNS = (
    "program",
    PLAIN,
    ASYNCHRONOUS,
    REWRITTEN,
    "gain",
    "comm. plain",
    "comm. rewritten",
    "collectives rewritten",
)


def _measurements(quick: bool) -> list[Measurement]:
    """quick: the one that compiles in the shortest time, decomposed although it is too small for that."""
    if quick:
        return [rewrite("flax", "v4:2x2x1", (2, 2), _TINY, "on")]
    return [rewrite(name, "v4:4x4x4", (16, 4), _SIZES, "auto") for name in PROGRAMS]


def _content(quick: bool, results: Results) -> Content:
    rows, lines, notes = [], [], []
    series: dict[str, list[float | None]] = {ASYNCHRONOUS: [], REWRITTEN: []}
    labels = []
    for measurement in _measurements(quick):
        name, result = measurement.task["program"], results.find(measurement)
        made: Mapping[str, Any] = {} if result is None else result["programs"]
        labels.append(name)
        for way, values in series.items():
            values.append(speed_up(made.get(PLAIN), made.get(way)))
        if result is None:
            rows.append((name, *[NONE] * (len(_COLUMNS) - 1)))
            continue
        better = min((made[PLAIN], made[ASYNCHRONOUS]), key=lambda program: program["step_s"])
        counts = result["num_rewritten"], result["num_rewritten"] + result["num_left"]
        rows.append(
            (
                name,
                *(step_time(made[way]) for way in (PLAIN, ASYNCHRONOUS, REWRITTEN)),
                ratio(speed_up(better, made[REWRITTEN])),
                *(percent(made[way]["communication_share"]) for way in (PLAIN, REWRITTEN)),
                "{} of {}".format(*counts),
            )
        )
        lines += [(name, line) for line in result["report"]]
        notes.append(f"{name}: {trade(better, made[REWRITTEN])}.")
    tables = (
        Table(_COLUMNS, rows, "Gain: over the better of the two plain programs."),
        Table(("program", "what became of each collective"), lines),
    )
    picture = draw.bars("Speed over the plain program (estimate)", "times", labels, series)
    return Content(tables, picture, notes=tuple(notes))


FIGURE = Figure(
    name="fig_rewrite",
    title="Beyond the paper: code that others wrote",
    simulated="all of it: loss and gradients of the programs in experiments/foreign.py, rematerialized, two layers in "
    "bfloat16, compiled as they are with the compiler's default options, the same with those that make collectives "
    "asynchronous, then rewritten by `overlapfx.overlap` with the options of our steps.",
    measured="",
    published="",
    measurements=_measurements,
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
