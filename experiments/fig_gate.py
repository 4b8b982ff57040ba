"""Beyond the paper: whether the gate picks what turns out to be the fastest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from experiments.paper import command, draw
from experiments.paper.applications import Application, gpt_sizes
from experiments.paper.figure import Content, Figure, Finding, Table
from experiments.paper.measurement import GATE, Measurement, einsum
from experiments.paper.results import Results
from experiments.paper.sites import ALL
from experiments.paper.text import NONE, percent, ratio, seconds
from overlapfx.plan.decide import MARGIN

_SITES = ("mlp_up", "mlp_down", "attention_out")
_GOAL = 0.9  # of the sites
# One of two chains by parity and the exchange are not among what the gate considers.
_WAYS = tuple(way for way in ALL if way != "ring one, parity")


def _einsum(one: Application, site: str, which: str) -> Measurement:
    """A site of the model with the tokens that a device has at once."""
    config = one.config()
    model, mesh = config.model, config.mesh
    tokens = config.data.global_batch * model.seq_len // (mesh.y * config.optimizer.grad_accum)
    sizes = {"tokens": tokens, "width": model.d_model, "hidden": model.d_ff}
    sizes |= {"heads": model.num_heads, "head_dim": model.head_dim}
    return einsum(site, one.topology, (mesh.y, mesh.x), sizes, (*_WAYS, GATE), which)


def _asked(quick: bool) -> list[tuple[Application, str, str]]:
    if quick:
        return [(gpt_sizes(quick)[0], "mlp_down", "forward")]
    return [
        (one, site, which) for one in gpt_sizes(quick) for site in _SITES for which in ("forward", "forward+backward")
    ]


def _content(quick: bool, results: Results) -> Content:
    rows, ratios, labels = [], [], []
    for one, site, which in _asked(quick):
        found = results.find(_einsum(one, site, which))
        if found is None:
            continue
        chosen, best = chosen_and_best(found["rows"])
        lost = chosen["total_s"] / best["total_s"]
        ratios.append(lost)
        labels.append(f"{one.name}\n{site}\n{which}")
        cells = (seconds(chosen["total_s"]), best["variant"], seconds(best["total_s"]), ratio(lost))
        rows.append((one.name, site, which, chosen["decided"], *cells, "yes" if lost <= 1 + MARGIN else "NO"))
    names = (
        "size",
        "einsum",
        "passes",
        "the gate's choice",
        "its time",
        "fastest",
        "its time",
        "over fastest",
        "right",
    )
    picture = draw.bars("The gate's choice over the fastest way (estimate)", "times", labels, {"gate": [*ratios]})
    notes = (
        f"Right: at most {percent(MARGIN)} slower than the fastest of all ways forced one by one. With the backward "
        "pass the gate chooses for each gradient apart, while a forced way is that of all, so that its choice may be "
        "faster than any.",
    )
    return Content((Table(names, rows),), picture, (_finding(ratios),), notes)


def chosen_and_best(rows: list[Mapping[str, Any]]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The row of the gate's choice, with what it "decided", and the fastest row of those forced into one way."""
    by_name = {row["variant"]: row for row in rows}
    gate = by_name[GATE]
    # The same program is compiled once, and the other row names it.
    same = gate["skipped"].removeprefix("the same program as ") if gate["total_s"] is None else ""
    plans = (by_name[same] if same else gate)["plans"]
    decided = "; ".join(plan.partition("] -> ")[2].partition(" (")[0] for plan in plans) or NONE
    forced = [row for name, row in by_name.items() if name != GATE and row["total_s"] is not None]
    return {**(by_name[same] if same else gate), "decided": decided}, min(forced, key=lambda row: row["total_s"])


def _finding(ratios: list[float]) -> Finding:
    right = sum(lost <= 1 + MARGIN for lost in ratios)
    return Finding(
        f"the gate is right at {_GOAL:.0%} of the einsums (a goal of ours, not a claim of the paper)",
        right >= _GOAL * len(ratios) if ratios else None,
        f"at {right} of {len(ratios)}" + (f"; it loses {percent(max(ratios) - 1)} at most" if ratios else ""),
        "predictions are made of a table of prices per chip, which `python -m experiments.prices` measures",
    )


FIGURE = Figure(
    name="fig_gate",
    title="Beyond the paper: the gate",
    simulated="all of it: the einsums of the GPT series at full size, each compiled in every way that the gate "
    "considers, and as the gate wants it.",
    measured="",
    published="",
    measurements=lambda quick: [_einsum(*asked) for asked in _asked(quick)],
    content=_content,
)

if __name__ == "__main__":
    sys.exit(command.main(FIGURE.name, (FIGURE,)))
