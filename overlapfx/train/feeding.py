"""Which rows of every batch a process has to read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding


def process_share(
    sharding: NamedSharding,
    global_batch: int,
    *,
    process: int | None = None,
    owner: Callable[[Any], int] = operator.attrgetter("process_index"),
) -> tuple[int, int]:
    """(index, count): a process feeds the index-th of `count` equal parts of the rows of a batch.

    Processes whose devices hold the same rows, since an axis over which the batch is not sharded spans them, have the
    same index: they feed the same part. Where the rows of a process are not one run of the batch, the order of rows in
    it differs from that of a single process, not what it holds.

    sharding: of an array whose first dimension is the batch. process: this one if None. owner: of a device.
    Raises ValueError if processes need parts of different size, or parts that overlap.
    """
    rows: dict[int, set[tuple[int, int]]] = {}
    places: Mapping[Any, tuple[slice, ...]] = sharding.devices_indices_map((global_batch,))
    for device, index in places.items():
        start, stop, _ = index[0].indices(global_batch)
        rows.setdefault(owner(device), set()).add((start, stop))
    parts = sorted({frozenset(own) for own in rows.values()}, key=min)
    if len({len(part) for part in parts}) > 1 or len(frozenset().union(*parts)) < sum(map(len, parts)):
        axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
        raise ValueError(
            f"the mesh {axes} over {len(rows)} processes gives them parts of a batch that overlap or differ in size; "
            f"choose a mesh in which each process has whole rows, or as many processes as divide the data axis."
        )
    return parts.index(frozenset(rows[jax.process_index() if process is None else process])), len(parts)
