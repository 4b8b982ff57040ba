"""Plans of a step as plain JSON values, complete enough for anyone to check the figures with a reader of their own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from overlapfx.aot import render
from overlapfx.aot.plan_text import Outcome, best_of
from overlapfx.aot.step_plan import DoesNotFit, Planner, StepPlan
from overlapfx.aot.variants import Variant
from overlapfx.config import to_dict
from overlapfx.train.rundir import versions

FORMAT = 1  # of the document; counts up when a reader of the old form would be wrong


def document(planner: Planner, outcomes: Mapping[Variant, Outcome]) -> dict[str, Any]:
    """The config, the devices in partition order, versions, every assumed figure, one entry per variant.

    Seconds and bytes throughout; `coords[i]` is the place of partition i on the torus of its slice, last mesh axis
    fastest. Several slices have the same order, one after the other.
    """
    topology, torus = planner.topology, planner.placement.torus
    best = best_of({v: p for v, p in outcomes.items() if isinstance(p, StepPlan)}, "xla")
    return {
        "format": FORMAT,
        "config": to_dict(planner.config),
        "topology": str(topology),
        "num_devices": topology.num_devices,
        "num_slices": topology.num_slices,
        "chip": topology.chip.name,
        "hbm_bytes_per_device": planner.assumptions.hbm_bytes,
        "mesh": dict(planner.mesh.shape),
        "torus": {"shape": list(torus.shape), "wrap": list(torus.wrap)},
        "coords": [list(coord) for coord in planner.placement.order],
        "mesh_axes": [
            {
                "axis": report.axis,
                "size": report.size,
                "is_physical_cycle": report.is_cycle,
                "max_hops": report.max_hops,
                "mean_hops": report.mean_hops,
                "ring_steps_by_hops": {str(hops): count for hops, count in report.hops.items()},
                "shards_on_busiest_link": report.ring_load,
                "links_of_native_collective": report.native_links,
            }
            for report in planner.placement.reports
        ],
        "versions": {**versions(), "libtpu": importlib.metadata.version("libtpu")},
        "assumptions": [
            {"name": name, "value": value, "unit": unit, "source": source}
            for name, value, unit, source in planner.assumptions.rows()
        ],
        "best_of_xla": None if best is None else best.variant.name,
        "programs": [_program(variant, outcome) for variant, outcome in outcomes.items()],
    }


def _program(variant: Variant, outcome: Outcome) -> dict[str, Any]:
    about = {"name": variant.name, "group": variant.group, "what": variant.what, "partitioning": variant.partitioning}
    if isinstance(outcome, DoesNotFit):
        return {**about, "fits": False, "why": str(outcome)}
    memory = outcome.compiled.memory
    timeline = {k: v for k, v in render.as_dict(outcome.timeline).items() if k != "assumptions"}
    return {
        **about,
        "fits": outcome.fits,
        "compiler_options": dict(outcome.compiled.options),
        "lower_s": outcome.compiled.lower_s,
        "compile_s": outcome.compiled.compile_s,
        "compiled_before": outcome.compiled.is_kept,
        "read_s": outcome.read_s,
        "memory_bytes": {
            "arguments": memory.arguments,
            "outputs": memory.outputs,
            "aliased": memory.aliased,
            "temporaries": memory.temporaries,
            "code": memory.code,
            "total": memory.total,
        },
        "mfu": outcome.mfu,
        "hfu": outcome.hfu,
        "model_flops": outcome.flops.model,
        "hardware_flops": outcome.flops.hardware,
        "optimizer_s": outcome.optimizer_s,
        "step_s_by_link_factor": {f"{factor:g}": step_s for factor, step_s in outcome.sensitivity},
        **timeline,
        "sites": [site.as_dict() for site in outcome.sites],
        "orders": [order.as_dict() for order in outcome.orders],
    }
