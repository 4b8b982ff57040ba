"""The collective einsums that stand for products: several at once, or the gradients of one that was never written."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.ops.collective_einsum import collective_einsum_multi
from overlapfx.ops.rewrite_forms import Get, Shard
from overlapfx.ops.rewrite_graph import Op, Value
from overlapfx.ops.rewrite_match import Site
from overlapfx.ops.rewrite_sum import Sum
from overlapfx.plan.decide import CallSite, Slot, record_sites
from overlapfx.plan.pattern import LabelAxes

# run(get, name, overlap) -> one array per value of a recipe
Run = Callable[[Get, str, Overlap], list[Array]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Recipe:
    """One call instead of several operations.

    `dots` become `values`, made from `shards`; `inside` are the operations from products to values. `gathers[i]`: what
    operand i of the planned problem absorbs. `key` is equal for equal recipes. `dual`: only the backward pass of the
    call runs.
    """

    dots: tuple[Op, ...]
    values: tuple[Value, ...]
    shards: tuple[Shard, ...]
    inside: frozenset[Op]
    gathers: tuple[frozenset[Op], ...]
    key: Any
    dual: bool
    run: Run

    @property
    def absorbed(self) -> frozenset[Op]:
        """Every collective that it replaces."""
        scatters = frozenset(op for op in self.inside if op.name == "reduce_scatter")
        return scatters.union(*self.gathers)

    def decomposes(self, slot: Slot | None, gather: Op) -> bool:
        """Whether the collective that the gate chose is (part of) this gather."""
        if slot is None or slot.kind != "gather" or gather not in self.gathers[slot.index]:
            return False
        return set(gather.params["axis_name"]) <= set(slot.axes)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Call:
    """A recipe that the gate accepted, traced: `jaxpr` maps `reads` to its values."""

    recipe: Recipe
    reads: tuple[Value, ...]
    jaxpr: Any
    decision: CallSite


Node: TypeAlias = Op | Call


def several(sites: tuple[Site, ...]) -> Recipe:
    """Products that share their first operand and its gather, or just one product."""
    first = sites[0]

    def run(get: Get, name: str, overlap: Overlap) -> list[Array]:
        return collective_einsum_multi(
            first.spec,
            get(first.shards[0]),
            [get(site.shards[1]) for site in sites],
            lhs_gather=dict(first.gather[0]),
            rhs_gather=dict(first.gather[1]),
            out_scatter=dict(first.scatter),
            overlap=overlap,
            name=name,
            out_dtype=first.out_dtype,
        )

    return Recipe(
        dots=tuple(site.dot for site in sites),
        values=tuple(site.value for site in sites),
        shards=(first.shards[0], *(site.shards[1] for site in sites)),
        inside=frozenset(op for site in sites for op in site.inside),
        gathers=(first.gathers[0], *(site.gathers[1] for site in sites)),
        key=tuple((site.dot, site.shared, site.spec, site.gathers, site.inside) for site in sites),
        dual=False,
        run=run,
    )


def both(one: Site, other: Site) -> Recipe | None:
    """Two products that share their first operand and are the two gradients of a third one; None if they are not.

    With G = dY gathered, one = G.R and other = G.L are dL and dR of Y = L.R, whose result is scattered where G is
    gathered.
    """
    (g, r, dl), (g_too, left, dr) = one.labels, other.labels
    free = [c for c in left if c not in g], [c for c in r if c not in g]
    if one.shards[0].shape != other.shards[0].shape or g != g_too or len(free[0]) != len(free[1]):
        return None
    rename = str.maketrans(dict(zip(*free, strict=True)))
    left, dr = left.translate(rename), dr.translate(rename)
    dtype = one.dot.inputs[0].aval.dtype
    alike = sorted(dl) == sorted(left) and sorted(dr) == sorted(r) and _are_duals(one, other, rename)
    if not alike:
        return None

    def run(get: Get, name: str, overlap: Overlap) -> list[Array]:
        dy, right, lhs = (get(shard) for shard in (one.shards[0], one.shards[1], other.shards[1]))
        operands = _vary_alike(
            [lhs.astype(one.out_dtype), right.astype(other.out_dtype)],
            [dy],
            (*one.gather[0], *one.gather[1], *one.scatter),
        )

        def product(lhs: Array, rhs: Array) -> list[Array]:
            return collective_einsum_multi(
                f"{left},{r}->{g}",
                lhs,
                [rhs],
                lhs_gather=dict(one.scatter),
                rhs_gather=dict(one.gather[1]),
                out_scatter=dict(one.gather[0]),
                overlap=overlap,
                name=name,
                compute_dtype=dtype,
            )

        dlhs, drhs = _pullback(product, operands, [dy.astype(dtype)])
        return [_transposed(dlhs, left, dl), _transposed(drhs, r, dr)]

    return Recipe(
        dots=(one.dot, other.dot),
        values=(one.value, other.value),
        shards=(*one.shards, other.shards[1]),
        inside=frozenset((*one.inside, *other.inside)),
        gathers=(one.gathers[0], other.gathers[1], one.gathers[1]),
        key=("both", one.inside, one.shared, other.inside, other.shared, one.gathers, other.gathers),
        dual=True,
        run=run,
    )


def _are_duals(one: Site, other: Site, rename: Mapping[int, Any]) -> bool:
    """Whether sizes, dtypes and collectives of two gradients fit; rename: labels of `other` to those of `one`."""
    left_gather, right_scatter = (
        {c.translate(rename): axes for c, axes in part} for part in (other.gather[1], other.scatter)
    )
    dtype = one.dot.inputs[0].aval.dtype
    return (
        one.gather[0] == other.gather[0]
        and dict(one.scatter) == left_gather
        and dict(one.gather[1]) == right_scatter
        and all(jnp.promote_types(site.out_dtype, dtype) == site.out_dtype for site in (one, other))
        and one.sizes == {c.translate(rename): size for c, size in other.sizes.items()}
    )


def summed(found: Sum) -> Recipe:
    """A scattered sum of products: the gradient of the operand that several products would share."""
    dtype = found.dots[0].inputs[0].aval.dtype

    def run(get: Get, name: str, overlap: Overlap) -> list[Array]:
        weights = [get(weight) for weight, _ in found.shards]
        cotangents = [get(cotangent) for _, cotangent in found.shards]
        lhs = jnp.zeros(found.shape, found.value.aval.dtype)
        (lhs, *weights) = _vary_alike([lhs, *weights], cotangents, (*found.scatter, *found.gather[0], *found.gather[1]))

        def products(lhs: Array) -> list[Array]:
            return collective_einsum_multi(
                found.spec,
                lhs,
                weights,
                lhs_gather=dict(found.scatter),
                rhs_gather=dict(found.gather[0]),
                out_scatter=dict(found.gather[1]),
                overlap=overlap,
                name=name,
                compute_dtype=dtype,
            )

        return _pullback(products, [lhs], cotangents)

    gathers = (*(cotangent for _, cotangent in found.gathers), *(weight for weight, _ in found.gathers))
    return Recipe(
        dots=found.dots,
        values=(found.value,),
        shards=tuple(shard for pair in found.shards for shard in pair),
        inside=frozenset(found.inside),
        gathers=gathers,
        key=("sum", found.inside, found.spec, found.gathers),
        dual=True,
        run=run,
    )


def _transposed(x: Array, labels: str, wanted: str) -> Array:
    return x if labels == wanted else lax.transpose(x, [labels.index(c) for c in wanted])


def _vary_alike(arrays: list[Array], others: list[Array], collectives: LabelAxes) -> list[Array]:
    """Types arrays as varying wherever any of them or of the others does, so that their gradients need no sums."""
    named = (frozenset(axes) for _, axes in collectives)
    everywhere = frozenset().union(*named, *(compat.varying_axes(x) for x in [*arrays, *others]))
    return [compat.vary(x, everywhere) for x in arrays]


def _pullback(product: Callable[..., list[Array]], operands: list[Array], cotangents: list[Array]) -> list[Array]:
    """The gradients of `product`, which itself is traced but does not stay."""

    def gradients(operands: list[Array], cotangents: list[Array]) -> Any:
        outs, pullback = jax.vjp(product, *operands)
        return pullback([compat.vary(ct, compat.varying_axes(y)) for ct, y in zip(cotangents, outs, strict=True)])

    return list(gradients(operands, cotangents))


def trace(recipe: Recipe, overlap: Overlap) -> Call | str:
    """The call, or why it must not be."""
    reads = tuple(dict.fromkeys(v for shard in recipe.shards for v in sorted(shard.reads, key=id)))
    name = site_name(recipe.dots[0])

    def run(*arrays: Array) -> list[Array]:
        made: dict[Any, Array] = dict(zip(reads, arrays, strict=True))

        def get(wanted: Any) -> Array:
            if wanted not in made:
                made[wanted] = wanted.build(get)
            return made[wanted]

        outs = recipe.run(get, name, overlap)
        return [
            compat.vary(lax.reshape(out, value.shape), value.varying)
            for value, out in zip(recipe.values, outs, strict=True)
        ]

    try:
        with record_sites() as decisions:
            jaxpr = jax.make_jaxpr(run)(*(value.aval for value in reads))
    except ValueError as error:
        return str(error).rstrip(".")
    decision = next(site for site in decisions if recipe.dual == (site.name != name))
    if decision.plan.slot is None:
        return f"the gate leaves it blocking ({decision.plan.reason})"
    for value, aval in zip(recipe.values, jaxpr.out_avals, strict=True):
        extra = frozenset(aval.manual_axis_type.varying) - value.varying
        if extra:
            return f"its result is known to be the same along {'*'.join(sorted(extra))}, which pieces cannot show"
        assert (aval.shape, aval.dtype) == (value.shape, value.aval.dtype), (recipe.key, aval, value.aval)
    return Call(recipe, reads, jaxpr, decision)


def site_name(dot: Op) -> str:
    """A name for reports and per-site settings: the function and the line of the product."""
    place, _, function = dot.source.partition(" (")
    path, _, line = place.rpartition(":")
    function = function.rstrip(")")
    return f"{pathlib.PurePath(path).stem if function.startswith('<') or not function else function}:{line}"
