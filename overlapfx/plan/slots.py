"""The collectives of a problem."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from overlapfx.plan.pattern import Axes, Problem, num_shards


@dataclasses.dataclass(frozen=True)
class Slot:
    """One collective of a problem: the AllGather of an operand or the ReduceScatter of a result, along one label."""

    kind: str  # "gather" or "scatter"
    index: int  # of the operand or the result
    label: str
    axes: Axes
    num_shards: int
    shard_size: int  # of the label
    wire_bytes: int  # received by each device


def find_slots(
    problem: Problem,
    shapes: Sequence[Sequence[int]],
    item_bytes: Sequence[int],
    sizes: Mapping[int, Mapping[str, int]],
    mesh_axes: Mapping[str, int],
    accum_bytes: int,
) -> tuple[Slot, ...]:
    """Every collective of a problem. sizes: for each result, the full size of each of its labels."""
    slots = []
    for i, operand in enumerate(problem.operands):
        extra = 1  # gathers of one operand run one after the other: the later ones move what the earlier ones brought
        for label, axes in operand.gather:
            n = num_shards(axes, mesh_axes)
            shard = math.prod(shapes[i]) * item_bytes[i] * extra
            size = shapes[i][operand.labels.index(label)]
            slots.append(Slot("gather", i, label, axes, n, size, (n - 1) * shard))
            extra *= n
    for i, result in enumerate(problem.results):
        elements = math.prod(sizes[i][label] for label in result.labels)
        for label, axes in result.scatter:
            n = num_shards(axes, mesh_axes)
            elements //= n
            slots.append(Slot("scatter", i, label, axes, n, sizes[i][label] // n, (n - 1) * elements * accum_bytes))
    return tuple(slots)
