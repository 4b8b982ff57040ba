"""Finds products of gathered arrays and products that are scattered, each a collective einsum in waiting."""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from overlapfx.ops import rewrite_dims as rd
from overlapfx.ops.rewrite_dims import Atom, Unsafe
from overlapfx.ops.rewrite_forms import Form, Forms, Shard, untouched
from overlapfx.ops.rewrite_graph import GATHERS, SHAPING, Graph, Op, Value
from overlapfx.plan.pattern import LabelAxes

SHAPED = SHAPING | {"convert_element_type", "copy"}
_FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Site:
    """One product as a collective einsum: `spec` over the shards of its operands gives `value`, but for a reshape.

    `shared` is the place (0 or 1) of the operand written first in `spec`. `gathers`: the gathers that each operand
    absorbs.
    """

    dot: Op
    value: Value
    shared: int
    spec: str
    shards: tuple[Shard, Shard]
    sizes: Mapping[str, int]  # of each label, whole
    gather: tuple[LabelAxes, LabelAxes]
    scatter: LabelAxes
    gathers: tuple[frozenset[Op], frozenset[Op]]
    inside: tuple[Op, ...]  # the product with all up to its last scatter

    @property
    def out_dtype(self) -> Any:
        """dtype of the result."""
        return self.value.aval.dtype

    @property
    def labels(self) -> tuple[str, str, str]:
        """Of the operand written first, of the other one, of the result."""
        inputs, out = self.spec.split("->")
        first, second = inputs.split(",")
        return first, second, out


def refusal(op: Op, sizes: Mapping[str, int]) -> str:
    """Why a collective cannot be part of a collective einsum, whatever surrounds it; "" if it can.

    sizes: of the mesh axes over which shard_map maps here.
    """
    axes = op.params["axis_name"]
    names = axes if isinstance(axes, tuple) else (axes,)
    if op.params.get("axis_index_groups") is not None:
        return "it has axis_index_groups, and a collective einsum speaks of whole mesh axes"
    if any(axis not in sizes for axis in names):
        return f"axis {'*'.join(map(str, names))} is not one that shard_map maps over here"
    if op.params["axis_size"] == 1:
        return "the axis has size 1: there is nothing to communicate"
    path = op.source.replace("\\", "/").split(":")[0]
    if path.endswith("overlapfx/ops/ring.py"):
        return "it is part of a collective einsum already"
    return ""


def product_refusal(dot: Op, precision: Any) -> str:
    """Why a product must stay as it is; "" if it may be computed in pieces. precision: that of a product traced now."""
    lhs, rhs = (value.aval.dtype for value in dot.inputs)
    if lhs != rhs:
        return f"the product is of {lhs} and {rhs}"
    if lhs.name not in _FLOATS:
        return f"the product is of {lhs}, and sums of pieces are exact or float32 for real floats only"
    out = dot.outputs[0].aval.dtype
    if jnp.promote_types(out, lhs) not in (out, lhs):
        return f"the product of {lhs} is wanted as {out}"
    if dot.params["precision"] != precision:
        return (
            f"the product asks for precision {dot.params['precision']}, a collective einsum's products for {precision}"
        )
    sharding = dot.params.get("out_sharding")
    if sharding is not None and any(part is not None for part in sharding.spec):
        return "the product names the sharding of its result"
    return ""


def default_precision() -> Any:
    """The precision that a product traced now gets."""
    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return jax.make_jaxpr(jnp.dot)(one, one).eqns[0].params["precision"]


def products(graph: Graph) -> list[Op]:
    """Every product of the graph."""
    return [op for op in graph.ops if op.name == "dot_general"]


def match(dot: Op, forms: Forms, kept: Mapping[Op, str], shared: int, scattered: bool = True) -> Site | None:
    """The collective einsum that a product is part of, None without collectives.

    kept: collectives that stay where they are. scattered: whether its result may be scattered. Raises Unsafe.
    """
    operands = [forms.get(value) or untouched(value) for value in dot.inputs]
    labels = [rd.atoms(form.dims, i) for i, form in enumerate(operands)]
    out = multiply(dot, labels)
    chain: list[Op] = []
    if scattered:
        out, chain = to_scatter(dot.outputs[0], out, kept)
    if not (chain or operands[0].gathers or operands[1].gathers):
        return None
    return _site((dot, *chain), shared, operands, [flat(groups) for groups in labels], flat(out))


def flat(groups: list[list[Atom]]) -> list[Atom]:
    """The labels of all dimensions."""
    return [atom for group in groups for atom in rd.leaves(group)]


def multiply(dot: Op, labels: list[list[list[Atom]]]) -> list[list[Atom]]:
    """Unifies what the product pairs; returns the dimensions of its result."""
    (contract, batch) = dot.params["dimension_numbers"]
    for i, j in [*zip(*contract, strict=True), *zip(*batch, strict=True)]:
        rd.unify(labels[0][i], labels[1][j])
    out = [labels[0][i] for i in batch[0]]
    for operand in (0, 1):
        used = {*contract[operand], *batch[operand]}
        out += [group for i, group in enumerate(labels[operand]) if i not in used]
    return out


def only_user(value: Value) -> Op | None:
    """The one operation that uses a value, if it is the only use."""
    return value.users[0] if len(value.users) == 1 and not value.leaves else None


