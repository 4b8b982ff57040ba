"""A training step compiled for a slice, read off its time line."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from experiments.paper.work.count import num_params
from overlapfx.aot import plan_json, slices, variants
from overlapfx.aot.step_plan import DoesNotFit, Planner, StepPlan
from overlapfx.aot.timeline import walk
from overlapfx.config import from_config_dict

# The same program on links of other speeds.
LINK_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_SITE_FIELDS = (
    *("name", "state", "decision", "transfers", "hidden_transfers", "executions"),
    *("predicted_s", "scheduled_s", "compute_s", "exposed_s", "blocking_s"),
)


def find(task: Mapping[str, Any]) -> dict[str, Any]:
    """What `overlapfx plan --json` says of one program, less its lists of transfers and of devices; seconds and bytes.

    A program for which the compiler finds no room has "fits": False and "why" in place of figures.
    """
    config = from_config_dict(task["config"])
    family = importlib.import_module(f"models.{config.model.family}")
    planner = Planner.make(config, family, slices.parse_slice(task["slice"]), {})
    (variant,) = variants.choose(task["variant"])
    outcome: StepPlan | DoesNotFit
    try:
        outcome = planner.plan(variant, {}, variants.choose_schedulers(",".join(task["schedulers"])))
    except DoesNotFit as error:
        outcome = error
    document = plan_json.document(planner, {variant: outcome})
    found = {name: document[name] for name in ("topology", "chip", "mesh", "mesh_axes", "hbm_bytes_per_device")}
    found |= {"assumptions": document["assumptions"], "num_params": num_params(config), **document["programs"][0]}
    if isinstance(outcome, StepPlan):
        found |= {
            "step_s": outcome.step_s,
            "links": _by_link_factor(planner, outcome),
            "sites": [{name: site[name] for name in _SITE_FIELDS} for site in found["sites"]],
            "mechanism": _mechanism(outcome),
        }
        found.pop("transfers")
    return found


def _mechanism(plan: StepPlan) -> str:
    """What imposed the order of the config's scheduler, as noted while tracing; "" for the compiler's own."""
    orders = {call.order for site in plan.sites for call in site.calls}
    return ", ".join(sorted({order.partition(" by ")[2] for order in orders} - {""}))


def _by_link_factor(planner: Planner, plan: StepPlan) -> dict[str, float]:
    torus, coords = planner.placement.torus, plan.compiled.coords
    figures = {factor: planner.assumptions.with_link_factor(factor) for factor in LINK_FACTORS}
    return {f"{factor:g}": walk(plan.program, torus, coords, a).total_s for factor, a in figures.items()}
