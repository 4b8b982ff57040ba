"""Dropout whose mask depends on an element's global place only."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from overlapfx.ops import ring
from overlapfx.types import PRNGKey


def dropout(
    x_BTD: Float[Array, "B T D"], rate: float, key: PRNGKey | None, row_B: Int[Array, "B"]
) -> Float[Array, "B T D"]:
    """Zeroes each element with probability `rate` and scales the others by 1 / (1 - rate); identity without a key.

    row_B: global index of each sequence. D is this device's shard over axis x. The random bits of an element are a hash
    of the key, its row and its place in the row, so every mesh shape draws the same mask.
    """
    if key is None or rate == 0.0:
        return x_BTD
    _, num_tokens, shard = x_BTD.shape
    feature_D = ring.index(("x",)) * shard + jnp.arange(shard)
    place_TD = jnp.arange(num_tokens)[:, None] * (shard * lax.axis_size("x")) + feature_D
    row_key_B = jax.vmap(jax.random.fold_in, (None, 0))(key, row_B)
    fold = jax.vmap(jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (None, 0)), (0, None))
    bits_BTD = jax.random.key_data(fold(row_key_B, place_TD))[..., 0]
    keep_BTD = bits_BTD >= jnp.uint32(round(rate * 2**32))
    return jnp.where(keep_BTD, x_BTD / (1.0 - rate), 0).astype(x_BTD.dtype)


def add_stripes(
    xs_BTD: Sequence[Array],
    added_BTD: Sequence[Array],
    rate: float,
    key: PRNGKey | None,
    rows_B: Sequence[Array],
) -> tuple[Array, ...]:
    """x + dropout(added) of every row stripe: the end of a residual branch."""
    stripes = zip(xs_BTD, added_BTD, rows_B, strict=True)
    return tuple(x_BTD + dropout(y_BTD, rate, key, row_B) for x_BTD, y_BTD, row_B in stripes)
