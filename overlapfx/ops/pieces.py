"""Slices of operands, partial einsums, and the places where their results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from overlapfx import compat
from overlapfx.plan.pattern import Operand, Problem, Term

Start = Any  # int or traced int32 scalar: where a piece begins along its label
# finish(result, accumulated value, label, start) -> what leaves the op for this piece: bias, activation, rounding.
Finish = Callable[[int, Array, str, Start], tuple[Array, ...]]


def accumulation_dtype(*operands: Array) -> Any:
    """dtype of partial einsums: float32 for floats of at most 32 bits, the operands' own type for everything else."""
    dtype = jnp.result_type(*operands)
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits <= 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def wire_dtype(accum: Any, requested: str) -> Any:
    """dtype of an accumulator that travels: as requested for real floats, else that of the partial einsums."""
    return jnp.dtype(requested) if accum == jnp.float32 else accum


def take(x: Shaped[Array, "..."], labels: str, label: str, start: Start, size: int) -> Shaped[Array, "..."]:
    """x[..., start : start + size, ...] along `label`; x itself if it does not have the label."""
    if label not in labels:
        return x
    dim = labels.index(label)
    if x.shape[dim] == size:
        return x
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, size, axis=dim)


def take_all(
    x: Shaped[Array, "..."], labels: str, label: str, starts: Sequence[Start], sizes: Sequence[int]
) -> Shaped[Array, "..."]:
    """Several slices along `label`, concatenated; x itself if it does not have the label."""
    if label not in labels:
        return x
    slices = [take(x, labels, label, start, size) for start, size in zip(starts, sizes, strict=True)]
    return slices[0] if len(slices) == 1 else jnp.concatenate(slices, axis=labels.index(label))


def split(x: Shaped[Array, "..."], dim: int, sizes: Sequence[int]) -> list[Shaped[Array, "..."]]:
    """The inverse of concatenating parts of these sizes along `dim`."""
    if len(sizes) == 1:
        return [x]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    return [lax.slice_in_dim(x, o, o + s, axis=dim) for o, s in zip(offsets, sizes, strict=True)]


def multiply(
    problem: Problem, term: Term, lhs: Shaped[Array, "..."], rhs: Shaped[Array, "..."], *, dtype: Any = None
) -> Shaped[Array, "..."]:
    """One einsum, left in the accumulation dtype unless `dtype` is another: rounding is for whoever ends the sum."""
    accum = accumulation_dtype(lhs, rhs)
    if compat.target_platform() == "cpu":
        # XLA's CPU backend refuses some products of bfloat16 with a float32 result ("ab,acd->bcd") when they run.
        # Widened operands give the same numbers, for products of bfloat16 values are exact in float32.
        wide = lhs.astype(accum), rhs.astype(accum)
        return jnp.einsum(problem.spec(term), *wide, preferred_element_type=accum).astype(dtype or accum)
    return jnp.einsum(problem.spec(term), lhs, rhs, preferred_element_type=dtype or accum)


Sum = Sequence[Array] | None  # parts of a running sum, side by side; None if there is none yet


def multiply_add(
    problem: Problem, term: Term, cut: tuple[Array, ...], total: Sum, dim: int = 0, *, dtype: Any = None
) -> Array:
    """One einsum plus a running sum, given as parts side by side along `dim`, in the dtype of `multiply`.

    The product comes first in the addition and begins behind a barrier, when all that it is added to is there: then the
    TPU compiler makes einsum and addition one kernel, at the price of the einsum alone. Otherwise it leaves most sums
    apart, which costs up to a fifth of the einsum's time (LOG.md).
    """
    if total is None:
        return multiply(problem, term, *cut, dtype=dtype)
    total, cut = lax.optimization_barrier((total, cut))
    product = multiply(problem, term, *cut, dtype=dtype)
    parts = [part.astype(product.dtype) for part in total]
    return product + (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=dim))


def multiply_all(problem: Problem, result: int, operands: Sequence[Array]) -> Shaped[Array, "..."]:
    """A result from whole operands: the sum of its terms."""
    total: Sum = None
    for term in problem.terms:
        if term.out == result:
            total = [multiply_add(problem, term, (operands[term.lhs], operands[term.rhs]), total)]
    assert total is not None
    return total[0]


def merge_contraction(
    problem: Problem, result: int, operands: Sequence[Array]
) -> tuple[Problem, list[Shaped[Array, "..."]]]:
    """The same problem with the labels that the products of `result` contract merged into one, where they are adjacent.

    One contracted dimension is what lets the TPU compiler add into an einsum (see `multiply_add`): for "btnh,nhd->btd"
    that is worth a copy of the operand.
    """
    terms = [t for t in problem.terms if t.out == result]
    used = sorted({i for t in terms for i in t.operands()})
    kept = problem.results[result].labels
    run = "".join(c for c in problem.operands[used[0]].labels if c not in kept)
    if len(run) < 2 or any(run not in problem.operands[i].labels for i in used):
        return problem, list(operands)
    new_operands, arrays = list(problem.operands), list(operands)
    for i in used:
        labels, x = problem.operands[i].labels, operands[i]
        start = labels.index(run)
        arrays[i] = x.reshape(*x.shape[:start], -1, *x.shape[start + len(run) :])
        new_operands[i] = Operand(labels.replace(run, run[0]))
    return Problem(tuple(new_operands), problem.results, tuple(terms)), arrays


def result_shape(problem: Problem, result: int, operands: Sequence[Array], label: str, size: int) -> tuple[int, ...]:
    """Shape of a result before any scatter when `label` has `size`, which the operands at hand may not show."""
    term = next(t for t in problem.terms if t.out == result)
    sizes: dict[str, int] = {}
    for i in term.operands():
        sizes.update(zip(problem.operands[i].labels, operands[i].shape, strict=True))
    sizes[label] = size
    return tuple(sizes[c] for c in problem.results[result].labels)


def place(
    buffer: Shaped[Array, "..."] | None, piece: Shaped[Array, "..."], shape: Sequence[int], dim: int, start: Start
) -> Shaped[Array, "..."]:
    """Writes a piece into a buffer along `dim`, making the buffer first if there is none.

    DynamicUpdateSlice and not concatenate: XLA updates in place, while a concatenation copies every piece once more.
    The buffer holds anything at first, as pieces cover it: zeros would be written before the first of them is.
    """
    if buffer is None:
        buffer = compat.vary(lax.empty(tuple(shape), piece.dtype), compat.varying_axes(piece))
    return lax.dynamic_update_slice_in_dim(buffer, piece, start, axis=dim)


def place_all(
    buffers: tuple[Array, ...] | None, parts: tuple[Array, ...], shape: Sequence[int], dim: int, start: Start
) -> tuple[Array, ...]:
    """`place` for each of the arrays that leave the op (one, or two where the pre-activation is kept)."""
    olds = buffers if buffers is not None else (None,) * len(parts)
    return tuple(place(old, part, shape, dim, start) for old, part in zip(olds, parts, strict=True))
