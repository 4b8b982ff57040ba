"""Runs one problem according to its plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.ops import layout, looped, order, pieces, ring, striped
from overlapfx.ops.instructions import TRANSFERS
from overlapfx.plan import decide
from overlapfx.plan.cost import Work
from overlapfx.plan.decide import CallSite, Plan
from overlapfx.plan.pattern import Problem, Result, num_shards
from overlapfx.plan.slots import Slot, find_slots

_LANES = 128  # elements of a row that a vector register of a TPU holds


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What happens to a result once its sum is complete: bias, activation, rounding to `dtype`.

    bias: one array per result or None; bias_labels: its labels, a subset of the result's.
    keep_input: also return the activation's input (before rounding it is the pre-activation), for the backward pass.
    """

    dtypes: tuple[Any, ...]
    bias: tuple[Array, ...] | None = None
    bias_labels: str = ""
    activation: Callable[[Array], Array] | None = None
    keep_input: bool = False

    def apply(self, labels: str, result: int, value: Array, label: str, start: pieces.Start) -> tuple[Array, ...]:
        """Finishes a piece of a result that begins at `start` along `label` ("" for a whole result)."""
        if self.bias is not None:
            bias = self.bias[result]
            if label and label in self.bias_labels:
                bias = pieces.take(bias, self.bias_labels, label, start, value.shape[labels.index(label)])
            value = value + jnp.einsum(
                f"{self.bias_labels}->{''.join(c for c in labels if c in self.bias_labels)}", bias
            )[tuple(slice(None) if c in self.bias_labels else None for c in labels)].astype(value.dtype)
        dtype = self.dtypes[result]
        if self.activation is None:
            return (value.astype(dtype),)
        active = self.activation(value).astype(dtype)
        return (active, value.astype(dtype)) if self.keep_input else (active,)


def plan_problem(
    name: str,
    problem: Problem,
    operands: Sequence[Array],
    overlap: Overlap,
    mesh_axes: Mapping[str, int],
    early: Collection[int],
    num_stripes: int,
) -> Plan:
    """Finds the collectives of a problem, lets the gate choose, records the call site.

    early: operands that are known long before, so that their gathers can be. num_stripes: row stripes side by side.
    """
    full: list[dict[str, int]] = []
    for operand, x in zip(problem.operands, operands, strict=True):
        gathered = dict(operand.gather)
        full.append(
            {c: n * num_shards(gathered.get(c, ()), mesh_axes) for c, n in zip(operand.labels, x.shape, strict=True)}
        )
    sizes = {t.out: full[t.lhs] | full[t.rhs] for t in problem.terms}
    accum = pieces.wire_dtype(pieces.accumulation_dtype(*operands), overlap.accum_dtype)
    shapes, item_bytes = [x.shape for x in operands], [x.dtype.itemsize for x in operands]
    slots = find_slots(problem, shapes, item_bytes, sizes, mesh_axes, jnp.dtype(accum).itemsize)
    work = Work(problem, sizes, frozenset(early), num_stripes)
    plan, ways = decide.choose(slots, overlap, _cut_sizes(slots, full, sizes), work)
    specs = tuple(problem.spec(t) for t in problem.terms)
    by = order.describe(overlap.scheduler, ("all_gather",) if plan.method in ("blocking", "stripe") else TRANSFERS)
    decide.record(CallSite(name, specs, slots, plan, by, ways, work.flops()))
    return plan


def _cut_sizes(
    slots: Sequence[Slot], full: Sequence[Mapping[str, int]], sizes: Mapping[int, Mapping[str, int]]
) -> dict[tuple[str, int], Mapping[str, int]]:
    """Label sizes by collective: several right operands may give one letter different sizes."""
    return {(s.kind, s.index): full[s.index] if s.kind == "gather" else sizes[s.index] for s in slots}


