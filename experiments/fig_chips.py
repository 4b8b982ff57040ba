"""Beyond the paper: the same model on other TPUs."""

from __future__ import annotations

import dataclasses
import sys

from experiments.paper import command, draw
from experiments.paper.applications import Application, smallest_gpt
from experiments.paper.figure import Content, Figure, Table
from experiments.paper.measurement import Measurement, plan
from experiments.paper.programs import ASYNC, BLOCKING, OURS
from experiments.paper.results import Results
from experiments.paper.text import NONE, percent, ratio, speed_up, step_time
from overlapfx.aot.slices import parse_slice

_PROGRAMS = (BLOCKING, *ASYNC, OURS)
# Slice with the mesh (y, x) that fills it; as many devices as the model's own slice has where its memory allows. On 256
# devices each has eight sequences: four row stripes of two, eight of one are too small.
_SLICES = {
    "v4:4x4x4": ("mesh.y=16", "mesh.x=4"),
    "v5e:16x16": ("mesh.y=64", "mesh.x=4", "overlap.row_stripes=4"),
    "v5p:4x4x4": ("mesh.y=16", "mesh.x=4"),
    "v6e:16x16": ("mesh.y=64", "mesh.x=4", "overlap.row_stripes=4"),
    "tpu7x:2x4x4": ("mesh.y=16", "mesh.x=4"),
}
_QUICK = dict.fromkeys(("v4:2x2x1", "v5e:2x2", "v6e:2x2"), ("mesh.y=2", "mesh.x=2"))


def _ones(quick: bool) -> list[Application]:
    base = smallest_gpt(quick)
    return [
        dataclasses.replace(base, topology=name, changes=(*base.changes, *changes))
        for name, changes in (_QUICK if quick else _SLICES).items()
    ]


def _programs(quick: bool) -> tuple[str, ...]:
    return (BLOCKING, OURS) if quick else _PROGRAMS


def _measurements(quick: bool) -> list[Measurement]:
    return [plan(one, name) for one in _ones(quick) for name in _programs(quick)]


def _content(quick: bool, results: Results) -> Content:
    rows = []
    mfu: dict[str, list[float | None]] = {name: [] for name in _programs(quick)}
    for one in _ones(quick):
        found = {name: results.find(plan(one, name)) for name in _programs(quick)}
        for name, values in mfu.items():
            values.append(None if (result := found[name]) is None else 100 * result["mfu"])
        blocking, ours = found[BLOCKING], found[OURS]
        rows.append(
            (
                one.topology,
                parse_slice(one.topology).chip.name,
                *(step_time(result) for result in found.values()),
                *(percent(None if r is None else r["communication_share"]) for r in (blocking, ours)),
                percent(None if ours is None else ours["mfu"]),
                ratio(speed_up(blocking, ours)),
                NONE if ours is None else ("yes" if ours["fits"] else "NO"),
            )
        )
    columns = ("slice", "chip", *_programs(quick), "comm. blocking", "comm. ours", "MFU ours", "gain", "fits")
    picture = draw.bars("The same model on other chips (estimate)", "MFU, %", [o.topology for o in _ones(quick)], mfu)
    notes = (
        "The clocks of v5p, v6e and TPU7x are not published; times of work scale with the assumed ones. Communication "
        "is what the processor waits for, part of the step.",
    )
    return Content((Table(columns, rows),), picture, notes=notes)


FIGURE = Figure(
    name="fig_chips",
    title="Beyond the paper: other TPUs",
    simulated="all of it: the smallest GPT of the series.",
    measured="",
    published="",
    measurements=_measurements,
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
