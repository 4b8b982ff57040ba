"""Beyond the paper: how the gain depends on the bandwidth of the links."""

from __future__ import annotations

import sys

from experiments.paper import command, draw
from experiments.paper.applications import applications
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.measurement import Measurement, plan
from experiments.paper.programs import BLOCKING, OURS
from experiments.paper.results import Results
from experiments.paper.text import ratio


def _measurements(quick: bool) -> list[Measurement]:
    return [plan(one, name) for one in applications(quick) for name in (BLOCKING, OURS)]


def _content(quick: bool, results: Results) -> Content:
    series: dict[str, list[tuple[float, float]]] = {}
    for one in applications(quick):
        blocking, ours = (results.find(plan(one, name)) for name in (BLOCKING, OURS))
        if blocking is not None and ours is not None:
            series[one.name] = [(float(f), step_s / ours["links"][f]) for f, step_s in blocking["links"].items()]
    factors = sorted({factor for points in series.values() for factor, _ in points})
    rows = [(name, *(ratio(dict(points).get(f)) for f in factors)) for name, points in series.items()]
    table = Table(("application", *(f"links {f:g}x" for f in factors)), rows, "Ours over blocking")
    picture = draw.lines(
        "Gain by link bandwidth (estimate)", "times the links' bandwidth", "times", series, "x", factors, level=1.0
    )
    notes = ("Both programs stay as they were compiled for the real links: another gate might decompose other sites.",)
    return Content((table,), picture, notes=notes)


FIGURE = Figure(
    name="fig_links",
    title="Beyond the paper: faster and slower links",
    simulated="all of it: the programs of figure 12, walked again with links of other speeds.",
    measured="",
    published="",
    measurements=_measurements,
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
