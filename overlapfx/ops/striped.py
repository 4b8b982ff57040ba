"""Decompositions along a label that is not communicated: every piece is a whole collective with a whole contraction."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from overlapfx.ops import pieces, ring
from overlapfx.ops.looped import Outs
from overlapfx.plan.chains import stripe_sizes
from overlapfx.plan.decide import Plan
from overlapfx.plan.pattern import Problem


def _stripes(plan: Plan, size: int) -> list[tuple[int, int]]:
    sizes = stripe_sizes(size, plan.stripes, grow=True)
    return [(sum(sizes[:i]), s) for i, s in enumerate(sizes)]


def gather_stripes(
    problem: Problem, plan: Plan, operands: Sequence[Array], finish: pieces.Finish, keep: bool
) -> tuple[Outs, Shaped[Array, "..."] | None]:
    """Cuts the operand along plan.stripe_label, gathers piece k + 1 while piece k is multiplied.

    Each piece is gathered whole, so its contraction is whole: no running sum, and the rounding of the blocking form.
    The pieces of the result are placed at fixed offsets. The first piece is small, since nothing hides its gather.
    Returns as `looped.gather_ring` does.
    """
    slot = plan.slot
    assert slot is not None
    labels = problem.operands[slot.index].labels
    moving = operands[slot.index]
    cut = plan.stripe_label
    size = moving.shape[labels.index(cut)]
    outs: Outs = {}
    kept = None
    for start, length in _stripes(plan, size):
        stripe = pieces.take(moving, labels, cut, start, length)
        stripe = ring.all_gather(stripe, slot.axes, labels.index(slot.label))
        for i, result in enumerate(problem.results):
            terms = [t for t in problem.terms if t.out == i and slot.index in t.operands()]
            if not terms:
                continue
            running: pieces.Sum = None
            for term in terms:
                parts = tuple(
                    stripe
                    if j == slot.index
                    else pieces.take(operands[j], problem.operands[j].labels, cut, start, length)
                    for j in term.operands()
                )
                running = [pieces.multiply_add(problem, term, parts, running)]
            assert running is not None
            total = running[0]
            dim = result.labels.index(cut)
            shape = (*total.shape[:dim], size, *total.shape[dim + 1 :])
            outs[i] = pieces.place_all(outs.get(i), finish(i, total, cut, start), shape, dim, start)
        if keep:
            dim = labels.index(cut)
            shape = (*stripe.shape[:dim], size, *stripe.shape[dim + 1 :])
            kept = pieces.place(kept, stripe, shape, dim, start)
    return outs, kept


def scatter_stripes(
    problem: Problem, plan: Plan, operands: Sequence[Array], finish: pieces.Finish
) -> tuple[Array, ...]:
    """Cuts the result along plan.stripe_label, scatters piece k while piece k + 1 is multiplied."""
    slot = plan.slot
    assert slot is not None
    labels = problem.results[slot.index].labels
    cut, dim = plan.stripe_label, labels.index(plan.stripe_label)
    # Operands of other results stay whole: the same letter may have another size there.
    used = {i for t in problem.terms if t.out == slot.index for i in t.operands()}
    owner = next(i for i in sorted(used) if cut in problem.operands[i].labels)
    size = operands[owner].shape[problem.operands[owner].labels.index(cut)]
    wire = pieces.wire_dtype(pieces.accumulation_dtype(*operands), plan.accum_dtype)
    out: tuple[Array, ...] | None = None
    for start, length in _stripes(plan, size):
        cut_operands = [
            pieces.take(x, problem.operands[i].labels, cut, start, length) if i in used else x
            for i, x in enumerate(operands)
        ]
        product = pieces.multiply_all(problem, slot.index, cut_operands)
        part = ring.psum_scatter(product.astype(wire), slot.axes, labels.index(slot.label)).astype(product.dtype)
        shape = (*part.shape[:dim], size, *part.shape[dim + 1 :])
        out = pieces.place_all(out, finish(slot.index, part, cut, start), shape, dim, start)
    assert out is not None
    return out


def scatter_exchange(problem: Problem, plan: Plan, operands: Sequence[Array]) -> Shaped[Array, "..."]:
    """Sends every partial result to its owner, who sums them once in the accumulation dtype.

    Same bytes as a ReduceScatter on a fully connected network. Against a travelling accumulator in plan.accum_dtype
    each value is rounded once before the sum, however many devices there are, and not once per hop.
    """
    slot = plan.slot
    assert slot is not None
    product = pieces.multiply_all(problem, slot.index, operands)
    wire = pieces.wire_dtype(product.dtype, plan.accum_dtype)
    dim = problem.results[slot.index].labels.index(slot.label)
    received = ring.all_to_all(product.astype(wire), slot.axes, dim)
    return jnp.sum(received, axis=0, dtype=product.dtype)
