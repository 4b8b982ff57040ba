"""AllReduces of products: a ReduceScatter, which can run beside the product, and an AllGather where that is cheaper."""

from __future__ import annotations

import math
from typing import Any

import jax

from overlapfx.config import Overlap
from overlapfx.ops import rewrite_match as match
from overlapfx.ops.rewrite_graph import Graph, Op, Reduced, Value, read_graph
from overlapfx.ops.rewrite_plan import BodyPlan, plan_body
from overlapfx.plan.cost import all_reduce, environment, native
from overlapfx.plan.decide import MARGIN
from overlapfx.plan.slots import Slot

_MAX_WAYS = 2  # each may plan the whole body once more


def plan(jaxpr: Any, overlap: Overlap) -> tuple[Graph, BodyPlan]:
    """The graph of a body, with AllReduces split where that is predicted to be faster, and what runs instead of it.

    All that may be split are, along the dimension that comes first; those that do not pay try the next one, and stay
    whole after the last. Mode "on" decides nothing here: split is what the prediction says is cheaper.
    """
    why: dict[int, str] = {}
    dims: dict[int, list[int]] = {}
    for i, reduced in enumerate(read_graph(jaxpr, inline=True).reduced):
        if _sums_products(reduced.op.inputs[0]):
            why[i] = _refusal(reduced.op)
            dims[i] = [] if why[i] else _dimensions(reduced.op)
            why[i] = why[i] or "no dimension of it divides by the number of devices"
    while True:
        dims = {i: able for i, able in dims.items() if able}
        graph = read_graph(jaxpr, inline=True, split={i: able[0] for i, able in dims.items()})
        body = plan_body(graph, overlap)
        refused = {i: reason for i in dims if (reason := _dearer(graph.reduced, i, body))}
        if not refused:
            break
        why.update(refused)
        dims = {i: able[i in refused :] for i, able in dims.items()}
    whole = tuple((graph.reduced[i].op, reason) for i, reason in why.items() if i not in dims)
    return graph, BodyPlan(body.order, body.calls, (*body.left, *whole))


def _sums_products(value: Value) -> bool:
    """Whether a value is a product, or a sum of products, but for its shape and dtype."""
    op = value.producer
    if op is None or op.name == "dot_general":
        return op is not None
    if op.name in match.SHAPED:
        return _sums_products(op.inputs[0])
    return op.name in ("add", "add_any") and all(map(_sums_products, op.inputs))


def _num_devices(op: Op) -> int:
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in op.params["axes"])


def _refusal(op: Op) -> str:
    """Why an AllReduce must stay one; "" if it may be split."""
    if op.params.get("axis_index_groups") is not None:
        return "it has axis_index_groups, and a collective einsum speaks of whole mesh axes"
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if any(axis not in manual for axis in op.params["axes"]):
        return f"axis {'*'.join(map(str, op.params['axes']))} is not one that shard_map maps over here"
    return "the axis has size 1: there is nothing to communicate" if _num_devices(op) == 1 else ""


def _dimensions(op: Op) -> list[int]:
    """Dimensions along which to try to scatter it, the largest first: its pieces are the widest."""
    shape = op.inputs[0].shape
    able = [d for d, size in enumerate(shape) if size % _num_devices(op) == 0]
    return sorted(able, key=lambda d: -shape[d])[:_MAX_WAYS]


def _dearer(all_reduced: tuple[Reduced, ...], i: int, plan: BodyPlan) -> str:
    """Why an AllReduce that was split should not have been; "" if it pays, with all that are split at one call."""
    reduced = all_reduced[i]
    call = next((call for call in plan.calls if reduced.scatter in call.recipe.absorbed), None)
    if call is None:
        return next(why for op, why in plan.left if op is reduced.scatter)
    chosen = call.decision.plan
    axes = tuple(reduced.op.params["axes"])
    if chosen.slot is None or chosen.slot.kind != "scatter" or chosen.slot.axes != axes:
        return f"the gate overlaps another collective at its product ({chosen.how})"
    reduced_here = [one for one in all_reduced if one.scatter in call.recipe.absorbed]
    where = environment()
    split_s = chosen.seconds
    # The best with AllReduces is the best with blocking ReduceScatters, each with the one for the other.
    others = [way.seconds for way in call.decision.ways if way.slot is None or way.slot.kind != "scatter"]
    whole_s = min([chosen.whole_seconds, *others])
    for one in reduced_here:
        moved = _moved(one.op, axes)
        whole_s += all_reduce(moved, where) - native(chosen.slot, where)
        if not any(one.gather in other.recipe.absorbed for other in plan.calls):
            split_s += native(moved, where)
    if split_s < whole_s * (1 - MARGIN):
        return ""
    return (
        f"ReduceScatter beside its product and AllGather are no cheaper: {split_s * 1e3:.3g} ms predicted, "
        f"{whole_s * 1e3:.3g} ms with the AllReduce"
    )


def _moved(op: Op, axes: tuple[str, ...]) -> Slot:
    """What each half of an AllReduce moves, in the dtype that it has."""
    aval, n = op.inputs[0].aval, _num_devices(op)
    return Slot("gather", 0, "", axes, n, 0, (n - 1) * aval.size * aval.dtype.itemsize // n)
