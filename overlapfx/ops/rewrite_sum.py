"""Finds scattered sums of products, which a shared gather leaves in the backward pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from overlapfx.ops import rewrite_dims as rd
from overlapfx.ops import rewrite_match as match
from overlapfx.ops.rewrite_dims import Atom, Unsafe
from overlapfx.ops.rewrite_forms import Form, Forms, Shard, untouched
from overlapfx.ops.rewrite_graph import Op, Value
from overlapfx.plan.pattern import LabelAxes


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sum:
    """A scattered sum of products, the dual of several products that share a gather.

    `spec` names what is scattered, then in each product the weight and the cotangent, whose shards are `shards`;
    `shape` is that of the scattered sum, one dimension per label. `scatter` speaks of the sum, `gather` of weights and
    cotangents, `gathers` of each.
    """

    dots: tuple[Op, ...]
    value: Value
    spec: str
    shape: tuple[int, ...]
    shards: tuple[tuple[Shard, Shard], ...]
    scatter: LabelAxes
    gather: tuple[LabelAxes, LabelAxes]
    gathers: tuple[tuple[frozenset[Op], frozenset[Op]], ...]
    inside: tuple[Op, ...]


def match_sum(scatter: Op, forms: Forms, kept: Mapping[Op, str]) -> Sum | None:
    """The sum of several products that ends in this scatter, None if what is scattered is not such a sum.

    Raises Unsafe.
    """
    total, _ = _unshaped(scatter.inputs[0])
    terms: list[list[Op]] = []  # each product with what shapes it
    adds: list[Op] = []
    if not _addends(total, terms, adds) or len(terms) < 2:
        return None
    labels, outs, operands = [], [], []
    for t, (dot, *shaping) in enumerate(terms):
        forms_here = [forms.get(value) or untouched(value) for value in dot.inputs]
        labels.append([rd.atoms(form.dims, 2 * t + i) for i, form in enumerate(forms_here)])
        out = match.multiply(dot, labels[-1])
        for op in shaping:
            out = match.pass_on(op, out)
        outs.append(out)
        operands.append(forms_here)
    for out in outs[1:]:
        for ours, theirs in zip(outs[0], out, strict=True):
            rd.unify(ours, theirs)
    out, chain = match.to_scatter(total, outs[0], kept)
    if not chain:
        return None
    labelled = [[match.flat(groups) for groups in pair] for pair in labels]
    ops = tuple(dict.fromkeys([*(op for term in terms for op in term), *adds, *chain]))
    return _sum(tuple(term[0] for term in terms), ops, operands, labelled, match.flat(out))


def _unshaped(value: Value) -> tuple[Value, list[Op]]:
    """What a value is but for its shape and dtype, if nothing else uses that; the operations between."""
    shaping: list[Op] = []
    while match.only_user(value) is not None and value.producer is not None and value.producer.name in match.SHAPED:
        shaping.insert(0, value.producer)
        value = value.producer.inputs[0]
    return value, shaping


def _addends(total: Value, terms: list[list[Op]], adds: list[Op]) -> bool:
    """Collects the products that a value is the sum of; whether it is one of products only, none used elsewhere."""
    op = total.producer
    if op is None or op.name not in ("add", "add_any") or match.only_user(total) is None:
        return False
    adds.append(op)
    for addend in op.inputs:
        root, shaping = _unshaped(addend)
        if root.producer is not None and root.producer.name == "dot_general" and match.only_user(root) is not None:
            terms.append([root.producer, *shaping])
        elif shaping or not _addends(root, terms, adds):
            return False
    return True


def _sum(
    dots: tuple[Op, ...],
    inside: tuple[Op, ...],
    operands: list[list[Form]],
    labels: list[list[list[Atom]]],
    out: list[Atom],
) -> Sum:
    """Writes the terms alike: in each, one operand is the weight of the dual product, the other its cotangent."""
    if len({dot.inputs[0].aval.dtype for dot in dots}) > 1:
        raise Unsafe("the products that it sums have different dtypes")
    first = _written(operands[0], labels[0], 0, 1, out)
    terms = [first]
    for t in range(1, len(dots)):
        ways = [_written(operands[t], labels[t], 2 * t, weight, out) for weight in (1, 0)]
        alike = [way for way in ways if way.alike() == first.alike()]
        if not alike:
            raise Unsafe("the products that it sums are not alike")
        terms.append(alike[0])
    letter = match.letters(out)
    return Sum(
        dots=dots,
        value=inside[-1].outputs[0],
        spec=f"{match.text_of(letter, out)},{first.text[0]}->{first.text[1]}",
        shape=tuple(a.size // a.scattered[1] for a in out),
        shards=tuple(
            (
                match.transposed(term.shards[0], term.text[0], first.text[0]),
                match.transposed(term.shards[1], term.text[1], first.text[1]),
            )
            for term in terms
        ),
        scatter=tuple((letter[a], a.scattered[0]) for a in out if a.scattered[0]),
        gather=first.gather,
        gathers=tuple(term.gathers for term in terms),
        inside=inside,
    )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Term:
    """One product of a sum: labels, shards and gathers of its weight, then of its cotangent."""

    text: tuple[str, str]
    shards: tuple[Shard, Shard]
    gather: tuple[LabelAxes, LabelAxes]
    gathers: tuple[frozenset[Op], frozenset[Op]]

    def alike(self) -> object:
        """Equal for products that differ by the order of their dimensions at most."""
        return [sorted(part) for part in (*self.text, *self.gather)]


def _written(forms: list[Form], labels: list[list[Atom]], number: int, weight: int, out: list[Atom]) -> _Term:
    """The product whose operands have the numbers `number` and `number + 1`, of which one is the weight."""
    order = (weight, 1 - weight)
    letter = match.letters([*out, *labels[weight], *labels[1 - weight]])
    text, shards, gather = [], [], []
    for i in order:
        text.append(match.text_of(letter, labels[i]))
        shards.append(match.fit(forms[i].shard, labels[i], number + i))
        gather.append(match.named(letter, labels[i], number + i))
    return _Term(
        (text[0], text[1]),
        (shards[0], shards[1]),
        (gather[0], gather[1]),
        (forms[weight].gathers, forms[1 - weight].gathers),
    )