def to_scatter(value: Value, out: list[list[Atom]], kept: Mapping[Op, str]) -> tuple[list[list[Atom]], list[Op]]:
    """Follows a result to its last scatter: the dimensions there with the operations up to it, [] if none follows.

    Raises Unsafe where the first scatter cannot be followed to.
    """
    chain: list[Op] = []
    end = 0
    op = only_user(value)
    while op is not None and (op.name in SHAPED or op.name == "reduce_scatter") and op not in kept:
        chain.append(op)
        if op.name == "reduce_scatter":
            end = len(chain)
        op = only_user(op.outputs[0])
    reached = (out, 0)
    hidden: list[Atom] = []
    for i, op in enumerate(chain[:end], 1):
        try:
            out = pass_on(op, out, hidden)
        except Unsafe:
            if not reached[1]:
                raise
            break
        if op.name == "reduce_scatter":
            reached = ([*out, list(hidden)], i)
    return reached[0], chain[: reached[1]]


def pass_on(op: Op, out: list[list[Atom]], hidden: list[Atom] | None = None) -> list[list[Atom]]:
    """The dimensions of a result after one more operation; untiled scatters move theirs to `hidden`. Raises Unsafe."""
    if op.name == "transpose":
        return [out[d] for d in op.params["permutation"]]
    if op.name in SHAPING:
        shape = op.outputs[0].shape
        if math.prod(shape) != math.prod(op.inputs[0].shape):
            raise Unsafe("the product is broadcast before it is scattered")
        if op.name == "broadcast_in_dim" and any(a.scattered[0] for g in out for a in rd.leaves(g)):
            raise Unsafe("the product is broadcast between two scatters")
        leaves = [atom for group in out for atom in rd.leaves(group)]
        if any(atom.scattered[0] for atom in leaves):
            raise Unsafe("the product is reshaped between two scatters")
        return [list(group) for group in rd.regroup(leaves, shape)]
    if op.name != "reduce_scatter":
        return out
    assert hidden is not None
    axes, parts, dim = tuple(op.params["axis_name"]), op.params["axis_size"], op.params["scatter_dimension"]
    rd.scatter(out[dim], axes, parts)
    if op.params["tiled"]:
        return out
    if len(rd.leaves(out[dim])) > 1:
        raise Unsafe(f"the scattered dimension is a reshape of several, over {parts} devices")
    hidden.extend(out[dim])  # one place is left of it
    return [*out[:dim], *out[dim + 1 :]]


def _site(inside: tuple[Op, ...], shared: int, operands: list[Form], labels: list[list[Atom]], out: list[Atom]) -> Site:
    order = (shared, 1 - shared)
    letter = letters([*labels[order[0]], *labels[order[1]]])
    text = [text_of(letter, part) for part in (labels[order[0]], labels[order[1]], out)]
    gather = tuple(named(letter, labels[i], i) for i in order)
    shards = tuple(fit(operands[i].shard, labels[i], i) for i in order)
    return Site(
        dot=inside[0],
        value=inside[-1].outputs[0],
        shared=shared,
        spec=f"{text[0]},{text[1]}->{text[2]}",
        shards=(shards[0], shards[1]),
        sizes={c: a.size for a, c in letter.items()},
        gather=(gather[0], gather[1]),
        scatter=tuple((letter[a], a.scattered[0]) for a in out if a.scattered[0]),
        gathers=(operands[order[0]].gathers, operands[order[1]].gathers),
        inside=inside,
    )


def letters(labels: list[Atom]) -> dict[Atom, str]:
    """A letter for every label, in this order. Raises Unsafe."""
    named = list(dict.fromkeys(labels))
    if len(named) > len(string.ascii_letters):
        raise Unsafe(f"the product has {len(named)} dimensions")
    return dict(zip(named, string.ascii_letters, strict=False))


def text_of(letter: Mapping[Atom, str], labels: list[Atom]) -> str:
    """Labels as an einsum writes them."""
    return "".join(letter[a] for a in labels)


def named(letter: Mapping[Atom, str], labels: list[Atom], operand: int) -> LabelAxes:
    """The gathers of an operand, by number."""
    return tuple((letter[a], a.gathered[operand][0]) for a in labels if operand in a.gathered)


def transposed(shard: Shard, labels: str, wanted: str) -> Shard:
    """The shard with its dimensions in another order."""
    if labels == wanted:
        return shard
    order = [labels.index(c) for c in wanted]
    return Shard(tuple(shard.shape[i] for i in order), shard.reads, lambda get: lax.transpose(get(shard), order))


def fit(shard: Shard, labels: list[Atom], operand: int) -> Shard:
    """The shard with one dimension per label."""
    shape = tuple(a.size // (a.gathered[operand][1] if operand in a.gathered else 1) for a in labels)
    if shape == shard.shape:
        return shard

    def build(get: Any) -> Array:
        return lax.reshape(get(shard), shape)

    return Shard(shape, shard.reads, build)


def gather_users(gather: Op, forms: Forms) -> list[tuple[Value, Op | None]]:
    """Where a gathered array ends up: (array, the operation that cannot take a shard of it, None for a result)."""
    ends: list[tuple[Value, Op | None]] = []
    queue, seen = [gather.outputs[0]], set()
    while queue:
        value = queue.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.leaves:
            ends.append((value, None))
        for op in value.users:
            form = forms.get(op.outputs[0]) if op.outputs else None
            if form is not None and gather in form.gathers:
                queue.append(op.outputs[0])
            else:
                ends.append((value, op))
    return ends


def is_collective(op: Op) -> bool:
    """Whether this is half of a pattern: an AllGather or a ReduceScatter."""
    return op.name in GATHERS or op.name == "reduce_scatter"
