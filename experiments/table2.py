"""Table 2: the GPT scaling series."""

from __future__ import annotations

import sys

from experiments.paper import command, models_table
from experiments.paper.applications import gpt_sizes
from experiments.paper.figure import Content, Figure
from experiments.paper.results import Results


def _content(quick: bool, results: Results) -> Content:
    return Content((models_table.table(gpt_sizes(quick), results),))


FIGURE = Figure(
    name="table2",
    title="Table 2: the GPT scaling series",
    simulated="memory per device, as the compiler reserves it for our program.",
    measured="parameters, counted from the shapes of the real module.",
    published="the sizes, a public configuration; learning rate and number of steps are ours.",
    measurements=lambda quick: models_table.measurements(gpt_sizes(quick)),
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
