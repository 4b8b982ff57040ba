"""Beyond the paper: how far the steps of the GPT series are from having no communication."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from experiments.paper import command, draw
from experiments.paper.applications import Application, gpt_sizes
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import plan
from experiments.paper.programs import ASYNC, BLOCKING, OURS, XLA, all_programs, best_of_xla
from experiments.paper.results import Results
from experiments.paper.text import NONE, percent, ratio, seconds, speed_up, step_time

# What the project set itself for every size, and for the geometric mean of all.
_STEP_OVER_COMPUTE, _COMMUNICATION, _TEMPORARIES = 1.08, 0.04, 1.15
_OVER_BLOCKING, _OVER_BLOCKING_MEAN = 1.10, 1.20
_OVER_XLA, _OVER_XLA_MEAN = 1.05, 1.15
_HFU = {"256B": 0.78, "512B": 0.78}
_HFU_OTHERS = 0.75
_NUM_SITES = 3  # that are named


def _content(quick: bool, results: Results) -> Content:
    rows, bounds, waits, found = [], [], [], []
    for one in gpt_sizes(quick):
        blocking, ours = (results.find(plan(one, name)) for name in (BLOCKING, OURS))
        if blocking is None or ours is None:
            continue
        xla = best_of_xla(one, results)
        reached = measure(one.name, blocking, xla, ours)
        found.append((one, reached))
        marked = [f"{text(value)}{'' if good is None or good else ' !'}" for value, good, text in reached.values()]
        rows.append((one.name, step_time(ours), *marked, "yes" if ours["fits"] else "NO"))
        bounds.append((one.name, *_bounds(blocking, ours)))
        waits += [(one.name, *cells) for cells in _longest_waits(ours)]
    columns = ("size", "ours", *(next((r for _, r in found), {}) or ("no result",)), "fits")
    goals = Table(columns if rows else columns[:2], rows, "Goals; ! where one is missed")
    bound = Table(_BOUNDS, bounds, "What bounds them: the same step if nothing had to be waited for")
    sites = Table(("size", "einsum", "decision", "waiting", "of the step", "its computing"), waits, "Where ours waits")
    values = {"goal 1": [reached["step / compute"][0] for _, reached in found]}
    picture = draw.bars(
        "Step of ours over the computing of the blocking program (estimate)",
        "times",
        [one.name for one, _ in found],
        values,
        band=(1.0, _STEP_OVER_COMPUTE, "the goal"),
    )
    notes = (
        "Step / compute: of the computing of the blocking program, a step with nothing to communicate. Communication: "
        "what the step waits for. Temporaries: memory over that of the blocking program.",
    )
    return Content((goals, bound, sites), picture, tuple(_findings(found)), notes)


def measure(
    size: str, blocking: Mapping[str, Any], xla: Mapping[str, Any] | None, ours: Mapping[str, Any]
) -> dict[str, tuple[float | None, bool | None, Any]]:
    """Column -> (value, whether it is what the project wants, how it is shown); None where XLA's program is missing."""
    step = ours["step_s"] / blocking["compute_s"]
    gain, over_xla = speed_up(blocking, ours), speed_up(xla, ours)
    temporaries = ours["memory_bytes"]["temporaries"] / blocking["memory_bytes"]["temporaries"]
    assert gain is not None
    return {
        "step / compute": (step, step <= _STEP_OVER_COMPUTE, ratio),
        "communication": (ours["communication_share"], ours["communication_share"] <= _COMMUNICATION, percent),
        "over blocking": (gain, gain >= _OVER_BLOCKING, ratio),
        "over XLA": (over_xla, None if over_xla is None else over_xla >= _OVER_XLA, ratio),
        "HFU": (ours["hfu"], ours["hfu"] >= _HFU.get(size, _HFU_OTHERS), percent),
        "temporaries": (temporaries, temporaries <= _TEMPORARIES, ratio),
    }


_BOUNDS = ("size", "computing, blocking", "computing, ours", "ours / blocking", "gain at most", "HFU at most")


def _bounds(blocking: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[str, ...]:
    """With the work of our program as it is, and no waiting at all."""
    computing = ours["compute_s"]
    return (
        seconds(blocking["compute_s"]),
        seconds(computing),
        ratio(computing / blocking["compute_s"]),
        ratio(blocking["step_s"] / computing),
        percent(ours["hfu"] * ours["step_s"] / computing),
    )


def _longest_waits(ours: Mapping[str, Any]) -> list[tuple[str, ...]]:
    sites = sorted(ours["sites"], key=lambda site: -(site["exposed_s"] + site["blocking_s"]))[:_NUM_SITES]
    waits = [(site, site["exposed_s"] + site["blocking_s"]) for site in sites]
    return [
        (site["name"], site["decision"], seconds(wait), percent(wait / ours["step_s"]), seconds(site["compute_s"]))
        for site, wait in waits
    ]


def _findings(found: list[tuple[Application, dict[str, tuple[float | None, bool | None, Any]]]]) -> list[Finding]:
    made = []
    for column, goal in (("over blocking", _OVER_BLOCKING_MEAN), ("over XLA", _OVER_XLA_MEAN)):
        gains = [value for _, reached in found if (value := reached[column][0]) is not None]
        mean = math.exp(sum(map(math.log, gains)) / len(gains)) if gains else None
        made.append(
            Finding(
                f"ours is {goal:.2f}x {column} in the geometric mean of the GPT series (a goal of ours)",
                None if mean is None else mean >= goal,
                NONE if mean is None else f"{ratio(mean)} over {len(gains)} sizes",
            )
        )
    return made


FIGURE = Figure(
    name="fig_goals",
    title="Beyond the paper: what is left of communication",
    simulated="all of it.",
    measured="",
    published="",
    measurements=lambda quick: all_programs(gpt_sizes(quick), ASYNC if quick else XLA),
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
