"""The programs that figures compare, and which of XLA's is the best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.paper.applications import Application
from experiments.paper.measurement import Measurement, plan
from experiments.paper.results import Results
from overlapfx.aot.variants import VARIANTS

BLOCKING, OURS = "blocking", "ours"
# What `overlapfx plan --compare=xla` compares, and the one of them that was the best of every size of GPT.
XLA = tuple(variant.name for variant in VARIANTS if variant.group == "xla")
ASYNC = XLA[-1:]
# What the paper prints of all of them: from its abstract, and figure 1.
GAINS = (1.14, 1.38)
SHARES = (0.22, 0.42)


def all_programs(ones: Sequence[Application], xla: Sequence[str]) -> list[Measurement]:
    """Every application as blocking, as those of XLA's, as ours."""
    return [plan(one, name) for one in ones for name in (BLOCKING, *xla, OURS)]


def best_of_xla(one: Application, results: Results) -> Mapping[str, Any] | None:
    """The quickest of XLA's programs that there are, as `overlapfx plan` marks it; None if there is none."""
    found = [result for name in XLA if (result := results.find(plan(one, name))) is not None]
    return min(found, key=lambda result: result["step_s"], default=None)


def communication_share(one: Application, results: Results) -> float | None:
    """Part of the blocking step that is communication, 0 to 1."""
    found = results.find(plan(one, BLOCKING))
    return None if found is None else found["communication_share"]
