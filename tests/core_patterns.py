"""The communication patterns of the core suite, as cases over meshes of any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from core_harness import Case

RING_SIZES = (1, 2, 3, 5, 6, 7, 8)
# "even": every cut comes out even. "odd": shards of 3 have uneven halves, 5 rows make uneven stripes.
SHARDS = {"even": (2, 4), "odd": (3, 5)}


def _gather(name: str, operand: str, spec: str, label: str, kept: str) -> Callable[[int, int, int], Case]:
    """A gather of one operand's label over x, while the other operand's label `kept` stays sharded over x."""

    def make(n: int, shard: int, other: int) -> Case:
        sizes: dict[str, int] = {c: other for c in spec if c.isalpha()}
        sizes |= {label: n * shard, kept: n * 2}
        moving: dict[str, Any] = {label: "x"}
        staying: dict[str, Any] = {kept: "x"}
        lhs, rhs = (moving, staying) if operand == "lhs" else (staying, moving)
        gather = {f"{operand}_gather": moving}
        return Case(name, spec, sizes, {"x": n}, lhs=lhs, rhs=rhs, out=staying, **gather)

    return make


def _scatter(name: str, spec: str, label: str, summed: str) -> Callable[[int, int, int], Case]:
    """A sum over x, since the contracted label `summed` is sharded over x, scattered along a label of the result."""

    def make(n: int, shard: int, other: int) -> Case:
        sizes: dict[str, int] = {c: other for c in spec if c.isalpha()}
        sizes |= {label: n * shard, summed: n * 2}
        partial: dict[str, Any] = {summed: "x"}
        here: dict[str, Any] = {label: "x"}
        return Case(name, spec, sizes, {"x": n}, lhs=partial, rhs=partial, out=here, out_scatter=here)

    return make


# Patterns over one axis: (ring size, shard size of the communicated label, size of the other labels) -> case.
ONE_AXIS = {
    "gather_lhs_free": _gather("gather_lhs_free", "lhs", "tab,bc->tac", "a", "c"),
    "gather_lhs_contracting": _gather("gather_lhs_contracting", "lhs", "tab,bc->tac", "b", "c"),
    "gather_lhs_batch": _gather("gather_lhs_batch", "lhs", "gab,gbc->gac", "g", "c"),
    "gather_rhs_free": _gather("gather_rhs_free", "rhs", "ab,bcd->acd", "c", "a"),
    "gather_rhs_contracting": _gather("gather_rhs_contracting", "rhs", "ab,bcd->acd", "b", "a"),
    "gather_rhs_batch": _gather("gather_rhs_batch", "rhs", "gab,gbc->gac", "g", "a"),
    "scatter_lhs_free": _scatter("scatter_lhs_free", "tab,bc->tac", "a", "b"),
    "scatter_rhs_free": _scatter("scatter_rhs_free", "ab,bcd->acd", "c", "b"),
    "scatter_batch": _scatter("scatter_batch", "gab,gbc->gac", "g", "b"),
}


def mlp_up(y: int, x: int, shard: int, other: int) -> Case:
    """Both operands gathered, along the same contracted label, over different axes."""
    return Case(
        "mlp_up",
        "btd,df->btf",
        {"b": y, "t": other, "d": shard * x * y, "f": 2 * x},
        {"y": y, "x": x},
        lhs={"b": "y", "d": "x"},
        rhs={"d": "y", "f": "x"},
        out={"b": "y", "f": "x"},
        lhs_gather={"d": "x"},
        rhs_gather={"d": "y"},
    )


def mlp_down(y: int, x: int, shard: int, other: int) -> Case:
    """A gather of the right operand over y and a scatter of the result over x, along the same label."""
    return Case(
        "mlp_down",
        "btf,fd->btd",
        {"b": y, "t": other, "d": shard * x * y, "f": 2 * x},
        {"y": y, "x": x},
        lhs={"b": "y", "f": "x"},
        rhs={"f": "x", "d": "y"},
        out={"b": "y", "d": "x"},
        rhs_gather={"d": "y"},
        out_scatter={"d": "x"},
    )


def query_key_value(y: int, x: int, shard: int, other: int) -> Case:
    """Three weights with different head counts share the gather of the activation."""
    return Case(
        "query_key_value",
        "btd,dnh->btnh",
        {"b": y, "t": other, "d": shard * x * y, "n": 4 * x, "h": 2},
        {"y": y, "x": x},
        lhs={"b": "y", "d": "x"},
        rhs={"d": "y", "n": "x"},
        out={"b": "y", "n": "x"},
        lhs_gather={"d": "x"},
        rhs_gather={"d": "y"},
        rhs_sizes=({}, {"n": 3 * x}, {"n": x}),
    )


def query_key_value_of_few_tokens(y: int, x: int, shard: int, other: int) -> Case:
    """The same with so few tokens that the gradients of the weights are the largest arrays."""
    return dataclasses.replace(query_key_value(y, x, shard, 1), name="query_key_value_of_few_tokens")


def scatter_several(y: int, x: int, shard: int, other: int) -> Case:
    """Two weights of different widths, each result scattered."""
    return Case(
        "scatter_several",
        "btf,fd->btd",
        {"b": y, "t": other, "d": 2 * shard * x * y, "f": 2 * x},
        {"y": y, "x": x},
        lhs={"b": "y", "f": "x"},
        rhs={"f": "x", "d": "y"},
        out={"b": "y", "d": "x"},
        rhs_gather={"d": "y"},
        out_scatter={"d": "x"},
        rhs_sizes=({}, {"d": shard * x * y}),
    )


def gather_tuple(y: int, x: int, shard: int, other: int) -> Case:
    """One ring over both axes, x the faster one."""
    both = ("y", "x")
    return Case(
        "gather_tuple",
        "tab,bc->tac",
        {"t": other, "a": shard * x * y, "b": 3, "c": x * y},
        {"y": y, "x": x},
        lhs={"a": both},
        rhs={"c": both},
        out={"c": both},
        lhs_gather={"a": both},
    )


def scatter_tuple(y: int, x: int, shard: int, other: int) -> Case:
    """A sum over both axes, scattered over both, y the faster one."""
    both = ("x", "y")
    return Case(
        "scatter_tuple",
        "tab,bc->tac",
        {"t": other, "a": shard * x * y, "b": x * y, "c": 3},
        {"y": y, "x": x},
        lhs={"b": both},
        rhs={"b": both},
        out={"a": both},
        out_scatter={"a": both},
    )


def gather_two_labels(y: int, x: int, shard: int, other: int) -> Case:
    """Two gathers of one operand, of a free and of a contracted label."""
    return Case(
        "gather_two_labels",
        "tab,bc->tac",
        {"t": other, "a": shard * y, "b": shard * x, "c": x * y},
        {"y": y, "x": x},
        lhs={"a": "y", "b": "x"},
        rhs={"c": ("y", "x")},
        out={"c": ("y", "x")},
        lhs_gather={"a": "y", "b": "x"},
    )


def scatter_two_labels(y: int, x: int, shard: int, other: int) -> Case:
    """A result scattered along two labels, over one axis each."""
    return Case(
        "scatter_two_labels",
        "tab,bc->tac",
        {"t": other, "a": shard * y, "b": x * y, "c": shard * x},
        {"y": y, "x": x},
        lhs={"b": ("y", "x")},
        rhs={"b": ("y", "x")},
        out={"a": "y", "c": "x"},
        out_scatter={"a": "y", "c": "x"},
    )


def gather_replicated(y: int, x: int, shard: int, other: int) -> Case:
    """A right operand that every device holds whole, a result of which every device along x holds a copy."""
    return Case(
        "gather_replicated",
        "tab,bc->tac",
        {"t": other * y, "a": shard * x, "b": 3, "c": 2},
        {"y": y, "x": x},
        lhs={"t": "y", "a": "x"},
        out={"t": "y"},
        lhs_gather={"a": "x"},
    )


# Patterns over two axes: (size of y, size of x, shard size, size of the other labels) -> case.
TWO_AXES = {
    make.__name__: make
    for make in (
        mlp_up,
        mlp_down,
        query_key_value,
        query_key_value_of_few_tokens,
        scatter_several,
        gather_tuple,
        scatter_tuple,
        gather_two_labels,
        scatter_two_labels,
        gather_replicated,
    )
}


def with_replicas(case: Case, replicas: int) -> Case:
    """The same case on a mesh with an outer axis that shards the batch and over which the weights are replicas."""
    batch = {"b": ("replica", "y")}
    return dataclasses.replace(
        case,
        name=f"{case.name}_replicas",
        sizes={**case.sizes, "b": case.sizes["b"] * replicas},
        mesh={"replica": replicas, **case.mesh},
        lhs={**case.lhs, **batch},
        out={**case.out, **batch},
    )
