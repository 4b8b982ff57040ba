"""A mixture of experts cut over a mesh does what a loop over whole experts does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from overlapfx.config import Overlap
from overlapfx.layers import moe, param, stack
from overlapfx.layers.mlp import ACTIVATIONS
from overlapfx.layers.moe import Mixture
from overlapfx.layers.moe_routing import regroup, route

B, T, D, F, E, K = 8, 12, 16, 24, 8, 2


@functools.cache
def layer(gated: bool, capacity_factor: float, overlap: Overlap) -> Mixture:
    sizes = {"d_model": D, "d_ff": F, "num_experts": E, "experts_per_token": K, "capacity_factor": capacity_factor}
    settings = {"activation": "gelu", "gated": gated, "out_std": 1.0, "compute_dtype": jnp.float32, "overlap": overlap}
    return Mixture(**sizes, **settings, rngs=nnx.Rngs(0))


@functools.cache
def operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, a cotangent, segments with padding: ragged, one row all padding, holes."""
    rng = np.random.default_rng(1)
    x, cotangent = rng.normal(size=(2, B, T, D)).astype(np.float32)
    x += 2 * rng.normal(size=(1, D)).astype(np.float32)  # all tokens lean to the same experts
    segments = (np.arange(T) < rng.integers(5, T + 1, (B, 1))).astype(np.int32) * rng.integers(1, 3, (B, T))
    segments[3], segments[2, 1:3] = 0, 0
    return x, cotangent, segments.astype(np.int32)


def on_mesh(module, y, x_size, num_stripes=1):
    """(result, load, gradients of every parameter and of x) of the layer on a mesh, for one cotangent of the result and
    ones for the balance and z losses.
    """
    graph, params = nnx.split(module)
    mesh = jax.make_mesh((y, x_size), ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: y * x_size])

    def local(params, x, cotangent, segments):
        def loss(params, x):
            striped = [stack.cut(array, num_stripes) for array in (x, segments)]
            results, loads = nnx.merge(graph, params).stripes(*striped)
            result, load = jnp.concatenate(results), jnp.concatenate(loads)
            # What is the same on all of x counts once.
            total = jax.lax.psum(jnp.sum(result * cotangent), ("y", "x")) + jax.lax.psum(jnp.sum(load[:, :2]), "y")
            return total, (result, load)

        (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        return found, gradients

    layouts = jax.tree.map(lambda v: v.get_metadata("layout"), params, is_leaf=lambda v: isinstance(v, nnx.Variable))
    activations = P("y", None, "x")
    fn = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(layouts, activations, activations, P("y")),
        out_specs=((activations, P("y")), (layouts, activations)),
    )
    (result, load), (gradients, dx) = jax.jit(fn)(params, *operands())
    return result, load, {**nnx.to_pure_dict(gradients), "x": dx}


def choices_by_loop(logits, segments, capacity):
    """Experts that each token chooses, which of them have a place for it, the share that has none."""
    places, dropped = np.zeros((B, T, K), bool), np.zeros(B)
    chosen = np.argsort(-logits, axis=-1, kind="stable")[..., :K]
    for b in range(B):
        used = np.zeros(E, int)
        for t in range(T):
            for k in range(K if segments[b, t] else 0):
                places[b, t, k] = used[chosen[b, t, k]] < capacity
                used[chosen[b, t, k]] += 1
        dropped[b] = 1 - places[b].sum() / used.sum() if used.sum() else 0
    return chosen, places, dropped


@functools.cache
def by_loop(gated, capacity):
    """The same as `on_mesh` from whole arrays, one expert after the other."""
    module = layer(gated, 1.0, Overlap("off"))
    x, cotangent, segments = operands()
    logits = x.astype(np.float64) @ np.asarray(module.router_DE[...], np.float64)
    chosen, places, dropped = choices_by_loop(logits, segments, capacity)
    text, count = segments > 0, np.maximum((segments > 0).sum(-1), 1)
    gelu = ACTIVATIONS["gelu"]

    def loss(params, x):
        logits = jnp.einsum("btd,de->bte", x, params["router_DE"], precision="highest")
        probability = jax.nn.softmax(logits)
        picked = jnp.take_along_axis(probability, chosen, axis=-1)
        weight = picked / picked.sum(-1, keepdims=True) * places
        result, balance = jnp.zeros_like(x), 0.0
        for expert in range(E):
            up = x @ params["up_EDF"][expert]
            h = up * gelu(x @ params["gate_EDF"][expert]) if gated else gelu(up)
            answer = h @ params["down_EFD"][expert]
            result += jnp.sum(weight * (chosen == expert), axis=-1, keepdims=True) * answer
            share = ((chosen == expert).any(-1) & text).sum(-1) / (K * count)
            balance += E * share * (probability[..., expert] * text).sum(-1) / count
        z = (jax.nn.logsumexp(logits, axis=-1) ** 2 * text).sum(-1) / count
        total = jnp.sum(result * cotangent) + jnp.sum(balance) + jnp.sum(z)
        return total, (result, jnp.stack([balance, z, dropped], axis=-1))

    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    fn = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (result, load)), (gradients, dx) = fn(params, x)
    return result, load, {**gradients, "x": dx}


def check(gated, capacity_factor, y, x, overlap=Overlap("off"), num_stripes=1):
    got = on_mesh(layer(gated, capacity_factor, overlap), y, x, num_stripes)
    want = by_loop(gated, moe.capacity(T, E, K, capacity_factor))
    assert_close(got[0], want[0], where="result")
    assert_close(got[1], want[1], where="load")
    assert got[2].keys() == want[2].keys()
    for name in want[2]:
        # A sum over tokens of sums over features.
        assert_close(np.asarray(got[2][name]) / 4, np.asarray(want[2][name]) / 4, jnp.float32, name)
    return np.asarray(got[1])[:, 2]


