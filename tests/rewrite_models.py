"""Transformer layers with hand-written collectives, in the two styles that small public trainers use."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from core_harness import simulated_mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from rewrite_programs import AXES

LAYERS, BATCH, TIME, MODEL, HEADS, HEAD, HIDDEN = 2, 4, 8, 16, 4, 4, 32


def norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / HEAD**0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)


def sequence_parallel(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """x: batch over y, time over x. Heads and hidden units over x: gather tokens, scatter sums."""
    h = lax.all_gather(norm(x), "x", axis=1, tiled=True)
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, p[name]) for name in "qkv")
    x = x + lax.psum_scatter(jnp.einsum("btnh,nhd->btd", attend(q, k, v), p["o"]), "x", scatter_dimension=1, tiled=True)
    h = lax.all_gather(norm(x), "x", axis=1, tiled=True)
    hidden = jax.nn.silu(h @ p["gate"]) * (h @ p["up"])
    return x + lax.psum_scatter(hidden @ p["down"], "x", scatter_dimension=1, tiled=True)


def fully_sharded(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
    """x: batch over y. Weights over x and y: gather over y just before use, sum over x."""

    def weight(name: str, axis: int) -> jax.Array:
        return lax.all_gather(p[name], "y", axis=axis, tiled=True)

    h = norm(x)
    q, k, v = (jnp.einsum("btd,dnh->btnh", h, weight(name, 0)) for name in "qkv")
    x = x + lax.psum(jnp.einsum("btnh,nhd->btd", attend(q, k, v), weight("o", 2)), "x")
    h = norm(x)
    hidden = jax.nn.silu(h @ weight("gate", 0)) * (h @ weight("up", 0))
    return x + lax.psum(hidden @ weight("down", 1), "x")


STYLES = {
    "sequence parallel": (sequence_parallel, P("y", "x"), (None, None)),
    "fully sharded": (fully_sharded, P("y"), ("y", "y")),
}


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    shapes = dict.fromkeys("qkv", (MODEL, HEADS, HEAD)) | {
        "o": (HEADS, HEAD, MODEL),
        "gate": (MODEL, HIDDEN),
        "up": (MODEL, HIDDEN),
        "down": (HIDDEN, MODEL),
    }
    return {n: (rng.standard_normal((LAYERS, *s)) / s[0] ** 0.5).astype(np.float32) for n, s in shapes.items()}


def arguments() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    rng = np.random.default_rng(12)
    return rng.standard_normal((BATCH, TIME, MODEL)).astype(np.float32), parameters()


def loss(style: str, check_vma: bool = True) -> Any:
    """(x, parameters) -> mean square of what a scan over rematerialized layers makes of x, as a jitted function."""
    layer, tokens, (rows, columns) = STYLES[style]
    specs = {name: P(None, rows, "x") for name in ("q", "k", "v", "gate", "up")}
    specs |= {"o": P(None, "x", None, columns), "down": P(None, "x", columns)}

    def body(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        x, _ = lax.scan(lambda x, p: (jax.checkpoint(layer)(x, p), None), x, p)
        total = lax.psum(jnp.sum(x * x), ("y", "x") if "x" in tokens else "y")
        return total / (BATCH * TIME * MODEL)

    mapped = jax.shard_map(
        body, mesh=simulated_mesh(AXES), in_specs=(tokens, specs), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(mapped)
