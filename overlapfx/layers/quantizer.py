"""Targets for speech without transcripts: the nearest of many random codes to a random projection of the features."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from overlapfx import compat
from overlapfx.ops import ring

_SEED = 20220202


def nearest_codes(features_BTF: Float[Array, "B T F"], *, num_codes: int, code_dim: int) -> Int32[Array, "B T"]:
    """The code of each token (Chiu et al., 2022): its projection is nearest to that one in direction.

    Projection and codes are random, the same in every run, never trained. The search is cut over axis x: each device
    compares with its share of the codes, and two numbers per token cross the network. The lowest of equally near codes
    is taken. num_codes divides over x; features are whole on every device along x, the result too.
    """
    projection_FC, codes_VC = random_codes(features_BTF.shape[-1], num_codes, code_dim)
    precise = lax.Precision.HIGHEST  # a rounded product would now and then choose another code
    projected_BTC = jnp.einsum("btf,fc->btc", features_BTF.astype(jnp.float32), projection_FC, precision=precise)
    num_own = num_codes // lax.axis_size("x")
    first = ring.index(("x",)) * num_own
    own_VC = lax.dynamic_slice_in_dim(compat.vary(jnp.asarray(codes_VC), frozenset({"x"})), first, num_own)
    # Codes have length 1, so the nearest in direction has the largest product, whatever the projection's length.
    likeness_BTV = jnp.einsum("btc,vc->btv", projected_BTC, own_VC, precision=precise)
    largest_BT = jnp.max(likeness_BTV, axis=-1)
    is_largest_BT = largest_BT == lax.pmax(largest_BT, "x")
    candidate_BT = jnp.where(is_largest_BT, first + jnp.argmax(likeness_BTV, axis=-1), num_codes)
    return lax.pmin(candidate_BT, "x").astype(jnp.int32)


@functools.cache
def random_codes(
    num_features: int, num_codes: int, code_dim: int
) -> tuple[Float32[np.ndarray, "F C"], Float32[np.ndarray, "V C"]]:
    """The projection, and the codes of length 1. Drawn by NumPy, whose numbers are the same on every platform."""
    rng = np.random.default_rng(_SEED)
    projection_FC = rng.normal(size=(num_features, code_dim)) / np.sqrt(num_features)
    codes_VC = rng.normal(size=(num_codes, code_dim))
    codes_VC /= np.linalg.norm(codes_VC, axis=1, keepdims=True)
    return projection_FC.astype(np.float32), codes_VC.astype(np.float32)
