"""A program that others wrote, compiled for a slice as it is and as `overlapfx.overlap` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import overlapfx
from experiments import foreign
from overlapfx.aot import variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import compile_for
from overlapfx.aot.read import time_line
from overlapfx.aot.slices import Slice, environment, make_slice_mesh, parse_slice
from overlapfx.config import Overlap
from overlapfx.plan import cost

PLAIN, ASYNCHRONOUS, REWRITTEN = "plain", "plain, asynchronous", "rewritten"


def find(task: Mapping[str, Any]) -> dict[str, Any]:
    """The loss with its gradients in all three ways, and the lines that say what was rewritten; seconds, bytes.

    Operands are bfloat16. Rewritten programs have the compiler options of our steps.
    """
    topology = parse_slice(task["slice"])
    assumptions = Assumptions.for_slice(topology)
    mesh, placement = make_slice_mesh(topology, {"y": task["y"], "x": task["x"]}, assumptions.network(topology))
    program, sizes = foreign.PROGRAMS[task["program"]], foreign.Sizes(**task["sizes"])
    arguments = program.arguments(mesh, sizes, jnp.bfloat16)
    plain = jax.jit(jax.value_and_grad(program.loss(mesh), (0, 1)))
    rewritten = overlapfx.overlap(plain, Overlap(mode=task["mode"]))
    (asynchronous,) = variants.choose("xla-async")
    ways: dict[str, tuple[Callable[..., Any], Mapping[str, str]]] = {
        PLAIN: (plain, {}),
        ASYNCHRONOUS: (plain, asynchronous.options),
        REWRITTEN: (rewritten, variants.OURS.options),
    }
    with cost.pricing(environment(topology, placement)):
        report = rewritten.report(*arguments)
        made = {way: _compiled(topology, fn, arguments, options, assumptions) for way, (fn, options) in ways.items()}
    return {
        "programs": made,
        "num_rewritten": len(report.rewritten),
        "num_left": len(report.left),
        "report": str(report).splitlines(),
    }


def _compiled(
    topology: Slice, fn: Callable[..., Any], arguments: Any, options: Mapping[str, str], assumptions: Assumptions
) -> dict[str, Any]:
    made = compile_for(topology, fn, arguments, options)
    line = time_line(made, assumptions)
    return {
        "step_s": line.total_s,
        "compute_s": line.compute_s,
        "exposed_s": line.exposed_s,
        "blocking_s": line.blocking_s,
        "communication_share": line.communication_share,
        "fits": made.memory.total <= assumptions.hbm_bytes,
        "temporary_bytes": made.memory.temporaries,
        "compile_s": made.compile_s,
    }
