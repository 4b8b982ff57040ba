"""What happened to users of comparable systems (cases C01 to C12), with the right values written down by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import core_jaxpr
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_harness import (
    Case,
    check_exact,
    integers,
    make_values,
    normals,
    option_product,
    place,
    quick_compile,
    run_case,
    sharded_program,
    simulated_mesh,
    unchecked_annotations,
)
from core_patterns import ONE_AXIS
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from overlapfx.config import Overlap
from overlapfx.ops import ring
from overlapfx.ops.collective_einsum import collective_einsum
from overlapfx.plan import decide
from overlapfx.plan.decide import record_sites

pytestmark = pytest.mark.core

ALL = option_product()


def run_quickly(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(fn).lower(*args).compile(quick_compile())(*args)


def test_c01_every_disjoint_ring_of_a_permute_moves() -> None:
    # Two rings of four along x, four rings of two along y; some version filled all but one ring with zeros.
    mesh = simulated_mesh({"y": 2, "x": 4})
    numbers = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    expected = {
        ("x", 1): [[4, 1, 2, 3], [8, 5, 6, 7]],
        ("x", -1): [[2, 3, 4, 1], [6, 7, 8, 5]],
        ("x", 2): [[3, 4, 1, 2], [7, 8, 5, 6]],
        ("y", 1): [[5, 6, 7, 8], [1, 2, 3, 4]],
        ("y,x", 1): [[8, 1, 2, 3], [4, 5, 6, 7]],
        # Over (x, y) the devices follow each other down the columns: 1 5 2 6 3 7 4 8.
        ("x,y", 1): [[8, 5, 6, 7], [1, 2, 3, 4]],
    }

    def shift_all(x: jax.Array) -> list[jax.Array]:
        return [ring.shift(x, tuple(axes.split(",")), by) for axes, by in expected]

    shifted = jax.jit(jax.shard_map(shift_all, mesh=mesh, in_specs=P("y", "x"), out_specs=P("y", "x")))(numbers)
    for received, want in zip(shifted, expected.values(), strict=True):
        np.testing.assert_array_equal(received, want)


@pytest.mark.parametrize("label", "abc")
def test_c02_scatter_along_each_dimension(label: str) -> None:
    sharded = {"k": "x"}
    case = Case(
        f"scatter along {label}",
        "abck,k->abc",
        {"a": 4, "b": 6, "c": 8, "k": 2},
        {"x": 2},
        lhs=sharded,
        rhs=sharded,
        out={label: "x"},
        out_scatter={label: "x"},
    )
    # All values of the result are distinct: 2 i + (2 i + 1), so that swapped dimensions show.
    terms = np.arange(384, dtype=np.float32).reshape(4, 6, 8, 2)
    values = dataclasses.replace(make_values(case), lhs=terms, rhs=(np.ones(2, np.float32),))
    want = 4 * np.arange(192).reshape(1, 4, 6, 8) + 1
    for name, made in run_case(case, ALL, values).items():
        np.testing.assert_array_equal(made.out[0], want, err_msg=name)


def scattered_partials(accum_dtype: str, method: str, out_dtype: Any) -> jax.Array:
    """Each of 8 devices has one term of the sum 256 + 1 + 1 + 1 + 1 + 1 + 1 + 1 of every element, in bfloat16."""
    terms = jnp.ones((8, 8), jnp.bfloat16).at[:, 0].set(256)
    call = functools.partial(
        collective_einsum,
        "ab,bc->ac",
        out_scatter={"a": "x"},
        overlap=Overlap(method=method, direction="one", unroll=1, accum_dtype=accum_dtype),
        out_dtype=out_dtype,
    )
    mapped = jax.shard_map(call, mesh=simulated_mesh({"x": 8}), in_specs=(P(None, "x"), P("x")), out_specs=P("x"))
    return run_quickly(mapped, terms, jnp.ones((8, 3), jnp.bfloat16))


@pytest.mark.parametrize("method", ["blocking", "ring", "exchange"])
def test_c03_scatter_sums_in_float32_and_rounds_once(method: str) -> None:
    np.testing.assert_array_equal(scattered_partials("float32", method, jnp.float32), np.full((8, 3), 263.0))
    # bfloat16 has steps of 2 from 256 on; 263 lies between 262 and 264 and rounds to the even one, 264.
    rounded = scattered_partials("float32", method, jnp.bfloat16)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rounded.astype(np.float32), np.full((8, 3), 264.0))


def test_c03_a_travelling_bfloat16_sum_is_wrong_where_asked_for() -> None:
    # The sum for owner o visits devices o + 7, o + 6, ..., o and is rounded after each but the last. 256 + 1 is halfway
    # between 256 and 258 and becomes 256, 260 + 1 becomes 260, 258 + 1 becomes 260. So owner 0, who adds the 256 last,
    # has 7 + 256; owner 1, whose sum begins with it, loses six ones of seven; owner 3: 2, 258, 260, 260, 260, 260, 261.
    got = scattered_partials("bfloat16", "ring", jnp.float32)
    np.testing.assert_array_equal(got[:, 0], [263, 257, 257, 261, 261, 261, 261, 263])
    # Exchanged partials are rounded once each, which is exact here, and summed at the owner in float32.
    np.testing.assert_array_equal(scattered_partials("bfloat16", "exchange", jnp.float32), np.full((8, 3), 263.0))


@pytest.mark.parametrize("method", ["blocking", "ring", "stripe", "prefetch"])
def test_c03_gather_sums_in_float32(method: str) -> None:
    terms = jnp.ones((8, 8), jnp.bfloat16).at[:, 0].set(256)
    call = functools.partial(
        collective_einsum, "ab,bc->ac", lhs_gather={"b": "x"}, overlap=Overlap(method=method), out_dtype=jnp.float32
    )
    mesh = simulated_mesh({"x": 8})
    mapped = jax.shard_map(call, mesh=mesh, in_specs=(P(None, "x"), P(None, "x")), out_specs=P(None, "x"))
    out = run_quickly(mapped, terms, jnp.ones((8, 8), jnp.bfloat16))
    np.testing.assert_array_equal(out, np.full((8, 8), 263.0))


def gradient_jaxpr(pattern: str, overlap: Overlap) -> Any:
    """Forward and backward of one bfloat16 collective einsum on four devices."""
    case = ONE_AXIS[pattern](4, 4, 4)
    values = make_values(case, dtype=jnp.bfloat16)
    return jax.make_jaxpr(sharded_program(case, {"case": overlap}))(*place(case, values)).jaxpr


@pytest.mark.parametrize("pattern", ONE_AXIS)
def test_c04_nothing_is_rounded_between_product_and_sum(pattern: str) -> None:
    for name, overlap in ALL.items():
        with unchecked_annotations():
            jaxpr = gradient_jaxpr(pattern, overlap)
        assert core_jaxpr.count(jaxpr, "dot_general") >= 3, name
        assert not core_jaxpr.narrowed_before_addition(jaxpr), name


def test_c04_would_see_rounding() -> None:
    jaxpr = gradient_jaxpr("scatter_lhs_free", Overlap(method="ring", accum_dtype="bfloat16"))
    assert core_jaxpr.narrowed_before_addition(jaxpr)


@pytest.mark.parametrize(
    ("pattern", "num_devices", "shard", "overlap", "words"),
    [
        ("gather_lhs_free", 2, 4, Overlap(method="ring", direction="two_whole"), "a ring of 2 has one neighbour"),
        ("gather_lhs_free", 4, 1, Overlap(method="ring", direction="two"), "a shard of 1 has no halves"),
        ("scatter_lhs_free", 4, 1, Overlap(method="ring", direction="one"), "a shard of 1 cannot be split"),
        ("scatter_lhs_free", 4, 2, Overlap(method="ring", direction="two"), "a shard of 2 cannot be split"),
        ("gather_lhs_free", 4, 2, Overlap(method="exchange"), "exchange needs a scatter: ring instead"),
        ("scatter_lhs_free", 4, 2, Overlap(method="prefetch"), "prefetch needs a gather: ring instead"),
        ("gather_lhs_free", 4, 2, Overlap(method="stripe", direction="two"), "stripe has no direction"),
    ],
)
def test_c05_c06_what_cannot_apply_is_downgraded_with_a_reason(
    pattern: str, num_devices: int, shard: int, overlap: Overlap, words: str
) -> None:
    sites = check_exact(ONE_AXIS[pattern](num_devices, shard, 2), {"site": overlap})
    (forward,) = [site for site in sites if site.name == "site"]
    assert words in " ".join(forward.plan.downgrades)
    assert words in forward.line()


def test_c05_what_applies_is_not_downgraded() -> None:
    overlap = Overlap(method="ring", direction="two", unroll=2, interleave="halves")
    sites = check_exact(ONE_AXIS["gather_lhs_free"](4, 3, 2), {"site": overlap})
    assert [site.plan.downgrades for site in sites] == [(), (), ()]


def test_c05_one_device_has_nothing_to_send() -> None:
    for pattern, make in ONE_AXIS.items():
        case = make(1, 3, 2)
        with record_sites() as sites, unchecked_annotations():
            jaxpr = jax.make_jaxpr(sharded_program(case, ALL))(*place(case, make_values(case))).jaxpr
        collectives = ("ppermute", "all_gather", "reduce_scatter", "psum_scatter", "all_to_all")
        assert core_jaxpr.count(jaxpr, *collectives) == 0, pattern
        assert {site.plan.reason for site in sites} == {"nothing to communicate"}


def test_c06_a_shard_of_three_travels_in_uneven_halves() -> None:
    case = ONE_AXIS["gather_lhs_free"](4, 3, 2)
    overlap = Overlap(method="ring", direction="two")
    check_exact(case, {"two": overlap})
    jaxpr = jax.make_jaxpr(sharded_program(case, {"two": overlap}))(*place(case, make_values(case))).jaxpr
    sent = {eqn.outvars[0].aval.shape for eqn in core_jaxpr.equations(jaxpr) if eqn.primitive.name == "ppermute"}
    assert {(2, 2, 2), (2, 1, 2)} <= sent  # t, two or one rows of a, b


def test_c08_two_independent_loops_in_one_program_ten_times() -> None:
    first, second = ONE_AXIS["gather_lhs_contracting"](8, 2, 4), ONE_AXIS["scatter_rhs_free"](8, 2, 4)
    ring_of = {"ring": Overlap(method="ring")}
    programs = [sharded_program(case, ring_of) for case in (first, second)]
    arguments = [place(case, make_values(case, normals)) for case in (first, second)]

    def both(one: Any, two: Any) -> Any:
        return programs[0](*one), programs[1](*two)

    compiled = jax.jit(both).lower(*arguments).compile(quick_compile())
    runs = [jax.tree.map(np.asarray, compiled(*arguments)) for _ in range(10)]
    for run in runs[1:]:
        jax.tree.map(np.testing.assert_array_equal, runs[0], run)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_c09_gradients_of_replicated_closed_over_and_sharded_operands(num_devices: int, check_vma: bool) -> None:
    """jax.grad around shard_map: nothing is counted once per device that should be counted once, or the other way."""
    rng = np.random.default_rng(0)
    n = num_devices
    x, w, v = (jnp.asarray(integers(rng, s)) for s in ((2 * n, 4), (4, 2 * n), (4, 3)))
    spread = functools.partial(jax.shard_map, mesh=simulated_mesh({"x": n}), check_vma=check_vma)

    def sharded(x: jax.Array, w: jax.Array, v: jax.Array, overlap: Overlap) -> jax.Array:
        def both_sharded(x: jax.Array, w: jax.Array) -> jax.Array:
            y = collective_einsum("ab,bc->ac", x, w, lhs_gather={"a": "x"}, overlap=overlap)
            return jax.lax.psum((y**2).sum(), "x")

        def one_replicated(x: jax.Array, v: jax.Array) -> jax.Array:
            y = collective_einsum("ab,bc->ac", x, v, lhs_gather={"a": "x"}, overlap=overlap)
            return jax.lax.psum((y**2).sum() / n, "x")

        def scattered(x: jax.Array, w: jax.Array) -> jax.Array:
            y = collective_einsum("ba,cb->ac", w, x, out_scatter={"a": "x"}, overlap=overlap)
            return jax.lax.psum((y**2).sum(), "x")

        total = spread(both_sharded, in_specs=(P("x"), P(None, "x")), out_specs=P())(x, w)
        total += spread(one_replicated, in_specs=(P("x"), P()), out_specs=P())(x, v)
        total += spread(scattered, in_specs=(P(None, "x"), P("x")), out_specs=P())(x, w)
        total += spread(lambda x: one_replicated(x, v), in_specs=(P("x"),), out_specs=P())(x)
        return total

    def single(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return ((x @ w) ** 2).sum() + 2 * ((x @ v) ** 2).sum() + ((w.T @ x.T) ** 2).sum()

    want = jax.grad(single, (0, 1, 2))(x, w, v)
    for overlap in (Overlap(method="ring"), Overlap(method="stripe")):
        got = run_quickly(jax.grad(functools.partial(sharded, overlap=overlap), (0, 1, 2)), x, w, v)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def mlp(x: jax.Array, up: jax.Array, down: jax.Array, overlap: Overlap) -> jax.Array:
    """relu(x.up).down with the width sharded over x; two collectives, the second after the activation."""
    hidden = collective_einsum(
        "btd,df->btf", x, up, lhs_gather={"d": "x"}, overlap=overlap, name="up", activation=jax.nn.relu
    )
    return collective_einsum("btf,fd->btd", hidden, down, out_scatter={"d": "x"}, overlap=overlap, name="down")


MLP_SPECS = (P(None, None, "x"), P(None, "x"), P("x"))
MLP_SHAPES = ((2, 3, 8), (8, 8), (8, 8))


def mlp_loss(overlap: Overlap, wrap: Callable[..., Any] = lambda f: f) -> Callable[..., jax.Array]:
    """sum(mlp ** 2) over four devices, of global arrays."""

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y = wrap(functools.partial(mlp, overlap=overlap))(x, up, down)
        return jax.lax.psum((y**2).sum(), "x")

    return jax.shard_map(local, mesh=simulated_mesh({"x": 4}), in_specs=MLP_SPECS, out_specs=P())


def single_mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ up) @ down


def test_c11_loops_survive_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under jax.checkpoint the rings run in the forward pass, in the recomputed one and in the backward pass."""
    monkeypatch.setattr(decide, "MAX_STRAIGHT_SHARDS", 1)
    overlap = Overlap(method="ring", direction="one", unroll=1)
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(integers(rng, s)) for s in MLP_SHAPES]
    loops = ("scan", "while")

    forward = jax.make_jaxpr(mlp_loss(overlap))(*arrays).jaxpr
    assert core_jaxpr.count(forward, *loops) == 2  # up gathers, down scatters

    plain = jax.make_jaxpr(jax.grad(mlp_loss(overlap), (0, 1, 2)))(*arrays).jaxpr
    # Backward: down gathers the cotangent once for both gradients; up scatters dx and gathers x again for dw.
    assert core_jaxpr.count(plain, *loops) == 2 + 3

    with record_sites() as sites:
        gradient = jax.grad(mlp_loss(overlap, jax.checkpoint), (0, 1, 2))
        remat = jax.make_jaxpr(gradient)(*arrays).jaxpr
    again = core_jaxpr.inside(remat, "checkpoint") + core_jaxpr.inside(remat, "remat2")
    # Recomputed: up, whose result is needed, and not down, whose result is not.
    assert sum(core_jaxpr.count(jaxpr, *loops) for jaxpr in again) == 1 + 3
    assert core_jaxpr.count(remat, *loops) == 2 + 1 + 3
    # Checkpoint traces the forward pass once by itself and once to differentiate it; the report has both.
    names = [site.name for site in sites]
    assert names == ["up", "down", "up", "down", "down.bwd", "up.dlhs", "up.drhs"]
    assert all(site.plan.method == "ring" and site.plan.loop for site in sites)

    want = jax.grad(lambda *a: (single_mlp(*a) ** 2).sum(), (0, 1, 2))(*arrays)
    jax.tree.map(np.testing.assert_array_equal, run_quickly(gradient, *arrays), want)


