"""Layers on shards do what their formulas say on whole arrays."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from overlapfx.config import Overlap
from overlapfx.layers.attention import attend, rotate, segment_mask
from overlapfx.layers.dropout import dropout
from overlapfx.layers.embed import Embedding, cross_entropy
from overlapfx.layers.norm import RMSNorm


def mesh(y: int, x: int):
    return jax.make_mesh((y, x), ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: y * x])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_only_looked_up_rows_have_a_gradient():  # C10: vocabulary 16 over 4 shards, ids 0 and 5
    embed = Embedding(vocab_size=16, d_model=8, compute_dtype=jnp.float32, overlap=Overlap("off"), rngs=nnx.Rngs(0))
    graph, params = nnx.split(embed)
    tokens = np.array([[0, 5, 5, 0], [5, 5, 0, 5]], np.int32)
    weight = np.round(normal(0, 2, 4, 8) * 2)

    def value_and_gradient(params, tokens, weight):
        def loss(params):
            rows = nnx.merge(graph, params).encode(tokens)
            return jax.lax.psum(jnp.sum(rows * weight), ("y", "x")), rows

        return jax.value_and_grad(loss, has_aux=True)(params)

    specs = jax.tree.map(lambda _: P("x", "y"), params)
    fn = jax.shard_map(
        value_and_gradient,
        mesh=mesh(2, 4),
        in_specs=(specs, P("y"), P("y", None, "x")),
        out_specs=((P(), P("y", None, "x")), specs),
    )
    (_, rows), grads = jax.jit(fn)(params, tokens, weight)
    table = np.asarray(embed.table_VD[...])
    np.testing.assert_array_equal(rows, table[tokens] * np.float32(np.sqrt(8)))
    (gradient,) = map(np.asarray, jax.tree.leaves(grads))
    assert set(np.flatnonzero(np.abs(gradient).sum(axis=1))) == {0, 5}
    want = np.zeros((16, 8), np.float32)
    np.add.at(want, tokens.ravel(), weight.reshape(-1, 8))
    np.testing.assert_allclose(gradient, want * np.sqrt(8), rtol=1e-6)


@pytest.mark.parametrize(("y", "x"), [(1, 8), (2, 4), (8, 1)])
def test_cross_entropy_over_vocabulary_shards(y, x):
    logits, targets = normal(1, 8, 3, 16) * 5, np.random.default_rng(2).integers(0, 16, (8, 3)).astype(np.int32)

    def loss(logits, targets):
        def total(logits):
            nll = cross_entropy(logits, targets)
            return jax.lax.psum(jnp.sum(nll), "y"), nll

        (_, nll), grads = jax.value_and_grad(total, has_aux=True)(logits)
        return nll, grads

    fn = jax.shard_map(
        loss, mesh=mesh(y, x), in_specs=(P("y", None, "x"), P("y")), out_specs=(P("y"), P("y", None, "x"))
    )
    nll, grads = jax.jit(fn)(logits, targets)
    want = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_allclose(nll, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads, jax.nn.softmax(logits) - jax.nn.one_hot(targets, 16), atol=1e-6)


def test_cross_entropy_does_not_overflow():
    logits = np.array([[[1000.0, -1000.0, 0.0, 0.0]]], np.float32)
    fn = jax.shard_map(cross_entropy, mesh=mesh(1, 4), in_specs=(P("y", None, "x"), P("y")), out_specs=P("y"))
    assert float(fn(logits, np.zeros((1, 1), np.int32))[0, 0]) == 0.0
    assert float(fn(logits, np.ones((1, 1), np.int32))[0, 0]) == 2000.0


def test_norm_runs_over_all_features():
    norm = RMSNorm(d_model=16)
    norm.scale_D[...] = jnp.asarray(normal(3, 16))
    graph, params = nnx.split(norm)
    x = normal(4, 2, 3, 16)
    fn = jax.shard_map(
        lambda p, x: nnx.merge(graph, p)(x),
        mesh=mesh(2, 4),
        in_specs=(jax.tree.map(lambda _: P("x"), params), P("y", None, "x")),
        out_specs=P("y", None, "x"),
    )
    want = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * normal(3, 16)
    np.testing.assert_allclose(fn(params, x), want, rtol=1e-5)


@functools.cache
def dropped(y: int, x: int) -> np.ndarray:
    def local(value):
        rows = jax.lax.axis_index("y") * value.shape[0] + jnp.arange(value.shape[0])
        return dropout(value, 0.25, jax.random.key(7), rows)

    spec = P("y", None, "x")
    fn = jax.shard_map(local, mesh=mesh(y, x), in_specs=spec, out_specs=spec)
    return np.asarray(jax.jit(fn)(np.ones((8, 16, 64), np.float32)))


@pytest.mark.parametrize(("y", "x"), [(8, 1), (2, 4), (1, 8)])
def test_dropout_mask_is_the_same_on_every_mesh(y, x):
    np.testing.assert_array_equal(dropped(y, x), dropped(1, 1))


def test_dropout_drops_its_share_and_keeps_the_mean():
    value = dropped(1, 1)
    assert set(np.unique(value)) == {0.0, np.float32(1 / 0.75)}
    # 8192 draws: five standard deviations are 0.024.
    assert abs((value == 0).mean() - 0.25) < 0.024
    assert not np.array_equal(value[0], value[1]), "rows must not share a mask"


def test_attention_by_hand():
    q, k, v = normal(5, 2, 6, 4, 8), normal(6, 2, 6, 2, 8), normal(7, 2, 6, 2, 8)
    segments = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1]], np.int32)
    mask = segment_mask(jnp.asarray(segments), jnp.asarray(segments), causal=True)
    got = attend(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v), mask)
    for b in range(2):
        for t in range(6):
            seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
            for n in range(4):
                scores = k[b, seen, n // 2] @ q[b, t, n] / np.sqrt(8)
                weights = np.exp(scores - scores.max())
                np.testing.assert_allclose(
                    got[b, t, n], weights @ v[b, seen, n // 2] / weights.sum(), rtol=2e-5, atol=2e-6
                )


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    q, k = normal(8, 1, 1, 1, 8), normal(9, 1, 1, 1, 8)
    qs, ks = rotate(jnp.asarray(np.tile(q, (1, 12, 1, 1)))), rotate(jnp.asarray(np.tile(k, (1, 12, 1, 1))))
    np.testing.assert_allclose(np.linalg.norm(qs, axis=-1), np.linalg.norm(q), rtol=1e-5)
    products = np.einsum("btnh,bsnh->ts", qs, ks)
    for distance in range(-11, 12):
        diagonal = np.diagonal(products, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], rtol=1e-4, atol=1e-4)
    assert abs(products[0, 0] - products[0, 5]) > 1e-3
