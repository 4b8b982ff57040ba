"""Figure 14: loops unrolled by two against loops that are not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.paper import command, draw
from experiments.paper.applications import Application, applications, gpt_sizes
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import Measurement, plan
from experiments.paper.programs import OURS
from experiments.paper.results import Results
from experiments.paper.sites import ONE_DIRECTION, TWO_DIRECTIONS, names, site
from experiments.paper.text import ratio, seconds, speed_up, step_time, trade

Rows = tuple[Mapping[str, Any], Mapping[str, Any]]


def _ones(quick: bool) -> tuple[Application, ...]:
    """Whole steps compile for minutes: those of the two sizes whose rings are the shortest and among the longest."""
    return applications(quick)[:1] if quick else tuple(one for one in gpt_sizes(quick) if one.name in ("32B", "256B"))


def _unrolled(one: Application, unroll: int) -> Measurement:
    return plan(one, OURS, f"overlap.unroll={unroll}")


def _measurements(quick: bool) -> list[Measurement]:
    steps = [_unrolled(one, unroll) for one in _ones(quick) for unroll in (1, 2)]
    return [*steps, *(site(name, quick) for name in names(quick))]


def _content(quick: bool, results: Results) -> Content:
    rows, gains, labels = [], [], []
    for one in _ones(quick):
        single, double = (results.find(_unrolled(one, unroll)) for unroll in (1, 2))
        gain = speed_up(single, double)
        times = [step_time(result) for result in (single, double)]
        rows.append((one.name, *times, ratio(gain)))
        labels.append(one.name)
        gains.append(gain)
    einsums = _einsums(quick, results)
    table = Table(("application", "unroll 1", "unroll 2", "gain"), rows, "Whole steps, ours")
    cells = [
        (name, way, *(seconds(row["total_s"]) for row in rows), ratio(rows[0]["total_s"] / rows[1]["total_s"]))
        for name, way, rows in einsums
    ]
    sites = Table(("einsum", "ring", "one chain", "two chains", "gain"), cells, "Single einsums, both passes")
    picture = draw.bars("Speed with unrolling by 2 over without", "times", labels, {"unroll 2 over 1": gains})
    return Content((table, sites), picture, (_finding([g for g in gains if g is not None], einsums),))


def _einsums(quick: bool, results: Results) -> list[tuple[str, str, Rows]]:
    """(site, ring, rows with one and with two chains) where both were compiled."""
    found = []
    for name in names(quick):
        result = results.find(site(name, quick))
        rows = {row["variant"]: row for row in result["rows"] if row["total_s"]} if result is not None else {}
        for one, two in (ONE_DIRECTION, TWO_DIRECTIONS):
            if one in rows and two in rows:
                found.append((name, one, (rows[one], rows[two])))
    return found


def _finding(gains: list[float], einsums: list[tuple[str, str, Rows]]) -> Finding:
    ratios = [one["total_s"] / two["total_s"] for _, _, (one, two) in einsums]
    both = [*gains, *ratios]
    better, worse = sum(g > 1.001 for g in both), sum(g < 0.999 for g in both)
    spans = [
        f"{ratio(min(values))} to {ratio(max(values))} over {len(values)} {what}"
        for what, values in (("steps", gains), ("single rings", ratios))
        if values
    ]
    told = "; ".join(f"in {way} of {name} {trade(*rows)}" for name, way, rows in einsums)
    return Finding(
        "unrolling by two helps",
        better > worse if better + worse else None,
        f"{'; '.join(spans) or 'none'}; better {better} times, worse {worse} times",
        "two chains keep an addition from waiting for the transfer beside its own einsum, for smaller einsums and more "
        f"messages; today's compiler needs no copies between two buffers, which was the other reason. {told}",
    )


FIGURE = Figure(
    name="fig14",
    title="Figure 14: unrolling",
    simulated="all of it: our program where the gate may use two interleaved chains against the same without, and "
    "single rings forced into either.",
    measured="",
    published="that unrolling helps; its numbers are not at hand.",
    measurements=_measurements,
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
