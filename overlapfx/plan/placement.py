"""Which device of a slice takes which place in the mesh, so that rings run between physical neighbours."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from overlapfx.plan.torus import Coord, Torus, native_links, permute_traffic

Factors = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class AxisReport:
    """How one mesh axis lies on the torus.

    `max_hops` and `mean_hops` are over the ring steps i -> i+1 of every ring of the axis; `hops` counts the steps of
    one ring by length; `is_cycle` says that every step is one hop; `ring_load` is the number of shards over the busiest
    link when all rings step at once (1 is free of contention); `native_links` the links' worth of bandwidth of a native
    collective; `members` the devices of one group along each dimension of the torus.
    """

    axis: str
    size: int
    max_hops: int
    mean_hops: float
    hops: Mapping[int, int]
    is_cycle: bool
    ring_load: float
    native_links: float
    members: tuple[int, ...]

    def __str__(self) -> str:
        if self.size == 1:
            return f"{self.axis}=1"
        shape = "a physical cycle" if self.is_cycle else "no physical cycle"
        steps = ", ".join(f"{count} of {length}" for length, count in sorted(self.hops.items()))
        return (
            f"{self.axis}={self.size}: {shape}, ring steps by hops: {steps}; {self.ring_load:g} shard(s) on the "
            f"busiest link per step; a native collective has {self.native_links:g} link(s)"
        )


@dataclasses.dataclass(frozen=True)
class Placement:
    """Devices of a slice in mesh order.

    `axes` names the mesh axes outermost first with their sizes; `order[i]` is the coordinate of partition i, the last
    axis fastest; `reports` holds one AxisReport per axis, in mesh order.
    """

    torus: Torus
    axes: Mapping[str, int]
    order: tuple[Coord, ...]
    reports: tuple[AxisReport, ...]

    def groups(self, axis: str) -> list[list[Coord]]:
        """Device coordinates of every group along `axis`, each in ring order."""
        return axis_groups(self.order, self.axes, axis)


def place(torus: Torus, axes: Mapping[str, int]) -> Placement:
    """Choose the device order for mesh `axes` (name to size, outermost first) on `torus`.

    The last axis is served first: it gets a physical cycle where one exists, a snake over two or more dimensions if
    need be. A line that does not wrap is folded, so that no step is longer than two hops. Axis sizes need not be
    products of whole torus dimensions. Raises ValueError when the mesh does not fill the slice.
    """
    if math.prod(axes.values()) != torus.num_devices or min(axes.values(), default=0) < 1:
        product = " x ".join(f"{name}={size}" for name, size in axes.items())
        chips = "x".join(map(str, torus.shape))
        raise ValueError(
            f"mesh {product} needs {math.prod(axes.values())} devices but the slice {chips} has {torus.num_devices}; "
            f"choose axis sizes whose product is that number."
        )
    # Dimensions are shared out by the physical cycles; where permutes must not cross the wrap-around link, the ring
    # inside a dimension is then folded, which costs a hop of latency but no bandwidth.
    tables = torus.step_tables()
    layout = min(_layouts(torus, axes), key=lambda item: _score(torus, tables, axes, item))
    order = _order(torus.for_permutes(), axes, layout)
    return Placement(torus, dict(axes), order, tuple(_report(torus, axes, order, axis) for axis in axes))


def axis_groups(order: Sequence[Coord], axes: Mapping[str, int], axis: str) -> list[list[Coord]]:
    """Coordinates of every group along `axis` when `order` lists a mesh of `axes`, last axis fastest."""
    names = list(axes)
    stride = math.prod(axes[name] for name in names[names.index(axis) + 1 :])
    starts = [i for i in range(len(order)) if (i // stride) % axes[axis] == 0]
    return [[order[start + step * stride] for step in range(axes[axis])] for start in starts]


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Per axis and torus dimension: how many positions the axis takes there, how far apart they are."""

    factors: Mapping[str, Factors]
    strides: Mapping[str, Factors]


def _layouts(torus: Torus, axes: Mapping[str, int]) -> Iterator[_Layout]:
    """Every way to factor the torus dimensions among the axes, with every nesting order inside a shared dimension."""
    served = [name for name in reversed(list(axes)) if axes[name] > 1]
    for factors in _factorings(torus.sizes, [axes[name] for name in served]):
        by_axis = dict(zip(served, factors, strict=True))
        nestings = []
        for dim in range(len(torus.sizes)):
            sharing = [name for name in served if by_axis[name][dim] > 1]
            nestings.append(list(itertools.permutations(sharing)))
        for nesting in itertools.product(*nestings):
            strides = {name: [1] * len(torus.sizes) for name in served}
            for dim, inner_first in enumerate(nesting):
                stride = 1
                for name in inner_first:
                    strides[name][dim] = stride
                    stride *= by_axis[name][dim]
            yield _Layout(by_axis, {name: tuple(s) for name, s in strides.items()})


