"""Figure 15: rings in one direction against rings in two, by the size of the ring."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.paper import command, draw
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import Measurement
from experiments.paper.results import Results
from experiments.paper.sites import ring
from experiments.paper.text import NONE, ratio, seconds, trade

_SITES = {"ring_gather": "AllGather-Einsum", "ring_scatter": "Einsum-ReduceScatter"}
_TWO = ("ring two", "ring two whole")
_WAYS = ("blocking", "ring one", *_TWO)
Pair = tuple[Mapping[str, Any], Mapping[str, Any]]  # the one-way ring and the better of the others


def _ring_sizes(quick: bool) -> tuple[int, ...]:
    return (2, 4) if quick else (2, 4, 8, 16, 32, 64)


def _measurements(quick: bool) -> list[Measurement]:
    return [ring(name, size, quick) for name in _SITES for size in _ring_sizes(quick)]


def _content(quick: bool, results: Results) -> Content:
    tables, series = [], {}
    found: dict[str, dict[int, Pair]] = {}
    for name, what in _SITES.items():
        cells = []
        pairs = found.setdefault(what, {})
        for size in _ring_sizes(quick):
            result = results.find(ring(name, size, quick))
            rows = {row["variant"]: row for row in result["rows"] if row["total_s"]} if result is not None else {}
            if "ring one" in rows and (two := [rows[way] for way in _TWO if way in rows]):
                pairs[size] = (rows["ring one"], min(two, key=lambda row: row["total_s"]))
            times = [seconds(rows[way]["total_s"] if way in rows else None) for way in _WAYS]
            hops = NONE if result is None else str(result["max_hops"]["x"])
            cells.append((str(size), *times, ratio(_gain(pairs[size]) if size in pairs else None), hops))
        tables.append(Table(("devices in the ring", *_WAYS, "two over one", "hops of a step"), cells, what))
        series[what] = [(float(size), _gain(pair)) for size, pair in pairs.items()]
    picture = draw.lines(
        "Speed of the better of the two-way rings over the one-way ring (estimate)",
        "devices in the ring",
        "times",
        series,
        log="x",
        ticks=_ring_sizes(quick),
        level=1.0,
    )
    notes = (
        "Every device has the same einsum and receives the same bytes at every size. Two: half shards each way; two "
        "whole: whole shards, two arrivals share an einsum. A way that is n/a does not apply to so small a ring.",
    )
    return Content(tuple(tables), picture, (_finding(found),), notes)


def _gain(pair: Pair) -> float:
    return pair[0]["total_s"] / pair[1]["total_s"]


def _finding(found: Mapping[str, Mapping[int, Pair]]) -> Finding:
    ends = {what: (min(pairs), max(pairs)) for what, pairs in found.items() if len(pairs) >= 2}
    grows = [_gain(found[what][large]) > _gain(found[what][small]) for what, (small, large) in ends.items()]
    numbers = "; ".join(
        f"{what} {ratio(_gain(found[what][small]))} at {small}, {ratio(_gain(found[what][large]))} at {large}"
        for what, (small, large) in ends.items()
    )
    told = "; ".join(f"{what} at {large}: {trade(*found[what][large])}" for what, (_, large) in ends.items())
    return Finding(
        "the second direction helps more in large rings",
        None if not ends or len(set(grows)) > 1 else grows[0],
        numbers or "none",
        "a second direction shortens the way of a shard, for a prologue or an epilogue, more and smaller messages; it "
        f"pays where the one-way ring is waited for. From one to two directions, {told or 'unknown'}",
    )


FIGURE = Figure(
    name="fig15",
    title="Figure 15: one direction against two",
    simulated="all of it: single einsums on one slice, whose mesh axis x is the ring.",
    measured="",
    published="that the second direction helps, and more with more partitions; its numbers are not at hand.",
    measurements=_measurements,
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
