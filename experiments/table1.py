"""Table 1: the applications."""

from __future__ import annotations

import sys

from experiments.paper import command, models_table
from experiments.paper.applications import applications
from experiments.paper.figure import Content, Figure
from experiments.paper.results import Results


def _content(quick: bool, results: Results) -> Content:
    return Content((models_table.table(applications(quick), results),))


FIGURE = Figure(
    name="table1",
    title="Table 1: the applications",
    simulated="memory per device, as the compiler reserves it for our program.",
    measured="parameters, counted from the shapes of the real module.",
    published="names, sizes and numbers of chips of the applications; where the table says so, the layers are ours.",
    measurements=lambda quick: models_table.measurements(applications(quick)),
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
