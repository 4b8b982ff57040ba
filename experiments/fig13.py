"""Figure 13: weak scaling of the GPT series, beside the published utilization of the same models."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.calibration import PUBLISHED, utilization
from experiments.paper import command, draw
from experiments.paper.applications import Application, gpt_sizes
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.measurement import plan
from experiments.paper.programs import ASYNC, BLOCKING, OURS, XLA, all_programs, best_of_xla
from experiments.paper.results import Results
from experiments.paper.text import percent, ratio, speed_up, step_time
from overlapfx.aot.slices import parse_slice

_COLUMNS = ("size", "chips", "blocking", "XLA", "ours", "MFU blocking", "XLA", "ours", "published", "over blocking")


def published_mfu(one: Application) -> float | None:
    """Of the Pax runs on TPU v4, 0 to 1; None where nothing was published, or it is another slice."""
    found = PUBLISHED.get(one.name)
    return found.mfu / 100 if found and found.mfu and found.topology == one.topology else None


def _mfu(one: Application, result: Mapping[str, Any] | None) -> float | None:
    """By the convention of the published figures, which count every pair of tokens in attention."""
    if result is None:
        return None
    return utilization(one.config(), parse_slice(one.topology), result["num_params"], result["step_s"])


def _content(quick: bool, results: Results) -> Content:
    rows, labels = [], []
    series: dict[str, list[float | None]] = {"blocking": [], "XLA": [], "ours": []}
    points: list[float | None] = []
    for one in gpt_sizes(quick):
        three = (results.find(plan(one, BLOCKING)), best_of_xla(one, results), results.find(plan(one, OURS)))
        shares = [_mfu(one, result) for result in three]
        for values, share in zip(series.values(), shares, strict=True):
            values.append(None if share is None else 100 * share)
        published = published_mfu(one)
        points.append(None if published is None else 100 * published)
        chips = parse_slice(one.topology).num_chips
        labels.append(f"{one.name}\n{chips} chips")
        times = [step_time(result) for result in three]
        cells = (*times, *map(percent, (*shares, published)), ratio(speed_up(three[0], three[2])))
        rows.append((one.name, str(chips), *cells))
    picture = draw.bars(
        "Weak scaling of GPT (estimates)", "MFU, %", labels, series, points=("published, Pax on TPU v4", points)
    )
    notes = (
        "MFU here follows the published convention, 6 N + 12 L M T FLOPs per token: all pairs of tokens count in "
        "attention. Published runs used another framework, its automatic partitioning and an older compiler; they were "
        "read off a plot, +-0.3 points. `python -m experiments.calibration` says where they differ from estimates.",
    )
    return Content((Table(_COLUMNS, rows),), picture, notes=notes)


FIGURE = Figure(
    name="fig13",
    title="Figure 13: weak scaling of the GPT series",
    simulated="the times and utilizations of the three programs.",
    measured="",
    published="the utilization of public Pax runs of the same models on TPU v4 (not the paper's own "
    "numbers, which are not at hand).",
    measurements=lambda quick: all_programs(gpt_sizes(quick), ASYNC if quick else XLA),
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