def run(
    problem: Problem,
    operands: Sequence[Array],
    plan: Plan,
    epilogue: Epilogue,
    keep: Sequence[int] = (),
) -> tuple[tuple[tuple[Array, ...], ...], dict[int, Array]]:
    """All results of a problem and the gathered form of the operands named in `keep`.

    Every collective but the planned one is blocking: gathers before, scatters after. Each result is a tuple, with the
    activation's input second where the epilogue keeps it.
    """
    slot = plan.slot
    operands = [_gather_blocking(problem, plan, i, x) for i, x in enumerate(operands)]
    if slot is not None and plan.method == "prefetch":
        labels = problem.operands[slot.index].labels
        operands[slot.index] = looped.all_gather_by_ring(operands[slot.index], labels, plan)
    kept = {i: operands[i] for i in keep}
    outs: dict[int, tuple[Array, ...]] = {}
    done = {i for i in range(len(problem.results)) if _finished_by_piece(problem, plan, i)}

    def finish(result: int, value: Array, label: str = "", start: pieces.Start = 0) -> tuple[Array, ...]:
        return epilogue.apply(problem.results[result].labels, result, value, label, start)

    def finish_piece(result: int, value: Array, label: str, start: pieces.Start) -> tuple[Array, ...]:
        return finish(result, value, label, start) if result in done else (value,)

    if slot is not None and slot.kind == "gather" and plan.method in ("ring", "stripe"):
        decomposed = looped.gather_ring if plan.method == "ring" else striped.gather_stripes
        outs, gathered = decomposed(problem, plan, operands, finish_piece, slot.index in keep)
        if gathered is not None:
            kept[slot.index] = gathered
        operands_left = {slot.index}
    else:
        operands_left = set()
        if slot is not None and slot.kind == "scatter":
            outs = _scatter(problem, plan, operands, finish_piece)
    return tuple(
        outs[i] if i in done else finish(i, _complete(problem, plan, i, operands, outs, operands_left))
        for i in range(len(problem.results))
    ), kept


def _gather_blocking(problem: Problem, plan: Plan, i: int, x: Array) -> Array:
    for label, axes in problem.operands[i].gather:
        slot = plan.slot
        if slot is None or (slot.kind, slot.index, slot.label) != ("gather", i, label):
            x = ring.all_gather(x, axes, problem.operands[i].labels.index(label))
    return x


def _finished_by_piece(problem: Problem, plan: Plan, i: int) -> bool:
    """Whether the decomposition itself sees final values of result `i`, so that the epilogue can run piece by piece."""
    slot, result = plan.slot, problem.results[i]
    if slot is None:
        return False
    if slot.kind == "scatter":
        return plan.method == "stripe" and i in plan.members() and len(result.scatter) == 1
    if plan.method not in ("ring", "stripe") or result.scatter:
        return False
    placed = slot.label in result.labels if plan.method == "ring" else True
    return placed and all(slot.index in t.operands() for t in problem.terms if t.out == i)


def _scatter(problem: Problem, plan: Plan, operands: Sequence[Array], finish: pieces.Finish) -> looped.Outs:
    outs: looped.Outs = {}
    for i, slot in plan.members().items():
        one = dataclasses.replace(plan, slot=slot, twins=())
        if plan.method == "stripe":
            outs[i] = striped.scatter_stripes(problem, one, operands, finish)
        elif plan.method == "ring":
            outs[i] = (looped.scatter_ring(*pieces.merge_contraction(problem, i, operands), plan=one),)
        else:
            outs[i] = (striped.scatter_exchange(problem, one, operands),)
    return outs


def _complete(
    problem: Problem,
    plan: Plan,
    i: int,
    operands: Sequence[Array],
    outs: Mapping[int, tuple[Array, ...]],
    decomposed: set[int],
) -> Array:
    """Result `i` before the epilogue: what the decomposition left to do, whole products and blocking scatters."""
    total: pieces.Sum = outs.get(i)
    slot = plan.slot
    # XLA's partitioner chooses what it sums over devices, in the dtype that the product has.
    wire = pieces.wire_dtype(pieces.accumulation_dtype(*operands), plan.accum_dtype)
    dtype = wire if layout.is_cut_by_xla() else None
    scattered_here = slot is not None and slot.kind == "scatter" and i in plan.members()
    if not scattered_here:
        for term in problem.terms:
            if term.out == i and not decomposed & set(term.operands()):
                made = pieces.multiply_add(problem, term, (operands[term.lhs], operands[term.rhs]), total, dtype=dtype)
                total = [_scattered_as_rows(made, problem.results[i])]
    assert total is not None
    value = total[0]
    for label, axes in problem.results[i].scatter:
        if scattered_here and slot is not None and label == slot.label:
            continue
        dim = problem.results[i].labels.index(label)
        value = ring.psum_scatter(value.astype(wire), axes, dim).astype(value.dtype)
    return value


def _scattered_as_rows(x: Array, result: Result) -> Array:
    """A matrix whose columns will be scattered, laid out in memory so that a shard is rows where it is no whole lanes.

    The TPU compiler sums such columns with an AllReduce, which moves twice the bytes of a ReduceScatter.
    """
    scattered = [(dim, axes) for label, axes in result.scatter if (dim := result.labels.index(label))]
    if x.ndim != 2 or len(scattered) != 1 or compat.target_platform() != "tpu":
        return x
    ((dim, axes),) = scattered
    return compat.lay_out(x, (dim, 0)) if x.shape[dim] // ring.size(axes) % _LANES else x
