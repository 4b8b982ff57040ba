"""Slices of operands, partial einsums, and the places where their results go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from overlapfx import compat
from overlapfx.plan.pattern import Problem, Term

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
    problem: Problem, term: Term, lhs: Shaped[Array, "..."], rhs: Shaped[Array, "..."]
) -> Shaped[Array, "..."]:
    """One einsum, left in the accumulation dtype: rounding is the business of whoever ends the sum."""
    accum = accumulation_dtype(lhs, rhs)
    if compat.target_platform() == "cpu":
        # XLA's CPU backend refuses some products of bfloat16 with a float32 result ("ab,acd->bcd") when they run.
        # Widened operands give the same numbers, for products of bfloat16 values are exact in float32.
        lhs, rhs = lhs.astype(accum), rhs.astype(accum)
    return jnp.einsum(problem.spec(term), lhs, rhs, preferred_element_type=accum)


def multiply_all(problem: Problem, result: int, operands: Sequence[Array]) -> Shaped[Array, "..."]:
    """A result from whole operands: the sum of its terms."""
    products = [multiply(problem, t, operands[t.lhs], operands[t.rhs]) for t in problem.terms if t.out == result]
    return sum(products[1:], start=products[0])


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
    """
    if buffer is None:
        buffer = compat.vary(jnp.zeros(shape, piece.dtype), compat.varying_axes(piece))
    return lax.dynamic_update_slice_in_dim(buffer, piece, start, axis=dim)


def place_all(
    buffers: tuple[Array, ...] | None, parts: tuple[Array, ...], shape: Sequence[int], dim: int, start: Start
) -> tuple[Array, ...]:
    """`place` for each of the arrays that leave the op (one, or two where the pre-activation is kept)."""
    olds = buffers if buffers is not None else (None,) * len(parts)
    return tuple(place(old, part, shape, dim, start) for old, part in zip(olds, parts, strict=True))
