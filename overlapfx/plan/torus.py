"""The physical network of a TPU slice: its links, the route of every transfer, the load that a pattern puts on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from overlapfx.chips import Chip

Coord = tuple[int, ...]
"""Position of a device: one number per torus dimension, plus the core on the chip where a chip holds two devices."""

Link = tuple[Coord, int, int]
"""One direction of one physical link: chip it leaves, dimension, +1 or -1 (dimension `len(shape)` joins two cores)."""


@dataclasses.dataclass(frozen=True)
class Torus:
    """A box of chips with a link between neighbours, closed into rings along the dimensions that `wrap`.

    `shape` counts chips per dimension; `wrap` says per dimension whether the last chip is linked to the first;
    `cores` is the number of devices per chip (1 or 2), joined by a link that is `core_speed` times as fast as one
    between chips; `permute_wrap` is False where only native collectives may use the wrap-around links. Raises
    ValueError for sizes below 1 or unequal lengths.
    """

    shape: tuple[int, ...]
    wrap: tuple[bool, ...]
    cores: int = 1
    permute_wrap: bool = True
    # Cloud TPU documentation of TPU7x: the link between its two dies is six times as fast as a link between chips.
    core_speed: float = 6.0

    def __post_init__(self) -> None:
        if not self.shape or len(self.shape) != len(self.wrap) or min(self.shape) < 1 or self.cores not in (1, 2):
            raise ValueError(
                f"Torus(shape={self.shape}, wrap={self.wrap}, cores={self.cores}) needs one size of at least 1 and one "
                f"wrap flag per dimension, and 1 or 2 cores per chip; correct the slice description."
            )

    @classmethod
    def for_chip(cls, chip: Chip, shape: Sequence[int], permute_wrap: bool = True) -> Torus:
        """The torus of a slice of `chip`s: a dimension wraps around if its size is a multiple of `wrap_multiple`.

        Raises ValueError if the chip has no torus, or one of another number of dimensions.
        """
        if chip.torus_dims == 0 or chip.torus_dims != len(shape):
            raise ValueError(
                f"{chip.name} has a torus of {chip.torus_dims} dimensions, not of {len(shape)} as in shape "
                f"{'x'.join(map(str, shape))}; give {chip.torus_dims or 'no'} sizes."
            )
        wrap = tuple(chip.wrap_multiple is not None and size % chip.wrap_multiple == 0 for size in shape)
        return cls(tuple(shape), wrap, chip.devices_per_chip, permute_wrap)

    def for_permutes(self) -> Torus:
        """The torus as permutes see it: itself, or an open box where they must not use the wrap-around links."""
        return self if self.permute_wrap else dataclasses.replace(self, wrap=(False,) * len(self.shape))

    @property
    def num_devices(self) -> int:
        """Devices of the slice: chips times cores."""
        return math.prod(self.shape) * self.cores

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size per coordinate, the core coordinate included where a chip holds two devices."""
        return self.shape if self.cores == 1 else (*self.shape, self.cores)

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Wrap flag per coordinate; two cores of a chip have one link, so their dimension does not wrap."""
        return self.wrap if self.cores == 1 else (*self.wrap, False)

    def coordinates(self) -> list[Coord]:
        """All device positions, last coordinate fastest."""
        return list(itertools.product(*(range(size) for size in self.sizes)))

    def is_ring(self, dim: int) -> bool:
        """Whether dimension `dim` has a wrap-around link of its own (two chips share their one link either way)."""
        return self.wraps[dim] and self.sizes[dim] > 2

    def steps(self, src: int, dst: int, dim: int) -> int:
        """Signed number of hops from `src` to `dst` along `dim`, the short way round; a tie goes up."""
        size, forward = self.sizes[dim], dst - src
        if not self.is_ring(dim):
            return forward
        forward %= size
        return forward if 2 * forward <= size else forward - size

    def distance(self, src: Coord, dst: Coord) -> int:
        """Hops between two devices."""
        return sum(abs(self.steps(a, b, dim)) for dim, (a, b) in enumerate(zip(src, dst, strict=True)))

    def step_tables(self) -> list[list[int]]:
        """Per dimension the signed steps of every difference `dst - src`, negative differences as negative indices."""
        tables = []
        for dim, size in enumerate(self.sizes):
            up = [self.steps(0, to, dim) for to in range(size)]
            tables.append(up + [self.steps(at, 0, dim) for at in range(size - 1, 0, -1)])
        return tables

    def loads(self, pairs: Iterable[tuple[Coord, Coord]]) -> tuple[dict[Link, int], int]:
        """How often the routes of all (source, target) pairs cross each link, with the length of the longest route.

        A route takes one dimension after the other, as the hardware does.
        """
        crossed: dict[Link, int] = {}
        longest, ndim = 0, len(self.shape)
        tables, sizes = self.step_tables(), self.sizes
        for src, dst in pairs:
            here, length = list(src), 0
            for dim, table in enumerate(tables):
                steps = table[dst[dim] - here[dim]]
                sign = 1 if steps > 0 else -1
                length += abs(steps)
                for _ in range(abs(steps)):
                    link = (tuple(here[:ndim]), dim, sign)
                    crossed[link] = crossed.get(link, 0) + 1
                    here[dim] = (here[dim] + sign) % sizes[dim]
            longest = max(longest, length)
        return crossed, longest

    def route(self, src: Coord, dst: Coord) -> tuple[Link, ...]:
        """Directed links from `src` to `dst`, in order."""
        return tuple(self.loads([(src, dst)])[0])

    def links_from(self, device: Coord) -> list[Link]:
        """The outgoing links of the chip of `device` (of the device itself for the link between two cores)."""
        chip = device[: len(self.shape)]
        found: list[Link] = []
        for dim, size in enumerate(self.shape):
            for sign in (1, -1):
                inside = 0 <= chip[dim] + sign < size
                if size > 1 and (inside or self.is_ring(dim)):
                    found.append((chip, dim, sign))
        if self.cores == 2:
            found.append((chip, len(self.shape), 1 if device[-1] == 0 else -1))
        return found


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one transfer pattern asks of the network.

    `load` maps each directed link to how many payloads cross it (a fraction for collectives that move parts);
    `hops` is the length in links of the longest chain of steps, which pays the latency once per link.
    """

    load: Mapping[Link, float]
    hops: int

    @property
    def max_load(self) -> float:
        """Payloads over the busiest link; 0 when nothing moves."""
        return max(self.load.values(), default=0.0)


