"""Compares the copies that several devices hold of the same values."""

from __future__ import annotations

import collections
import zlib
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from overlapfx.train.names import leaf_names
from overlapfx.train.stops import NumericalError


def check_replicas(step: int, state: Any) -> None:
    """Compares, bit by bit, every shard of `state` with the other devices' copies of it.

    Copies are made by the same arithmetic on the same values, so they differ only where a device, its memory or a link
    is faulty, or where something that should be replicated is not. Every array is copied to the host. All processes of
    a job have to call.

    Raises:
      NumericalError: two copies differ; the sentence names the leaf and the devices.
    """
    leaves = [_data(leaf) for leaf in jax.tree.leaves(state)]
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    sums = _sums(leaves, devices)
    for name, leaf, of_device in zip(leaf_names(state), leaves, sums, strict=True):
        copies: dict[str, list[jax.Device]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            copies.setdefault(str(index), []).append(device)
        for holders in copies.values():
            found = {device: int(of_device[devices.index(device)]) for device in holders}
            usual = collections.Counter(found.values()).most_common(1)[0][0]
            odd = [str(device) for device, value in found.items() if value != usual]
            if odd:
                good = next(device for device, value in found.items() if value == usual)
                raise NumericalError(
                    f"Step {step}: {', '.join(odd)} and {good} hold different values of {name}, which should be equal; "
                    "nothing was saved: find out which device is faulty, then resume from the newest checkpoint."
                )


def _data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _sums(leaves: list[jax.Array], devices: list[jax.Device]) -> np.ndarray:
    """uint32 [leaves, devices]: a checksum of what each device holds of each leaf."""
    own = [device for device in devices if device.process_index == jax.process_index()]
    sums = np.zeros((len(leaves), len(own)), np.uint32)
    for row, leaf in zip(sums, leaves, strict=True):
        for shard in leaf.addressable_shards:
            row[own.index(shard.device)] = zlib.crc32(np.ascontiguousarray(shard.data).tobytes())
    if jax.process_count() == 1:
        return sums
    return np.concatenate(multihost_utils.process_allgather(sums), axis=1)
