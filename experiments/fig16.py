"""Figure 16: our schedulers against the compiler's."""

from __future__ import annotations

import sys

from experiments.paper import command, draw
from experiments.paper.applications import Application, gpt_sizes
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import ORDERS, Measurement, plan
from experiments.paper.programs import OURS
from experiments.paper.results import Results
from experiments.paper.text import ratio, seconds, speed_up, step_time

_SIZES = ("32B", "128B", "256B")


def _ones(quick: bool) -> list[Application]:
    found = [one for one in gpt_sizes(quick) if one.name in _SIZES]
    return found[:1] if quick else found


def _compiled(one: Application) -> Measurement:
    """The compiler's own order, with the others of the same instructions."""
    return plan(one, OURS)


def _imposed(one: Application, scheduler: str) -> Measurement:
    return plan(one, OURS, f"overlap.scheduler={scheduler}")


def _measurements(quick: bool) -> list[Measurement]:
    return [m for one in _ones(quick) for m in (_compiled(one), *(_imposed(one, order) for order in ORDERS))]


def _content(quick: bool, results: Results) -> Content:
    rows, pairs = [], []
    series: dict[str, list[float | None]] = {
        f"{how} {order}": [] for how in ("imposed", "reordered") for order in ORDERS
    }
    for one in _ones(quick):
        own = results.find(_compiled(one))
        orders = {} if own is None else {order["scheduler"]: order for order in own["orders"]}
        rows.append((one.name, "compiler", step_time(own), "", "", ""))
        for name in ORDERS:
            imposed, again = results.find(_imposed(one, name)), orders.get(name)
            gains = (speed_up(own, imposed), speed_up(own, again))
            for how, gain in zip(("imposed", "reordered"), gains, strict=True):
                series[f"{how} {name}"].append(gain)
            times = [seconds(None if found is None else found["step_s"]) for found in (imposed, again)]
            rows.append(("", name, times[0], ratio(gains[0]), times[1], ratio(gains[1])))
        for how in ("imposed", "reordered"):
            up, down = (series[f"{how} {name}"][-1] for name in ORDERS)
            if up is not None and down is not None:
                pairs.append((how, one.name, up, down))
    columns = ("size", "scheduler", "imposed", "gain", "reordered", "gain")
    labels = [one.name for one in _ones(quick)]
    picture = draw.bars("Speed over the compiler's own order (estimate)", "times", labels, series)
    notes = (
        "Imposed: the order is part of the program that is compiled. Reordered: the compiler's own instructions in "
        "another order, as if it could be had for nothing; the compiler might have fused or placed otherwise.",
    )
    return Content((Table(columns, rows),), picture, (_finding(pairs),), notes)


def _finding(pairs: list[tuple[str, str, float, float]]) -> Finding:
    better, worse = sum(up > down for *_, up, down in pairs), sum(up < down for *_, up, down in pairs)
    told = [f"{size} {how} {ratio(up)} against {ratio(down)}" for how, size, up, down in pairs]
    return Finding(
        "bottom-up scheduling is slightly better than top-down",
        better > worse if better != worse else None,
        "; ".join(told) or "none",
        "gains are over the compiler's own order; its scheduler of today hides latencies by itself, which the paper's "
        "compiler did not, so that little is left for another order",
    )


FIGURE = Figure(
    name="fig16",
    title="Figure 16: schedulers",
    simulated="all of it.",
    measured="",
    published="that bottom-up is slightly better than top-down; its numbers are not at hand.",
    measurements=_measurements,
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
