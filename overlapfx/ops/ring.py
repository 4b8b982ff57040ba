"""The one place that moves data around a ring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from overlapfx import compat


def size(axes: tuple[str, ...]) -> int:
    """Number of devices in the ring over `axes`, flattened major to minor."""
    return lax.axis_size(axes)


def index(axes: tuple[str, ...]) -> Int[Array, ""]:
    """This device's place in the ring over `axes`; equals the id of the shard that it owns."""
    if size(axes) == 1:
        return compat.vary(jnp.zeros((), jnp.int32), frozenset(axes))
    return lax.axis_index(axes)


def shift(x: Shaped[Array, "*shape"], axes: tuple[str, ...], by: int) -> Shaped[Array, "*shape"]:
    """What the device `by` places back sent: device i receives the value of device (i - by) mod N.

    by = -1 is the paper's pattern {1 -> 0}, {2 -> 1}, ..., {0 -> N-1}. On a mesh with more axes one permute holds many
    disjoint rings, one per position on the other axes. A shift by a multiple of N moves nothing.
    """
    num_devices = size(axes)
    if by % num_devices == 0:
        return x
    ordered, place = _in_mesh_order(axes)
    return lax.ppermute(x, ordered, [(place[i], place[(i + by) % num_devices]) for i in range(num_devices)])


def _in_mesh_order(axes: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    """`axes` as the mesh orders them, and each place in the ring over `axes` as a place in that order.

    ppermute, unlike all other collectives, numbers devices in mesh order whatever order it is given.
    """
    ordered = tuple(axis for axis in jax.sharding.get_abstract_mesh().axis_names if axis in axes)
    numbers = np.arange(size(axes)).reshape([lax.axis_size(axis) for axis in ordered])
    return ordered, numbers.transpose([ordered.index(axis) for axis in axes]).ravel().tolist()


def all_gather(x: Shaped[Array, "..."], axes: tuple[str, ...], dim: int) -> Shaped[Array, "..."]:
    """The blocking AllGather: shards concatenated along `dim` in ring order."""
    if size(axes) == 1:
        return compat.vary(x, frozenset(axes))
    return lax.all_gather(x, axes, axis=dim, tiled=True)


def psum_scatter(x: Shaped[Array, "..."], axes: tuple[str, ...], dim: int) -> Shaped[Array, "..."]:
    """The blocking ReduceScatter: the sum over the ring, this device's shard of `dim`."""
    if size(axes) == 1:
        return compat.vary(x, frozenset(axes))
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def all_to_all(x: Shaped[Array, "..."], axes: tuple[str, ...], dim: int) -> Shaped[Array, "..."]:
    """Shard j of `dim` goes to device j; received shards are stacked along a new leading dimension, by source."""
    num_devices = size(axes)
    if num_devices == 1:
        return compat.vary(x, frozenset(axes))[None]
    parts = x.reshape(*x.shape[:dim], num_devices, x.shape[dim] // num_devices, *x.shape[dim + 1 :])
    return lax.all_to_all(jax.numpy.moveaxis(parts, dim, 0), axes, split_axis=0, concat_axis=0, tiled=True)