@pytest.mark.parametrize(
    ("gated", "capacity_factor", "y", "x", "overlap", "num_stripes"),
    [
        (False, 0.7, 1, 1, Overlap("off"), 2),
        (False, 0.7, 8, 1, Overlap("on"), 1),
        (True, 1.0, 4, 2, Overlap("on"), 2),
        (False, 8.0, 2, 4, Overlap("off"), 1),
        (True, 1.0, 1, 8, Overlap("on", save_gathered=True), 1),
    ],
)
def test_same_as_a_loop_over_experts(gated, capacity_factor, y, x, overlap, num_stripes):
    dropped = check(gated, capacity_factor, y, x, overlap, num_stripes)
    assert (dropped.max() > 0.3) == (capacity_factor < 8)
    assert dropped[3] == 0  # padding has nothing to drop


def rolled(x, axes, dim):
    return jnp.roll(ALL_TO_ALL(x, axes, dim), 1, axis=0)


ALL_TO_ALL, ROUTE = moe.ring.all_to_all, moe.route
FAULTS = {
    "answers come from the wrong device": (moe.ring, "all_to_all", rolled, "result"),
    "padding takes places": (moe, "route", lambda x, text, **k: ROUTE(x, text | True, **k), "result"),
    "one place too many": (
        moe,
        "route",
        lambda x, text, num_choices, capacity: ROUTE(x, text, num_choices=num_choices, capacity=capacity + 1),
        "result",
    ),
    "no gradient of the weights": (
        moe,
        "_weights",
        lambda routing, weights=moe._weights: jax.lax.stop_gradient(weights(routing)),
        "router_DE",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(monkeypatch, fault):
    module, name, replacement, where = FAULTS[fault]
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(AssertionError, match=f"{where}: error"):
        check(False, 0.7, 2, 1)


def test_places_by_hand():
    # Experts 0, 1, 2; what the tokens choose: 0 1, 0 2, padding, 0 1, 1 0. Two places with each.
    likely = np.array([[[3, 2, 1], [3, 1, 2], [9, 8, 0], [3, 2, 1], [2, 3, 1]]], np.float32)
    text = np.array([[True, True, False, True, True]])
    found = route(jnp.asarray(likely), jnp.asarray(text), num_choices=2, capacity=2)
    # Choices are numbered 2 t + k. Expert 0: tokens 0 and 1; 1: tokens 0 and 3; 2: token 1; 10: nobody.
    np.testing.assert_array_equal(found.choice_of_slot_EBC[:, 0], [[0, 2], [1, 7], [3, 10]])
    np.testing.assert_array_equal(found.slot_of_choice_BTK[0], [[0, 2], [1, 4], [6, 6], [6, 3], [6, 6]])
    assert float(found.dropped_B[0]) == 3 / 8
    odds = np.exp(1) / (1 + np.exp(1))
    np.testing.assert_allclose(found.weight_BTK[0, 0], [odds, 1 - odds], rtol=1e-6)
    assert np.all(np.asarray(found.weight_BTK[0, 2]) == 0)
    # Half of the choices fall on expert 0, 3 of 8 on expert 1, 1 of 8 on expert 2.
    mean = np.exp(likely[0][text[0]]) / np.exp(likely[0][text[0]]).sum(-1, keepdims=True)
    want = 3 * np.dot([4 / 8, 3 / 8, 1 / 8], mean.mean(0))
    np.testing.assert_allclose(found.balance_B[0], want, rtol=1e-6)
    np.testing.assert_allclose(found.z_B[0], np.log(np.exp(likely[0, 0]).sum()) ** 2, rtol=1e-6)


def test_balance_is_one_if_even_and_the_number_of_experts_if_all_go_to_one():
    text = jnp.ones((1, 8), bool)
    even = route(jnp.asarray(50 * np.eye(8, dtype=np.float32)[None]), text, num_choices=1, capacity=8)
    one = route(jnp.asarray(50 * np.eye(8, dtype=np.float32)[None, [3] * 8]), text, num_choices=1, capacity=8)
    assert float(even.balance_B[0]) == pytest.approx(1) and float(one.balance_B[0]) == pytest.approx(8)
    assert float(even.dropped_B[0]) == float(one.dropped_B[0]) == 0


def test_rows_go_and_come_back():
    """Integers, so sums are exact: a gather of rows, its gradient the sum over their uses, and the other way round."""
    rows = np.random.default_rng(0).integers(-9, 9, (4, 3)).astype(np.float32)
    sources, users = jnp.array([[2], [0], [4], [2], [3]]), jnp.array([[1, 5], [5, 5], [0, 3], [4, 5]])
    out, back = jax.vjp(lambda r: regroup(r, sources, users), jnp.asarray(rows))
    np.testing.assert_array_equal(out, np.stack([rows[2], rows[0], 0 * rows[0], rows[2], rows[3]]))
    cotangent = np.random.default_rng(1).integers(-9, 9, (5, 3)).astype(np.float32)
    want = np.stack([cotangent[1], 0 * cotangent[0], cotangent[0] + cotangent[3], cotangent[4]])
    np.testing.assert_array_equal(back(jnp.asarray(cotangent))[0], want)
    out, back = jax.vjp(lambda r: regroup(r, users, sources), jnp.asarray(cotangent))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(back(jnp.asarray(rows))[0], [rows[2], rows[0], 0 * rows[0], rows[2], rows[3]])


def test_layouts_cut_experts_over_y_and_their_features_over_x():
    layouts = param.layouts(layer(True, 1.0, Overlap("off")))
    assert layouts["up_EDF"] == layouts["gate_EDF"] == P("y", None, "x")
    assert layouts["down_EFD"] == P("y", "x", None)
