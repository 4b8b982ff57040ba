"""Counts the FLOPs of every dot_general and kernel in a jaxpr, however deeply nested."""

from __future__ import annotations

import math
from typing import Any

from jax.extend.core import jaxprs_in_params


def count(jaxpr: Any) -> int:
    """2 * multiply-adds of all products over all devices: scan bodies count per trip, shard_map bodies per device.

    Kernels count as they say themselves, unless nothing uses what they compute, for then compilers leave them out.
    """
    total = 0
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            total += 0 if used.isdisjoint(map(id, eqn.outvars)) else eqn.params["cost_estimate"].flops
            continue
        if eqn.primitive.name == "dot_general":
            total += _dot(eqn)
            continue
        times = 1
        if eqn.primitive.name == "scan":
            times = eqn.params["length"]
        elif eqn.primitive.name == "shard_map":
            times = math.prod(eqn.params["mesh"].shape.values())
        else:
            assert eqn.primitive.name not in ("while", "cond"), "a loop without a trip count cannot be counted"
        for inner in jaxprs_in_params(eqn.params):
            total += times * count(inner)
    return total


def _dot(eqn: Any) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracting)
