"""Root-mean-square normalisation of activations whose features are sharded."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from overlapfx.layers import param


class RMSNorm(nnx.Module):
    """Divides by the root mean square over all features, wherever they are, and scales."""

    def __init__(self, *, d_model: int, eps: float = 1e-6) -> None:
        self.scale_D = param.ones((d_model,), param.SCALE_D)
        self.eps = eps

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Features are this device's shard; the sum of squares runs over axis x, in float32. Keeps the dtype."""
        x = x_BTD.astype(jnp.float32)
        square_sum_BT = lax.psum(jnp.sum(x * x, axis=-1), "x")
        num_features = x.shape[-1] * lax.axis_size("x")
        scale = lax.rsqrt(square_sum_BT / num_features + self.eps)[..., None]
        return (x * scale * self.scale_D[...]).astype(x_BTD.dtype)