def permute_traffic(torus: Torus, pairs: Iterable[tuple[Coord, Coord]]) -> Traffic:
    """Traffic of a permute, payload = bytes that each source sends; a device that sends to itself uses no link."""
    load, hops = torus.for_permutes().loads(pairs)
    return Traffic(_weighted(torus, load), hops)


def _weighted(torus: Torus, load: Mapping[Link, int]) -> dict[Link, float]:
    """Payloads per link in terms of the time on a link between chips."""
    core = len(torus.shape)
    return {link: count / torus.core_speed if link[1] == core else float(count) for link, count in load.items()}


@dataclasses.dataclass(frozen=True)
class Span:
    """One dimension that a device group spans: members along it, links it offers, hops between neighbours.

    `links` counts how many links' worth of bandwidth one group has here: 2 on a closed ring of neighbours, 1 on a
    line (every byte enters the end device by one link), less where groups interleave on the same links.
    """

    dim: int
    members: int
    links: float
    stride: int
    closed: bool
    used: frozenset[Link]


def group_spans(torus: Torus, groups: Sequence[Sequence[Coord]]) -> list[Span]:
    """How device groups of equal shape lie on the torus, one Span per dimension that they spread over.

    A group that is no box of coordinates is treated as one ring in its listed order (`dim` is -1).
    """
    first = groups[0]
    values = [sorted({member[dim] for member in first}) for dim in range(len(torus.sizes))]
    if math.prod(len(v) for v in values) != len(first):
        return [_ring_span(torus, -1, groups)]
    spans = []
    for dim, along in enumerate(values):
        if len(along) < 2:
            continue
        lines: dict[Coord, list[Coord]] = {}
        for number, group in enumerate(groups):
            for member in sorted(group):
                lines.setdefault((number, *member[:dim], *member[dim + 1 :]), []).append(member)
        spans.append(_ring_span(torus, dim, list(lines.values())))
    return spans


def _ring_span(torus: Torus, dim: int, lines: Sequence[Sequence[Coord]]) -> Span:
    """Overlay the two directions of a ring over every line; the busiest link sets the bandwidth of each."""
    onward = [(a, b) for line in lines for a, b in itertools.pairwise(line)]
    closing = [(line[-1], line[0]) for line in lines]
    there_and_back = [*onward, *closing, *((b, a) for a, b in onward), *((b, a) for a, b in closing)]
    load, _ = torus.loads(there_and_back)
    _, stride = torus.loads(onward)
    _, back = torus.loads(closing)
    members = len(lines[0])
    closed = members > 2 and back <= stride
    return Span(dim, members, 2.0 / max(_weighted(torus, load).values()), stride, closed, frozenset(load))


# Payloads that cross the combined links, per member count n: `payload` is the whole gathered or unreduced array.
_SHARE = {
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "collective-broadcast": lambda n: (n - 1) / n,
}


def collective_traffic(torus: Torus, kind: str, groups: Sequence[Sequence[Coord]]) -> Traffic:
    """Traffic of a native collective, which may use the links of every dimension that its groups span at once.

    `kind` is `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all` or `collective-broadcast`. The payload is the
    whole array of one device: the gathered result, the unscattered or unreduced operand. Raises ValueError for an
    unknown kind.
    """
    if kind not in _SHARE and kind != "all-to-all":
        raise ValueError(f"no traffic model for collective {kind!r}; use one of {', '.join([*_SHARE, 'all-to-all'])}.")
    num = len(groups[0]) if groups else 0
    if num < 2:
        return Traffic({}, 0)
    spans = group_spans(torus, groups)
    hops = sum(span.stride * (span.members // 2 if span.closed else span.members - 1) for span in spans)
    if kind == "all-to-all":
        # Half of a device's bytes cross the middle of each dimension: n^2/8 blocks per link of a closed ring.
        load = {link: s.members / (4 * s.links) for s in spans for link in s.used}
        return Traffic(load, hops)
    share = _SHARE[kind](num) / sum(span.links for span in spans)
    return Traffic({link: share for span in spans for link in span.used}, hops * (2 if kind == "all-reduce" else 1))


def native_links(torus: Torus, groups: Sequence[Sequence[Coord]]) -> float:
    """Links' worth of bandwidth that a native collective over these groups has per device; 0 for groups of one."""
    return sum(s.links for s in group_spans(torus, groups)) if groups and len(groups[0]) > 1 else 0.0
