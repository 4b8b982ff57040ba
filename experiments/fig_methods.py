"""Beyond the paper: ring, stripe, prefetch, exchange for every kind of einsum."""

from __future__ import annotations

import sys

from experiments.paper import command, draw
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.results import Results
from experiments.paper.sites import ALL, names, site
from experiments.paper.text import NONE, ratio, seconds

_WAYS = (*ALL, "exchange")


def _content(quick: bool, results: Results) -> Content:
    rows = []
    series: dict[str, list[float | None]] = {way: [] for way in _WAYS[1:]}
    left_out = []
    for name in names(quick):
        result = results.find(site(name, quick))
        made = {} if result is None else {row["variant"]: row for row in result["rows"]}
        times = {way: made[way]["total_s"] if way in made else None for way in _WAYS}
        gains = {way: times["blocking"] / t if (t := times[way]) and times["blocking"] else None for way in _WAYS}
        for way, values in series.items():
            values.append(gains[way])
        best = max((gain, way) for way, gain in gains.items() if gain) if any(gains.values()) else None
        cells = (ratio(gains[way]) if gains[way] else NONE for way in _WAYS[1:])
        rows.append((name, seconds(times["blocking"]), *cells, NONE if best is None else best[1]))
        left_out += [f"{name}, {way}: {row['skipped']}" for way, row in made.items() if row["skipped"]]
    columns = ("einsum", "blocking", *(f"{way}" for way in _WAYS[1:]), "best")
    picture = draw.bars("Speed of decompositions over blocking (estimate)", "times", list(names(quick)), series)
    return Content((Table(columns, rows),), picture, notes=tuple(left_out))


FIGURE = Figure(
    name="fig_methods",
    title="Beyond the paper: which decomposition for which einsum",
    simulated="all of it: single einsums as they stand in a layer partitioned over (y, x), each forced into every "
    "decomposition, all with the compiler options of our steps.",
    measured="",
    published="",
    measurements=lambda quick: [site(name, quick) for name in names(quick)],
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
