"""Figure 1: what the step of the blocking program is made of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.paper import command, draw
from experiments.paper.applications import applications
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import plan
from experiments.paper.programs import BLOCKING, SHARES
from experiments.paper.results import Results
from experiments.paper.text import percent, seconds

_COLLECTIVES = {
    "all-gather": "AllGather",
    "reduce-scatter": "ReduceScatter",
    "all-reduce": "AllReduce",
    "all-to-all": "all-to-all",
}
PARTS = ("compute", *_COLLECTIVES.values(), "others")


def parts(result: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the step by PARTS; others are waits for memory, host and other slices, and permutes."""
    found = dict.fromkeys(PARTS, 0.0)
    for category, kinds in result["breakdown"].items():
        for kind, part_s in kinds.items():
            found["compute" if category == "compute" else _COLLECTIVES.get(kind, "others")] += part_s
    return found


def _content(quick: bool, results: Results) -> Content:
    ones = applications(quick)
    found = {one.name: results.find(plan(one, BLOCKING)) for one in ones}
    there = {name: (result, parts(result)) for name, result in found.items() if result is not None}
    rows = [
        (name, seconds(result["step_s"]), *(percent(made[part] / result["step_s"]) for part in PARTS))
        for name, (result, made) in there.items()
    ]
    shares = {
        part: [100 * there[n][1][part] / there[n][0]["step_s"] if n in there else None for n in found] for part in PARTS
    }
    picture = draw.stacked("The blocking step (estimate)", "% of the step", list(found), shares)
    return Content((Table(("application", "step", *PARTS), rows),), picture, (_finding(there),))


def _finding(there: Mapping[str, Any]) -> Finding:
    shares = [result["communication_share"] for result, _ in there.values()]
    low, high = SHARES
    inside = sum(low <= share <= high for share in shares)
    numbers = (
        f"{percent(min(shares))} to {percent(max(shares))}, {inside} of {len(shares)} inside" if shares else "none"
    )
    why = "the share follows from batch, mesh and links: partial sums are float32 here, which doubles ReduceScatters"
    return Finding(
        f"communication takes {low:.0%} to {high:.0%} of the step",
        inside == len(shares) if shares else None,
        numbers,
        why,
    )


FIGURE = Figure(
    name="fig01",
    title="Figure 1: where the time of the blocking program goes",
    simulated="all of it: the program with blocking collectives and the compiler's default options.",
    measured="",
    published="communication takes 22 % to 42 % of the step (second-hand); shares per application are not at hand.",
    measurements=lambda quick: [plan(one, BLOCKING) for one in applications(quick)],
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
