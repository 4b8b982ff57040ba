"""Gathers moved past what follows: which arrays are gathered ones, what each device does to its shard instead."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jax import lax
from jaxtyping import Array

from overlapfx import compat
from overlapfx.ops import rewrite_dims as rd
from overlapfx.ops.rewrite_dims import Dims, Factor, Unsafe
from overlapfx.ops.rewrite_graph import ELEMENTWISE, GATHERS, VARYING, Graph, Op, Value

# Looks up the array of a value, or makes that of a shard once.
Get = Callable[[Any], Array]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Shard:
    """How a device's own part of a gathered array is made without the gather; `reads` is what it needs of the graph."""

    shape: tuple[int, ...]
    reads: frozenset[Value]
    build: Callable[[Get], Array]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Form:
    """An array that equals its shards, concatenated along gathered factors and reshaped to its own dimensions.

    `gathers`: the operations that are not needed if all users take the shard.
    """

    dims: Dims
    shard: Shard
    gathers: frozenset[Op] = frozenset()


Forms = Mapping[Value, Form]


def untouched(value: Value) -> Form:
    """The form of an array that nothing gathers."""
    return Form(rd.plain(value.shape), Shard(value.shape, frozenset({value}), lambda get: get(value)))


def find_forms(graph: Graph, kept: frozenset[Op]) -> dict[Value, Form]:
    """The form of every gathered array, and of what elementwise and shaping operations make of it.

    kept: gathers that stay where they are.
    """
    forms: dict[Value, Form] = {}
    for op in graph.ops:
        form = _follow(op, forms) if op not in kept else None
        if form is not None:
            forms[op.outputs[0]] = form
    return forms


def _follow(op: Op, forms: Forms) -> Form | None:
    try:
        if op.name in GATHERS:
            return _gather(op, forms.get(op.inputs[0]) or untouched(op.inputs[0]))
        if not any(v in forms for v in op.inputs):
            return None
        if op.name in ELEMENTWISE:
            return _elementwise(op, forms)
        rule = _RULES.get(op.name)
        return rule(op, forms[op.inputs[0]]) if rule and op.inputs[0] in forms else None
    except Unsafe:
        return None


def _gather(op: Op, form: Form) -> Form:
    params = op.params
    axes, parts, dim = tuple(params["axis_name"]), params["axis_size"], params["all_gather_dimension"]
    dims, shard = form.dims, form.shard
    if params["tiled"] and dims[dim]:
        major, *rest = dims[dim]
        first = Factor(major.size * parts, axes + major.axes, parts * major.parts)
        dims = (*dims[:dim], (first, *rest), *dims[dim + 1 :])
    else:
        # A new dimension, of which each device has one place.
        skip = 1 if params["tiled"] else 0
        dims = (*dims[:dim], (Factor(parts, axes, parts),), *dims[dim + skip :])
        shard = _reshaped(shard, rd.local_shape(dims))
    return Form(dims, shard, form.gathers | {op})


def _reshaped(shard: Shard, shape: tuple[int, ...]) -> Shard:
    if shard.shape == shape:
        return shard
    return Shard(shape, shard.reads, lambda get: lax.reshape(get(shard), shape))


def _elementwise(op: Op, forms: Forms) -> Form | None:
    main = next(forms[v] for v in op.inputs if v in forms)
    parts, gathers = [], main.gathers
    for value in op.inputs:
        form = forms.get(value)
        if form is not None and form.dims != main.dims:
            return None
        shard = form.shard if form is not None else _along(value, main.dims)
        if shard is None:
            return None
        parts.append(shard)
        gathers |= form.gathers if form is not None else frozenset()
    reads = frozenset().union(*(part.reads for part in parts))
    return Form(main.dims, Shard(main.shard.shape, reads, _applied(op, parts)), gathers)


def _applied(op: Op, parts: list[Shard]) -> Callable[[Get], Array]:
    def build(get: Get) -> Array:
        arrays = [get(part) for part in parts]
        axes = frozenset().union(*(compat.varying_axes(x) for x in arrays))
        return op.eqn.primitive.bind(*(compat.vary(x, axes) for x in arrays), **op.params)

    return build


def _along(value: Value, dims: Dims) -> Shard | None:
    """The part of a value that goes with a shard of `dims`: only if it is the same all along what is gathered."""
    if value.shape == ():
        return untouched(value).shard
    op = value.producer
    if op is None or op.name not in ELEMENTWISE | VARYING | {"broadcast_in_dim"}:
        return None
    if op.name in VARYING:
        part = _along(op.inputs[0], dims)
        return part and _varied(op, part)
    if op.name != "broadcast_in_dim":
        parts = [_along(v, dims) for v in op.inputs]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or all(v.shape == () for v in op.inputs):
            return None
        reads = frozenset().union(*(part.reads for part in known))
        return Shard(rd.local_shape(dims), reads, _applied(op, known))
    small, where = op.inputs[0], op.params["broadcast_dimensions"]
    kept = {d: size for d, size in zip(where, small.shape, strict=True) if size != 1}
    if any(f.axes for d in kept for f in dims[d]):
        return None
    spread = [p for d in kept for p in rd.positions(dims)[d]]
    shape, target = tuple(f.size for d in kept for f in dims[d]), rd.local_shape(dims)
    return Shard(
        target,
        frozenset({small}),
        lambda get: lax.broadcast_in_dim(lax.reshape(get(small), shape), target, spread),
    )


def _varying(op: Op, form: Form) -> Form:
    return Form(form.dims, _varied(op, form.shard), form.gathers)


def _varied(op: Op, shard: Shard) -> Shard:
    axes = op.outputs[0].varying
    return Shard(shard.shape, shard.reads, lambda get: compat.vary(get(shard), axes))


def _transpose(op: Op, form: Form) -> Form:
    order, shard = op.params["permutation"], form.shard
    dims = tuple(form.dims[d] for d in order)
    fine = [p for d in order for p in rd.positions(form.dims)[d]]
    moved = Shard(rd.local_shape(dims), shard.reads, lambda get: lax.transpose(get(shard), fine))
    return Form(dims, moved, form.gathers)


def _reshape(op: Op, form: Form) -> Form:
    dims = tuple(rd.regroup([f for group in form.dims for f in group], op.outputs[0].shape))
    return Form(dims, _reshaped(form.shard, rd.local_shape(dims)), form.gathers)


def _broadcast(op: Op, form: Form) -> Form:
    """Adds dimensions; those of size 1 may grow."""
    out, where = op.outputs[0].shape, op.params["broadcast_dimensions"]
    source = dict(zip(where, range(len(where)), strict=True))
    grows = {d: math.prod(f.size for f in form.dims[i]) != out[d] for d, i in source.items()}
    dims = tuple(
        form.dims[source[d]] if d in source and not grows[d] else (Factor(size),) for d, size in enumerate(out)
    )
    kept = [d for d in source if not grows[d]]
    small = tuple(f.local for d in kept for f in form.dims[source[d]])
    fine = [p for d in kept for p in rd.positions(dims)[d]]
    shard, target = _reshaped(form.shard, small), rd.local_shape(dims)
    return Form(
        dims, Shard(target, shard.reads, lambda get: lax.broadcast_in_dim(get(shard), target, fine)), form.gathers
    )


_RULES = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _reshape,
    "broadcast_in_dim": _broadcast,
    **dict.fromkeys(VARYING, _varying),
}
