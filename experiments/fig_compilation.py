"""Beyond the paper: what it costs to compile the programs."""

from __future__ import annotations

import sys

from experiments.paper import command, draw
from experiments.paper.applications import Application, applications
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.measurement import Measurement, plan
from experiments.paper.programs import BLOCKING, OURS
from experiments.paper.results import Results
from experiments.paper.text import ratio, seconds

_PARTS = {"lower_s": "tracing", "compile_s": "compiling"}


def _measurements(quick: bool) -> list[Measurement]:
    return [plan(one, name) for one in applications(quick) for name in (BLOCKING, OURS)]


def _content(quick: bool, results: Results) -> Content:
    rows = []
    heights: dict[str, list[float | None]] = {BLOCKING: [], OURS: []}
    for one in applications(quick):
        cells, totals = [], []
        for name in heights:
            total = _seconds(one, name, results)
            result = results.find(plan(one, name))
            cells += [seconds(None if result is None else result[part]) for part in _PARTS]
            heights[name].append(total)
            totals.append(total)
        rows.append((one.name, *cells, ratio(totals[1] / totals[0] if totals[0] and totals[1] else None)))
    columns = (
        "application",
        *(f"{what}, {name}" for name in heights for what in _PARTS.values()),
        "ours over blocking",
    )
    names = [one.name for one in applications(quick)]
    picture = draw.bars("Tracing and compiling (measured)", "seconds", names, heights)
    notes = ("Wall time of one process; others may have run beside it, so that only large differences mean anything.",)
    return Content((Table(columns, rows),), picture, notes=notes)


def _seconds(one: Application, name: str, results: Results) -> float | None:
    result = results.find(plan(one, name))
    return None if result is None else sum(result[part] for part in _PARTS)


FIGURE = Figure(
    name="fig_compilation",
    title="Beyond the paper: the cost of compilation",
    simulated="",
    measured="all of it: seconds of the compiler on the machine that made the results.",
    published="",
    measurements=_measurements,
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