def _factorings(sizes: Sequence[int], products: Sequence[int]) -> Iterator[list[Factors]]:
    """Ways to give each product one factor per dimension so that the factors of a dimension multiply to its size."""
    if not products:
        if math.prod(sizes) == 1:
            yield []
        return
    options = [[f for f in range(1, size + 1) if size % f == 0 and products[0] % f == 0] for size in sizes]
    for factors in itertools.product(*options):
        if math.prod(factors) == products[0]:
            rest = [size // f for size, f in zip(sizes, factors, strict=True)]
            for tail in _factorings(rest, products[1:]):
                yield [factors, *tail]


def _closes(torus: Torus, dim: int, factor: int, stride: int) -> bool:
    """Whether `factor` positions `stride` apart form a cycle of equal steps along `dim`."""
    return factor == 2 or (torus.is_ring(dim) and factor * stride == torus.sizes[dim])


def _ring(torus: Torus, factors: Factors, strides: Factors) -> list[Coord]:
    """Offsets of an axis in ring order: a cycle of single strides where one exists."""
    dims = [dim for dim, factor in enumerate(factors) if factor > 1]
    if not dims:
        return [(0,) * len(factors)]
    if len(dims) == 1:
        dim, factor = dims[0], factors[dims[0]]
        line = list(range(factor))
        if not _closes(torus, dim, factor, strides[dim]):
            line = [*range(0, factor, 2), *reversed(range(1, factor, 2))]
        ring = [{dim: position} for position in line]
    else:
        even = [dim for dim in dims if factors[dim] % 2 == 0]
        row_dim = even[0] if even else dims[0]
        path = _snake([dim for dim in dims if dim != row_dim], factors)
        ring = _cycle(row_dim, factors[row_dim], path)
    return [tuple(where.get(dim, 0) * strides[dim] for dim in range(len(factors))) for where in ring]


def _snake(dims: Sequence[int], factors: Factors) -> list[dict[int, int]]:
    """A path through a box that moves one position at a time."""
    if not dims:
        return [{}]
    inner = _snake(dims[1:], factors)
    path: list[dict[int, int]] = []
    for position in range(factors[dims[0]]):
        turn = inner if position % 2 == 0 else inner[::-1]
        path += [{dims[0]: position, **rest} for rest in turn]
    return path


def _cycle(row_dim: int, rows: int, path: Sequence[dict[int, int]]) -> list[dict[int, int]]:
    """A closed walk over rows x path: to and fro over all but the first position, back along it.

    With an odd number of rows no such walk exists without wrap-around, and a plain snake is returned.
    """
    back = [] if rows % 2 else list(reversed(range(1, rows)))
    forth = path[1:] if back else path
    ring = [{row_dim: 0, **path[0]}] if back else []
    for row in range(rows):
        turn = forth if row % 2 == 0 else forth[::-1]
        ring += [{row_dim: row, **rest} for rest in turn]
    return ring + [{row_dim: row, **path[0]} for row in back]


def _score(torus: Torus, tables: list[list[int]], axes: Mapping[str, int], layout: _Layout) -> tuple:
    """Sort key: longest step of the last axis, then of the others, then fewer dimensions per axis, then total steps."""
    longest, spread, total = [], [], 0
    for axis in reversed(list(axes)):
        if axes[axis] == 1:
            continue
        ring = _ring(torus, layout.factors[axis], layout.strides[axis])
        hops = _hops(tables, list(zip(ring, [*ring[1:], ring[0]], strict=True)))
        longest.append(max(hops))
        spread.append(sum(factor > 1 for factor in layout.factors[axis]))
        total += sum(hops)
    return (longest, spread, total, [layout.factors[axis][::-1] for axis in layout.factors])


def _hops(tables: list[list[int]], pairs: list[tuple[Coord, Coord]]) -> list[int]:
    """Hops between the two devices of every pair."""
    return [sum(abs(table[q - p]) for table, p, q in zip(tables, a, b, strict=True)) for a, b in pairs]


def _order(torus: Torus, axes: Mapping[str, int], layout: _Layout) -> tuple[Coord, ...]:
    """Coordinates of the partitions, the last axis fastest."""
    zero = (0,) * len(torus.sizes)
    rings = [
        _ring(torus, layout.factors[axis], layout.strides[axis]) if size > 1 else [zero] for axis, size in axes.items()
    ]
    return tuple(tuple(map(sum, zip(*offsets, strict=True))) for offsets in itertools.product(*rings))


def _report(torus: Torus, axes: Mapping[str, int], order: Sequence[Coord], axis: str) -> AxisReport:
    """Measure the rings of `axis` on the finished order."""
    size = axes[axis]
    if size == 1:
        return AxisReport(axis, 1, 0, 0.0, {}, False, 0.0, 0.0, (1,) * len(torus.sizes))
    groups = axis_groups(order, axes, axis)
    pairs = [(a, b) for g in groups for a, b in zip(g, [*g[1:], g[0]], strict=True)]
    hops = Counter(_hops(torus.for_permutes().step_tables(), pairs))
    per_ring = {length: count // len(groups) for length, count in hops.items()}
    mean = sum(length * count for length, count in hops.items()) / len(pairs)
    load = permute_traffic(torus, pairs).max_load
    links = native_links(torus, groups)
    members = tuple(len(set(along)) for along in zip(*groups[0], strict=True))
    return AxisReport(axis, size, max(hops), mean, per_ring, max(hops) == 1, load, links, members)