@pytest.mark.parametrize("save_gathered", [False, True])
@pytest.mark.parametrize("loop", [False, True])
def test_c12_inside_scan_vmap_and_remat(loop: bool, save_gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if loop:
        monkeypatch.setattr(decide, "MAX_STRAIGHT_SHARDS", 1)
    rng = np.random.default_rng(0)
    x = jnp.asarray(normals(rng, (2, *MLP_SHAPES[0])))  # two sequences of layers side by side, by vmap
    up, down = (jnp.asarray(normals(rng, (3, *s)) / 4) for s in MLP_SHAPES[1:])

    def layers(x: jax.Array, up: jax.Array, down: jax.Array, block: Callable[..., jax.Array]) -> jax.Array:
        out, _ = jax.lax.scan(lambda x, w: (x + jax.checkpoint(block)(x, *w), None), x, (up, down))
        return out

    block = functools.partial(mlp, overlap=Overlap(method="ring", save_gathered=save_gathered))

    def local(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        y = jax.vmap(lambda x: layers(x, up, down, block))(x)
        return jax.lax.psum((y**2).sum(), "x")

    x_spec, up_spec, down_spec = (P(None, *spec) for spec in MLP_SPECS)
    loss = jax.shard_map(local, mesh=simulated_mesh({"x": 4}), in_specs=(x_spec, up_spec, down_spec), out_specs=P())
    got = run_quickly(jax.value_and_grad(loss, (0, 1, 2)), x, up, down)
    want = jax.value_and_grad(lambda *a: (layers(*a, single_mlp) ** 2).sum(), (0, 1, 2))(x, up, down)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b)
