"""Attention scores that depend on how far apart two tokens are."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Integer

from overlapfx import compat
from overlapfx.layers import param


class RelativeBias(nnx.Module):
    """A learned number per head and bucket of distances, the same for all layers of a stack (Raffel et al., 2019).

    num_buckets: a multiple of 4. causal: queries see no later key, so all buckets are for earlier ones.
    """

    def __init__(self, *, num_heads: int, num_buckets: int, max_distance: int, causal: bool, rngs: nnx.Rngs) -> None:
        self.table_RN = param.normal(rngs.params(), (num_buckets, num_heads), 0.02, param.TABLE_RN)
        self.max_distance, self.causal = max_distance, causal

    def __call__(self, num_queries: int, num_keys: int) -> Float[Array, "N T S"]:
        """What is added to the scores of this device's heads, float32."""
        distance = np.arange(1 - num_queries, num_keys)  # of a key from a query, all that there are
        which = bucket(distance, self.table_RN.shape[0], self.max_distance, self.causal)
        return by_distance(jnp.take(self.table_RN[...], which, axis=0).T, num_queries)


def vary_like(x_BTD: Float[Array, "B T D"], bias_NTS: Float[Array, "N T S"]) -> Float[Array, "N T S"]:
    """The bias typed as activations are: the gradient is summed over devices once, not once in every layer."""
    return compat.vary(bias_NTS, compat.varying_axes(x_BTD) | {"y", "x"})


def bucket(
    distance: Integer[np.ndarray, " L"], num_buckets: int, max_distance: int, causal: bool
) -> Integer[np.ndarray, " L"]:
    """The bucket of each distance of a key from its query, negative if the key is the earlier one.

    Of the buckets of a direction half are for one distance each, half grow by a constant factor up to max_distance,
    beyond which all distances share the last one. If not causal, either direction has half of all buckets.
    """
    per_direction = num_buckets if causal else num_buckets // 2
    away = np.maximum(-distance, 0) if causal else np.abs(distance)
    exact = per_direction // 2
    growth = np.log(np.maximum(away, exact) / exact) / math.log(max_distance / exact)
    far = np.minimum(exact + (growth * (per_direction - exact)).astype(int), per_direction - 1)
    return np.where(away < exact, away, far) + (0 if causal else per_direction * (distance > 0))


def by_distance(value_NL: Float[Array, "N L"], num_queries: int) -> Float[Array, "N T S"]:
    """Value l = s - t + T - 1 at query t, key s. Made by reshaping: a gather would have a slow scatter as gradient."""
    heads, num_distances = value_NL.shape
    rows_NTL = jnp.broadcast_to(value_NL[:, None], (heads, num_queries, num_distances))
    # With a column more, each row of the flat array begins one further to the right than the one before.
    flat = jnp.pad(rows_NTL, ((0, 0), (0, 0), (0, 1))).reshape(heads, -1)[:, : num_queries * num_distances]
    return flat.reshape(heads, num_queries, num_distances)[:, :, num_queries - 1 :]
