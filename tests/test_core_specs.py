"""Any legal einsum runs as its reference says; an illegal one is refused in one sentence that names what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_harness import integers, quick_compile, simulated_mesh
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from overlapfx.config import DIRECTIONS, INTERLEAVES, METHODS, Overlap
from overlapfx.ops import reference
from overlapfx.ops.collective_einsum import collective_einsum, collective_einsum_multi
from overlapfx.plan.decide import record_sites

pytestmark = pytest.mark.core

Axes = tuple[str, ...]
ROLES = ("batch", "lhs", "rhs", "contracting", "only_lhs", "only_rhs")
WHERE = {  # role -> (in the left operand, in the right one, in the result)
    "batch": (1, 1, 1),
    "lhs": (1, 0, 1),
    "rhs": (0, 1, 1),
    "contracting": (1, 1, 0),
    "only_lhs": (1, 0, 0),
    "only_rhs": (0, 1, 0),
}


@dataclasses.dataclass(frozen=True)
class Program:
    """A random collective einsum; shapes are local, every device has operands of its own."""

    spec: str
    mesh: Mapping[str, int]
    shapes: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # left, right, result
    collectives: Mapping[str, Mapping[str, Axes]]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    roles = dict(zip("abcd", draw(st.lists(st.sampled_from(ROLES), min_size=1, max_size=4)), strict=False))
    labels = ["".join(draw(st.permutations([c for c in roles if WHERE[roles[c]][i]]))) for i in range(3)]
    mesh = draw(st.sampled_from([{"y": 2, "x": 2}, {"y": 1, "x": 3}, {"y": 3, "x": 2}]))
    collectives: list[dict[str, Axes]] = []
    for array in labels:
        assigned: dict[str, Axes] = {}
        for axis in draw(st.permutations(list(mesh))):
            label = draw(st.sampled_from([None, *array]))
            if label is not None:
                assigned[label] = (*assigned.get(label, ()), axis)
        collectives.append(assigned)
    parts = [{c: math.prod(mesh[a] for a in axes) for c, axes in assigned.items()} for assigned in collectives]
    full = {c: draw(st.integers(1, 2)) * math.lcm(*(p.get(c, 1) for p in parts)) for c in roles}
    shapes = [tuple(full[c] // p.get(c, 1) for c in array) for array, p in zip(labels, parts, strict=True)]
    names = ("lhs_gather", "rhs_gather", "out_scatter")
    return Program(
        "{},{}->{}".format(*labels),
        mesh,
        (shapes[0], shapes[1], shapes[2]),
        dict(zip(names, collectives, strict=True)),
    )


overlaps = st.builds(
    Overlap,
    method=st.sampled_from(METHODS),
    direction=st.sampled_from(DIRECTIONS),
    unroll=st.sampled_from((1, 2)),
    interleave=st.sampled_from(INTERLEAVES),
    save_gathered=st.booleans(),
)


# Every example compiles, so a failing one is shown as it was found: shrinking it takes many minutes.
@settings(max_examples=40, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(program=programs(), overlap=overlaps)
def test_any_legal_einsum_equals_its_reference(program: Program, overlap: Overlap) -> None:
    """On integers, where every order of summation is exact; gradients of every operand of every device."""
    rng = np.random.default_rng(1)
    stacked = tuple(program.mesh.values())
    lhs, rhs, cotangent = (integers(rng, (*stacked, *shape)) for shape in program.shapes)

    def run(call: Any, lhs: jax.Array, rhs: jax.Array, cotangent: jax.Array) -> Any:
        out, pullback = jax.vjp(functools.partial(call, program.spec, **program.collectives), lhs, rhs)
        return out, *pullback(cotangent)

    def both(*arrays: jax.Array) -> Any:
        local = [x[0, 0] for x in arrays]
        done = (
            run(reference.collective_einsum, *local),
            run(functools.partial(collective_einsum, overlap=overlap), *local),
        )
        return jax.tree.map(lambda x: x[None, None], done)

    spec = PartitionSpec(*program.mesh)
    mapped = jax.jit(jax.shard_map(both, mesh=simulated_mesh(program.mesh), in_specs=(spec,) * 3, out_specs=spec))
    with record_sites() as sites:
        compiled = mapped.lower(lhs, rhs, cotangent).compile(quick_compile())
    want, got = compiled(lhs, rhs, cotangent)
    for what, a, b in zip(("result", "gradient of lhs", "gradient of rhs"), got, want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"{what}\n" + "\n".join(s.line() for s in sites))


def call_inside(mesh: Mapping[str, int], call: Any, *shapes: tuple[int, ...]) -> Any:
    """Traces a call inside shard_map with arrays of these local shapes, each device with its own."""
    arrays = [jax.ShapeDtypeStruct((*mesh.values(), *shape), jnp.float32) for shape in shapes]

    def local(*stacked: jax.Array) -> Any:
        out = call(*(x.reshape(x.shape[len(mesh) :]) for x in stacked))
        return jax.tree.map(lambda x: x.reshape((1,) * len(mesh) + x.shape), out)

    spec = PartitionSpec(*mesh)
    mapped = jax.shard_map(local, mesh=simulated_mesh(mesh), in_specs=spec, out_specs=spec)
    return jax.eval_shape(mapped, *arrays)


MESH = {"y": 2, "x": 4}
# spec, local shapes of both operands, keyword arguments, what the sentence must say.
ILLEGAL: dict[str, tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any], tuple[str, ...]]] = {
    "no_arrow": ("ab,bc", (2, 3), (3, 4), {}, ("'ab,bc'", "'ab,bc->ac'")),
    "three_operands": ("a,b,c->abc", (2,), (3,), {}, ("'a,b,c->abc'", "two operands")),
    "ellipsis": ("...b,bc->...c", (2, 3), (3, 4), {}, ("single letters",)),
    "result_label_from_nowhere": ("ab,bc->az", (2, 3), (3, 4), {}, ("'z'", "no operand has")),
    "result_label_twice": ("ab,bc->aa", (2, 3), (3, 4), {}, ("'a'", "name each result label once")),
    "unknown_gather_label": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"lhs_gather": {"c": "x"}},
        ("lhs_gather", "'c'", "'ab'"),
    ),
    "unknown_scatter_label": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"out_scatter": {"b": "x"}},
        ("out_scatter", "'b'", "'ac'"),
    ),
    "unknown_axis": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"rhs_gather": {"c": "z"}},
        ("rhs_gather", "axis 'z'", "label 'c'", "y, x"),
    ),
    "axis_for_two_labels": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"lhs_gather": {"a": "x", "b": "x"}},
        ("lhs_gather", "axis 'x' twice", "'a' and 'b'"),
    ),
    "axis_twice_in_a_tuple": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"lhs_gather": {"a": ("x", "x")}},
        ("lhs_gather", "axis 'x' twice"),
    ),
    "rank_of_lhs": ("ab,bc->ac", (2, 3, 1), (3, 4), {}, ("left", "(2, 3, 1)", "'ab'")),
    "rank_of_rhs": ("ab,bc->ac", (2, 3), (3,), {}, ("right", "(3,)", "'bc'")),
    "gathered_over_different_axes_to_different_sizes": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"lhs_gather": {"b": "x"}, "rhs_gather": {"b": "y"}},
        ("'b'", "size 12 on the left and 6 on the right", "left gathers b:x", "right gathers b:y"),
    ),
    "gathered_on_one_side_only": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"lhs_gather": {"b": "x"}},
        ("'b'", "size 12 on the left and 3 on the right", "right gathers nothing"),
    ),
    "ten_rows_over_four": (
        "ab,bc->ac",
        (10, 3),
        (3, 4),
        {"out_scatter": {"a": "x"}},
        ("out_scatter", "'a'", "size 10", "axis x", "of size 4", "8 or 12"),
    ),
    "three_rows_over_four": (
        "ab,bc->ac",
        (3, 3),
        (3, 4),
        {"out_scatter": {"a": "x"}},
        ("out_scatter", "'a'", "size 3", "axis x", "of size 4", "nearest legal size is 4"),
    ),
    "gathered_rows_over_a_tuple": (
        "ab,bc->ac",
        (5, 3),
        (3, 4),
        {"lhs_gather": {"a": "y"}, "out_scatter": {"a": ("y", "x")}},
        ("'a'", "size 10", "axis y*x", "of size 8", "8 or 16"),
    ),
    "diagonal_of_a_gathered_label": (
        "aab,bc->ac",
        (2, 2, 3),
        (3, 4),
        {"lhs_gather": {"a": "x"}},
        ("'a'", "repeated", "'aab'", "over x"),
    ),
    "unknown_bias_label": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"bias": jnp.zeros(3), "bias_labels": "b"},
        ("bias", "(3,)", "'b'", "'ac'"),
    ),
    "bias_labels_of_another_rank": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"bias": jnp.zeros(4), "bias_labels": "ac"},
        ("bias", "(4,)", "'ac'"),
    ),
    "bias_of_another_size": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"bias": jnp.zeros(1)},
        ("bias", "'c'", "size 1", "4"),
    ),
    "bias_before_the_scatter": (
        "ab,bc->ac",
        (2, 3),
        (3, 4),
        {"bias": jnp.zeros(4), "out_scatter": {"c": "x"}},
        ("bias", "'c'", "size 4", "1"),
    ),
}


@pytest.mark.parametrize("case", ILLEGAL)
def test_illegal_specs_give_one_sentence(case: str) -> None:
    spec, lhs, rhs, options, says = ILLEGAL[case]
    with pytest.raises(ValueError, match=r"^collective_einsum 'mlp.up'") as error:
        call_inside(MESH, functools.partial(collective_einsum, spec, name="mlp.up", **options), lhs, rhs)
    message = str(error.value)
    for part in says:
        assert part in message, message
    assert message.endswith(".")
    assert "\n" not in message
    assert ". " not in message


def test_no_right_operand_is_refused() -> None:
    with pytest.raises(ValueError, match="'qkv'.*no right operand"):
        call_inside(MESH, lambda x: collective_einsum_multi("ab,bc->ac", x, [], name="qkv"), (2, 3))


def test_one_bias_per_right_operand() -> None:
    with pytest.raises(ValueError, match="'qkv'.*2 right operands.*1 bias"):
        call_inside(
            MESH,
            lambda x, w: collective_einsum_multi("ab,bc->ac", x, [w, w], name="qkv", bias=[jnp.zeros(4)]),
            (2, 3),
            (3, 4),
        )


def test_outside_shard_map_no_axis_is_bound() -> None:
    with pytest.raises(ValueError, match="axis 'x' for label 'a'.*mesh axes bound here are none.*inside shard_map"):
        collective_einsum("ab,bc->ac", jnp.ones((2, 3)), jnp.ones((3, 4)), lhs_gather={"a": "x"})


def test_without_collectives_it_is_an_einsum_anywhere() -> None:
    lhs, rhs = integers(np.random.default_rng(0), (2, 3)), integers(np.random.default_rng(1), (3, 4))
    out = collective_einsum("ab,bc->ca", jnp.asarray(lhs), jnp.asarray(rhs))
    np.testing.assert_array_equal(out, (lhs @ rhs).T)


def test_diagonals_and_sums_of_one_operand() -> None:
    rng = np.random.default_rng(0)
    lhs, rhs = integers(rng, (2, 3, 3, 5)), integers(rng, (5, 4))
    out = collective_einsum("zaab,bc->ca", jnp.asarray(lhs), jnp.asarray(rhs))
    np.testing.assert_array_equal(out, np.einsum("zaab,bc->ca", lhs, rhs))


def test_result_shape_and_dtype() -> None:
    out = call_inside(
        MESH,
        functools.partial(
            collective_einsum, "ab,bc->ac", lhs_gather={"a": "y"}, out_scatter={"c": "x"}, out_dtype=jnp.bfloat16
        ),
        (2, 3),
        (3, 4),
    )
    assert (out.shape, out.dtype) == ((2, 4, 4, 1), jnp.bfloat16)
