"""Generates text from a trained decoder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from overlapfx.mesh import batch_axes
from overlapfx.train.state import Model
from overlapfx.types import Params, PRNGKey


def generate(
    mesh: Mesh,
    model: Model,
    params: Params,
    prompt: Int[np.ndarray, "P"],
    *,
    num_tokens: int,
    seq_len: int,
    temperature: float,
    key: PRNGKey,
) -> Int[np.ndarray, "G"]:
    """`num_tokens` token ids that follow `prompt`, drawn at `temperature` (0 takes the likeliest).

    Each token reads the last `seq_len` tokens at most. Every token is a whole forward pass: there is no key-value
    cache, so this is for a look at a model, not for serving.
    """
    if not len(prompt) > 0:
        raise ValueError("sample.prompt is empty; give at least one character to continue.")
    prompt = prompt[-seq_len:]
    # The mesh wants a row per batch shard; all rows are alike and the first one is returned.
    num_rows = int(np.prod([mesh.shape[axis] for axis in batch_axes(mesh)]))
    window = np.zeros((num_rows, seq_len), np.int32)
    window[:, : len(prompt)] = prompt
    run = jax.jit(_loop(mesh, model, num_tokens, temperature))
    generated = run(params, window, jnp.int32(len(prompt)), key)
    return np.asarray(generated)


def _loop(mesh: Mesh, model: Model, num_tokens: int, temperature: float) -> Any:
    rows = P(batch_axes(mesh))

    def logits_at(params: Params, window_BT: Array, place: Array) -> Array:
        row_B = jnp.arange(window_BT.shape[0])
        logits_BTV = model.bind(params)(window_BT, jnp.ones_like(window_BT), row_B)
        return lax.dynamic_index_in_dim(logits_BTV, place, axis=1, keepdims=False)

    specs = (model.layouts, rows, P())
    forward = jax.shard_map(logits_at, mesh=mesh, in_specs=specs, out_specs=P(batch_axes(mesh), "x"))

    def run(params: Params, window_BT: Array, length: Array, key: PRNGKey) -> Array:
        seq_len = window_BT.shape[1]

        def draw(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            window_BT, length, out_G = carry
            logits_V = forward(params, window_BT, length - 1)[0]
            if temperature == 0.0:
                token = jnp.argmax(logits_V)
            else:
                token = jax.random.categorical(jax.random.fold_in(key, i), logits_V / temperature)
            token = token.astype(jnp.int32)
            full = length == seq_len
            shifted_BT = jnp.where(full, jnp.roll(window_BT, -1, axis=1), window_BT)
            window_BT = shifted_BT.at[:, jnp.where(full, seq_len - 1, length)].set(token)
            return window_BT, jnp.minimum(length + 1, seq_len), out_G.at[i].set(token)

        start = (window_BT, length, jnp.zeros((num_tokens,), jnp.int32))
        return lax.fori_loop(0, num_tokens, draw, start)[2]

    return run
