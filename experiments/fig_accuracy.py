"""Beyond the paper: what the dtype of a travelling sum does to its result."""

from __future__ import annotations

import sys

from experiments.paper import command, draw
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.measurement import Measurement, rounding
from experiments.paper.results import Results

_SIZES = {"tokens": 512, "hidden": 512, "width": 512}  # hidden: of every device
_TINY = {"tokens": 64, "hidden": 64, "width": 64}


def _rounding(num_devices: int, quick: bool) -> Measurement:
    return rounding(num_devices, _TINY if quick else _SIZES, seed=0)


def _devices(quick: bool) -> tuple[int, ...]:
    return (2, 4) if quick else (2, 4, 8)


def _content(quick: bool, results: Results) -> Content:
    found = {n: results.find(_rounding(n, quick)) for n in _devices(quick)}
    errors = {n: result["errors"] for n, result in found.items() if result is not None}
    ways = list(dict.fromkeys(way for by_way in errors.values() for way in by_way))
    rows = [(way, *(f"{errors[n][way][k]:.2e}" for n in errors for k in ("rms", "max"))) for way in ways]
    columns = ("way, accumulator", *(f"{what}, {n} devices" for n in errors for what in ("rms", "largest")))
    series = {way: [(float(n), errors[n][way]["rms"]) for n in errors] for way in ways}
    picture = draw.lines(
        "Error of an Einsum-ReduceScatter (measured)",
        "devices in the ring",
        "rms error / rms result",
        series,
        log="xy",
        ticks=list(errors),
    )
    notes = (
        "bfloat16 operands, float32 results, random normal values, against sums in float64 of the same operands. A "
        "bfloat16 accumulator is rounded at every hop; it is not what the project uses unless asked.",
    )
    return Content((Table(columns, rows),), picture, notes=notes)


FIGURE = Figure(
    name="fig_accuracy",
    title="Beyond the paper: accuracy of ring accumulation",
    simulated="",
    measured="all of it, on simulated CPU devices: rounding does not depend on the kind of device.",
    published="",
    measurements=lambda quick: [_rounding(n, quick) for n in _devices(quick)],
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
