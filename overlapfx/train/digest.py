"""Digests of arrays by value: equal on every mesh, different after any single flipped bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def digests(arrays: Mapping[str, Any]) -> dict[str, int]:
    """For each array the sum over its words w_i of w_i * (2 i + 1), modulo 2**32.

    i counts the words in row-major order of the global array; a word is an element, or half of one with 8 bytes. Such
    sums are exact in any order, so the digest does not depend on how the array is sharded, and since the weights are
    odd every flipped bit changes it. It is computed where the array is; all processes that share it have to call.

    Args:
      arrays: JAX arrays (no typed keys) on the same devices, or NumPy arrays.
    """
    on_device = {name: array for name, array in arrays.items() if isinstance(array, jax.Array)}
    found = {name: _of_host(np.asarray(array)) for name, array in arrays.items() if name not in on_device}
    if on_device:
        found |= zip(on_device, np.asarray(_of_devices(list(on_device.values()))).tolist(), strict=True)
    return {name: int(found[name]) for name in arrays}


@jax.jit
def _of_devices(arrays: list[jax.Array]) -> jax.Array:
    return jnp.stack([_of_one(array) for array in arrays])


def _of_one(array: jax.Array) -> jax.Array:
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    words = lax.bitcast_convert_type(array, _WORDS[min(array.dtype.itemsize, 4)]).astype(jnp.uint32)
    index = jnp.zeros(words.shape, jnp.uint32)
    for dim in range(words.ndim):
        stride = math.prod(words.shape[dim + 1 :]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride)
    return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)


def _of_host(array: np.ndarray) -> int:
    words = np.ascontiguousarray(array).reshape(-1).view(_WORDS[min(array.dtype.itemsize, 4)]).astype(np.uint32)
    return int(np.sum(words * (2 * np.arange(len(words), dtype=np.uint32) + 1), dtype=np.uint32))
