"""Figure 16: our schedulers against the compiler's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.paper import command, draw
from experiments.paper.applications import Application, gpt_sizes
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import ORDERS, Measurement, plan
from experiments.paper.programs import OURS
from experiments.paper.results import Results
from experiments.paper.text import NONE, gib, ratio, seconds, speed_up, step_time

# Sizes with imposed orders, each a compilation of its own, which takes the longer the more devices there are.
_IMPOSED = ("32B", "64B")
_COLUMNS = (
    "size",
    "scheduler",
    "imposed",
    "gain",
    "imposed by",
    "temporaries",
    "reordered",
    "gain",
    "peak of temporaries",
)


def _ones(quick: bool) -> tuple[Application, ...]:
    return gpt_sizes(quick)[:1] if quick else gpt_sizes(quick)


def _compiled(one: Application) -> Measurement:
    """The compiler's own order, with the others of the same instructions."""
    return plan(one, OURS)


def _imposed(one: Application, scheduler: str) -> Measurement:
    return plan(one, OURS, f"overlap.scheduler={scheduler}")


def _measurements(quick: bool) -> list[Measurement]:
    imposed = [_imposed(one, order) for one in _ones(quick) if one.name in _IMPOSED for order in ORDERS]
    return [*(_compiled(one) for one in _ones(quick)), *imposed]


def _content(quick: bool, results: Results) -> Content:
    rows, pairs = [], []
    series: dict[str, list[float | None]] = {
        f"{how} {order}": [] for how in ("imposed", "reordered") for order in ORDERS
    }
    for one in _ones(quick):
        own = results.find(_compiled(one))
        orders = {} if own is None else {order["scheduler"]: order for order in own["orders"]}
        rows.append((one.name, "compiler", *_imposed_cells(own, own), *_reordered_cells(own, orders.get("as_written"))))
        for name in ORDERS:
            imposed = results.find(_imposed(one, name)) if one.name in _IMPOSED else None
            series[f"imposed {name}"].append(speed_up(own, imposed))
            series[f"reordered {name}"].append(speed_up(own, orders.get(name)))
            cells = _imposed_cells(own, imposed) if one.name in _IMPOSED else [""] * 4
            rows.append(("", name, *cells, *_reordered_cells(own, orders.get(name))))
        for how in ("imposed", "reordered"):
            up, down = (series[f"{how} {name}"][-1] for name in ORDERS)
            if up is not None and down is not None:
                pairs.append((how, one.name, up, down))
    labels = [one.name for one in _ones(quick)]
    picture = draw.bars("Speed over the compiler's own order (estimate)", "times", labels, series)
    notes = (
        "Imposed: the order is part of the program that is compiled. Reordered: the compiler's own instructions in "
        "another order, as if it could be had for nothing; the compiler might have fused or placed otherwise.",
        f"Orders are imposed on {' and '.join(_IMPOSED)} only, where compiling the step once more per order is cheap. "
        "Temporaries: what lives at once, as the compiler counts. Peak of temporaries: counted here for each order of "
        "the same instructions, so to be compared among themselves.",
    )
    return Content((Table(_COLUMNS, rows),), picture, (_finding(pairs),), notes)


def _imposed_cells(own: Mapping[str, Any] | None, made: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Of a program that was compiled in some order: step, gain over the compiler's own, mechanism, memory."""
    if made is None:
        return (NONE,) * 4
    gain = ratio(speed_up(own, made)) if made is not own else ""
    return step_time(made), gain, made["mechanism"], gib(made["memory_bytes"]["temporaries"])


def _reordered_cells(own: Mapping[str, Any] | None, order: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Of another order of the compiled instructions: step, gain, memory."""
    if order is None:
        return (NONE,) * 3
    gain = ratio(speed_up(own, order)) if order["scheduler"] != "as_written" else ""
    return seconds(order["step_s"]), gain, gib(order["peak_bytes"])


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
