"""Digests follow the values alone: not the mesh, not the place, and they miss no flipped bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.train.digest import digests


def of(array: object) -> int:
    return digests({"a": array})["a"]


def test_by_hand() -> None:
    # 1 * 1 + 2 * 3 + 3 * 5 + 4 * 7
    assert of(np.array([[1, 2], [3, 4]], np.int32)) == 50
    assert of(jnp.array([[1, 2], [3, 4]], jnp.int32)) == 50
    assert of(np.array([True, False, True])) == 6
    assert of(np.array(-1, np.int32)) == 2**32 - 1
    assert of(np.array([1 + (2 << 32)], np.int64)) == 1 + 2 * 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint8, jnp.bool_])
def test_equal_on_every_mesh_and_on_the_host(dtype: object) -> None:
    values = np.random.default_rng(0).normal(size=(8, 4, 2)).astype(np.float32)
    host = np.asarray(jnp.asarray(values).astype(dtype))
    found = {of(host), of(jnp.asarray(host))}
    for shape in ((8, 1), (2, 4), (1, 1)):
        devices = jax.devices()[: shape[0] * shape[1]]
        mesh = jax.make_mesh(shape, ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=devices)
        for spec in (P(), P("y", "x"), P(("y",), None, None)):
            found.add(of(jax.device_put(host, NamedSharding(mesh, spec))))
    assert len(found) == 1


@given(st.integers(0, 11), st.integers(0, 31))
@settings(max_examples=40, deadline=None)
def test_every_flipped_bit_is_seen(index: int, bit: int) -> None:
    words = np.arange(12, dtype=np.uint32) * 2654435761
    other = words.copy()
    other[index] ^= np.uint32(1 << bit)
    assert of(words.view(np.float32)) != of(other.view(np.float32))


def test_swapped_values_are_seen() -> None:
    assert of(np.array([1.0, 2.0, 3.0])) != of(np.array([2.0, 1.0, 3.0]))
