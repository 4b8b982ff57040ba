"""The ring self-test that runs when a program starts: a ring that sends wrong values must never reach a loss."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from overlapfx.ops import ring


def check_rings(mesh: Mesh) -> None:
    """Shifts every device's own number by one and by minus one along every mesh axis, and along all of them flattened.

    On a mesh with several axes a permute along one of them holds one ring per position on the others. Some versions of
    XLA filled all but one of those rings with zeros, which is why numbers start at 1 and each ring is compared by
    itself. Raises RuntimeError with the axis, the shift, the devices and their values where a device did not receive
    its neighbour's value.
    """
    names = tuple(mesh.axis_names)
    rings = [(name,) for name in names] + ([names] if len(names) > 1 else [])
    cases = [(axes, by) for axes in rings for by in (1, -1)]

    def shift_all(number: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(ring.shift(number, axes, by) for axes, by in cases)

    spec = PartitionSpec(*names)
    shape = tuple(mesh.shape[name] for name in names)
    numbers = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    sent = jax.make_array_from_callback(shape, jax.NamedSharding(mesh, spec), lambda index: numbers[index])
    shifted = jax.shard_map(shift_all, mesh=mesh, in_specs=spec, out_specs=(spec,) * len(cases))
    for (axes, by), received in zip(cases, jax.jit(shifted)(sent), strict=True):
        _compare(received, _expected(numbers, names, axes, by), axes, by)


def _expected(numbers: np.ndarray, names: tuple[str, ...], axes: tuple[str, ...], by: int) -> np.ndarray:
    """What each device should hold: along `axes`, flattened major to minor, device i the number of device i - by."""
    if axes == names:
        return np.roll(numbers.ravel(), by).reshape(numbers.shape)
    return np.roll(numbers, by, axis=names.index(axes[0]))


def _compare(received: jax.Array, expected: np.ndarray, axes: tuple[str, ...], by: int) -> None:
    """Compares the shards that this process can see."""
    for shard in received.addressable_shards:
        got, want = int(np.asarray(shard.data).item()), int(expected[shard.index].item())
        if got != want:
            raise RuntimeError(
                f"The ring self-test failed: after a shift by {by} along {' and '.join(axes)}, {shard.device} holds "
                f"{got} instead of its neighbour's {want}; this version of JAX cannot be used on this mesh."
            )
