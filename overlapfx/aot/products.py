"""Counts the FLOPs of every dot_general and kernel in a jaxpr, however deeply nested."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def products(jaxpr: Any, outer: str = "") -> Iterator[tuple[str, float]]:
    """(scope, 2 * multiply-adds) of all products over all devices.

    Scan bodies count per trip, shard_map bodies per device; loops and branches without a count known beforehand give
    NaN. Kernels count as they say themselves, unless nothing uses what they compute, for then compilers leave them out.
    Scopes are paths of names, as `jax.named_scope` makes them.
    """
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        scope = f"{outer}/{eqn.source_info.name_stack}"
        if eqn.primitive.name == "pallas_call":
            if not used.isdisjoint(map(id, eqn.outvars)):
                yield scope, eqn.params["cost_estimate"].flops
            continue
        if eqn.primitive.name == "dot_general":
            yield scope, _dot(eqn)
            continue
        times = _times(eqn)
        for inner in jaxprs_in_params(eqn.params):
            for name, flops in products(inner, scope):
                yield name, times * flops


def count(jaxpr: Any) -> float:
    """FLOPs of all products over all devices; NaN if there is no telling."""
    return sum(flops for _, flops in products(jaxpr))


def _times(eqn: Any) -> float:
    """How often the bodies of an equation run, over all devices."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    if eqn.primitive.name == "shard_map":
        return math.prod(eqn.params["mesh"].shape.values())
    return math.nan if eqn.primitive.name in ("while", "cond") else 1


def _dot(eqn: Any) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracting)
