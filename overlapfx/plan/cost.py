"""Predicts how long a collective einsum takes in each of the ways that it can run."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from overlapfx.chips import TPU_V4, Chip
from overlapfx.plan.chains import Piece, halves
from overlapfx.plan.pattern import Axes, Problem
from overlapfx.plan.prices import PRICES, Prices
from overlapfx.plan.slots import Slot

HOP_S = 1e-6
_SUM_BYTES = 4  # running sums and products are float32
# Found by compiling for TPU v4: every piece of an einsum takes so much longer than its arithmetic, whatever its size.
_PIECE_S = 8e-6


@dataclasses.dataclass(frozen=True)
class AxisLinks:
    """How one mesh axis lies on the physical network.

    native: links that a native collective over the axis has per device. ring_load: how many messages of one ring step
    share the busiest link. hops: links between ring neighbours. members: devices of one group along each dimension
    of the torus.
    """

    native: float = 2.0
    ring_load: float = 1.0
    hops: int = 1
    members: tuple[int, ...] = ()

    @property
    def is_summed(self) -> bool:
        """Whether an AllGather or ReduceScatter is made of an AllReduce of the whole array, zeros where there is no
        shard: twice the bytes, nothing beside it. TPU compilers do that for groups with more than two devices in each
        of three dimensions: found by compiling.
        """
        return sum(n > 2 for n in self.members) > 2


@dataclasses.dataclass(frozen=True)
class Environment:
    """The chip and the network that sites are priced for; an axis that is not named lies on a closed ring."""

    chip: Chip = TPU_V4
    axes: Mapping[str, AxisLinks] = dataclasses.field(default_factory=dict)

    @property
    def prices(self) -> Prices:
        """Of pieces of einsums; those of TPU v4 for a chip that was never priced."""
        return PRICES.get(self.chip.name, PRICES[TPU_V4.name])

    def links(self, axes: Axes) -> AxisLinks:
        """Of several axes at once: a native collective uses the links of all, a ring the worst of them."""
        found = [self.axes.get(axis, AxisLinks()) for axis in axes]
        native, members = sum(a.native for a in found), zip(*(a.members for a in found if a.members), strict=True)
        return AxisLinks(
            native, max(a.ring_load for a in found), max(a.hops for a in found), tuple(map(math.prod, members))
        )


_environment: contextvars.ContextVar[Environment | None] = contextvars.ContextVar("overlapfx_environment", default=None)


@contextlib.contextmanager
def pricing(environment: Environment) -> Iterator[None]:
    """Sites traced inside are priced for `environment`, unless an outer block has said otherwise."""
    token = _environment.set(_environment.get() or environment)
    try:
        yield
    finally:
        _environment.reset(token)


def environment() -> Environment:
    """What sites are priced for here: TPU v4 on closed rings if nothing was said."""
    return _environment.get() or Environment()


@dataclasses.dataclass(frozen=True)
class Work:
    """The arithmetic of a problem on one device: label sizes of each result's products (operands gathered), operands
    that are known early, and how many row stripes compute while others communicate.
    """

    problem: Problem
    sizes: Mapping[int, Mapping[str, int]]
    early: frozenset[int]
    num_stripes: int = 1

    def flops(self) -> float:
        """Of all products: a multiplication and an addition are two."""
        return sum(2.0 * math.prod(self.sizes[t.out].values()) for t in self.problem.terms)

    def result_bytes(self, results: Sequence[int]) -> float:
        """Of products in float32, before any scatter."""
        labels = {i: self.problem.results[i].labels for i in results}
        return _SUM_BYTES * sum(math.prod(self.sizes[i][c] for c in labels[i]) for i in results)


def native(slot: Slot, where: Environment) -> float:
    """Seconds of a native AllGather or ReduceScatter with nothing beside it."""
    links = where.links(slot.axes)
    if links.is_summed:
        zeros = slot.wire_bytes if slot.kind == "gather" else 0
        return all_reduce(slot, where) + zeros * where.prices.copy_s_per_byte
    return _moved(slot, where) + slot.num_shards / 2 * HOP_S


def all_reduce(slot: Slot, where: Environment) -> float:
    """Seconds of a native AllReduce, which moves the bytes of this ReduceScatter (or AllGather) twice."""
    return 2 * _moved(slot, where) + slot.num_shards * HOP_S


def _moved(slot: Slot, where: Environment) -> float:
    return slot.wire_bytes / (where.links(slot.axes).native * (where.chip.per_device().link_bytes_per_s or 0.0))


class Pricing:
    """The ways of one problem, priced for an environment."""

    def __init__(self, work: Work, slots: Sequence[Slot], where: Environment) -> None:
        self.work, self.slots, self.where, self.prices = work, slots, where, where.prices
        chip = where.chip.per_device()
        self._peak, self._link = chip.peak_bf16_flops, chip.link_bytes_per_s or 0.0
        self.compute_s = self._products(range(len(work.problem.results)))

    def whole(self) -> float:
        """Nothing decomposed: gathers as early as their operands are known if the chip can, scatters blocking."""
        return self.compute_s + sum(self._exposed(s) for s in self.slots)

    def decomposed(self, slot: Slot, method: str, direction: str, unroll: int, stripes: int) -> float:
        """One collective decomposed, and its twins with it, the others whole."""
        same = [s for s in self.slots if s == slot or _is_twin(s, slot)]
        others = sum(self._exposed(s) for s in self.slots if s not in same)
        results = self._results(same)
        rest = self.compute_s - self._products(results)
        return rest + others + sum(self._own(s, method, direction, unroll, stripes) for s in same)

    def _own(self, slot: Slot, method: str, direction: str, unroll: int, stripes: int) -> float:
        if method != "ring":
            return self._other(slot, method, direction, stripes)
        if slot.kind == "scatter":
            return self._ring_scatter(slot, direction, unroll)
        return self._ring_gather(slot, direction)

    def native(self, slot: Slot) -> float:
        """A native collective with nothing beside it."""
        return native(slot, self.where)

    def ring(self, slot: Slot, direction: str) -> float:
        """Its transfers alone, as a ring of permutes."""
        links, steps = self.where.links(slot.axes), slot.num_shards - 1
        shard = slot.wire_bytes / steps
        larger = halves(Piece(0, slot.shard_size))[0].size / slot.shard_size
        sent = {"one": steps, "two": steps * larger, "two_whole": math.ceil(steps / 2)}[direction]
        return sent * shard * links.ring_load / self._link + steps * links.hops * HOP_S

    def _exposed(self, slot: Slot) -> float:
        native = self.native(slot)
        # No TPU compiler has made a ReduceScatter asynchronous so far.
        if slot.kind == "scatter" or not self._can_gather_beside_work(slot):
            return native
        if slot.index in self.work.early:
            return max(0.0, native - self.compute_s)
        return native / self.work.num_stripes

    def _can_gather_beside_work(self, slot: Slot) -> bool:
        return self.where.chip.async_all_gather and not self.where.links(slot.axes).is_summed

    def _results(self, slots: Sequence[Slot]) -> list[int]:
        terms = self.work.problem.terms
        found = {
            t.out for t in terms for s in slots if (s.index in t.operands() if s.kind == "gather" else s.index == t.out)
        }
        return sorted(found)

    def _products(self, results: Sequence[int], width: int | None = None) -> float:
        """Einsums in pieces `width` wide; whole ones are as wide as the labels that only their right operand has."""
        problem, total = self.work.problem, 0.0
        for t in problem.terms:
            if t.out in results:
                sizes, (lhs, rhs) = self.work.sizes[t.out], (problem.operands[i].labels for i in t.operands())
                whole = math.prod(sizes[c] for c in problem.results[t.out].labels if c in rhs and c not in lhs)
                flops = 2.0 * math.prod(sizes.values())  # a multiplication and an addition are two
                total += flops / self._peak * self._ratio(whole if width is None else width)
        return total

    def _ratio(self, width: int) -> float:
        """Time over arithmetic at peak of an einsum so many columns wide, between the widths that were priced."""
        known = sorted(self.prices.columns)
        if width <= known[0]:
            return self.prices.columns[known[0]] * known[0] / max(width, 1)
        above = next((w for w in known if w >= width), known[-1])
        below = max(w for w in known if w <= width)
        part = (width - below) / (above - below) if above > below else 0.0
        return self.prices.columns[below] * (1 - part) + self.prices.columns[above] * part

    def _ring_scatter(self, slot: Slot, direction: str, unroll: int) -> float:
        """Rounds of partial einsums, each round's transfers beside the other chains' einsums of the next."""
        chains = unroll * (1 if direction == "one" else 2)
        parts = [Piece(0, slot.shard_size)]
        for _ in range((direction == "two") + (unroll == 2)):
            parts = [half for part in parts for half in halves(part)]
        round_s = sum(p.size * self._products([slot.index], p.size) for p in parts) / slot.shard_size / slot.num_shards
        out_bytes = self.work.result_bytes([slot.index])
        round_s += self.prices.sum_s_per_byte * out_bytes / slot.num_shards + chains * _PIECE_S
        transfer_s = self.ring(slot, direction) / (slot.num_shards - 1)
        # A chain waits for its own transfer, beside which the einsums of the other chains run, or another row stripe.
        others = 1.0 if self.work.num_stripes > 1 else (chains - 1) / chains
        waits = (slot.num_shards - 1) * max(0.0, transfer_s - round_s * others)
        joined = out_bytes / slot.num_shards * self.prices.copy_s_per_byte
        if direction == "two_whole":  # two arrivals meet one einsum, and the compiler adds them apart from it
            joined += 3 * out_bytes / (self.where.chip.per_device().hbm_bytes_per_s or math.inf)
        return slot.num_shards * round_s + waits + joined + self._sliced(slot)

    def _ring_gather(self, slot: Slot, direction: str) -> float:
        """Rounds of one einsum per arrival, whose results are added or placed; arrivals do not wait for einsums."""
        results = self._results([slot])
        contracting = self.work.problem.role(slot.index, slot.label) == "contracting"
        per_byte = self.prices.sum_s_per_byte * 4 if contracting else self.prices.copy_s_per_byte
        moved = self.work.result_bytes(results) * (slot.num_shards if contracting else 1)
        compute = self._products(results, None if contracting else slot.shard_size) + moved * per_byte
        return compute + max(0.0, self.ring(slot, direction) - compute * (1 - 1 / slot.num_shards)) + self._sliced(slot)

    def _other(self, slot: Slot, method: str, direction: str, stripes: int) -> float:
        results = self._results([slot])
        compute = self._products(results)
        copy = self.prices.copy_s_per_byte
        if method == "prefetch":
            gathered = slot.wire_bytes * slot.num_shards / (slot.num_shards - 1)
            hidden = self.compute_s if slot.index in self.work.early else 0.0
            return compute + max(0.0, self.ring(slot, direction) - hidden) + gathered * copy
        if method == "exchange":
            links = self.where.links(slot.axes)
            # An all-to-all crosses n/4 links per byte and pair of links, where a ring crosses one.
            crossing = self.native(slot) * max(1.0, slot.num_shards / 4 / max(links.native / 2, 1))
            return compute + crossing + self.work.result_bytes([slot.index]) * copy
        first = self.native(slot) / (2 * stripes - 1)
        if slot.kind == "scatter":
            return compute + self.native(slot) + self.work.result_bytes([slot.index]) / slot.num_shards * copy
        placed = self.work.result_bytes(results) / 2 * copy
        if not self._can_gather_beside_work(slot):
            return compute + self.native(slot) + placed
        return first + max(compute, self.native(slot) - first) + placed

    def _sliced(self, slot: Slot) -> float:
        """Copies of the operand that the pieces are cut from, in bfloat16."""
        terms = self.work.problem.terms
        cut = 0.0
        for t in terms:
            if slot.kind == "gather" and slot.index not in t.operands():
                continue
            if slot.kind == "scatter" and t.out != slot.index:
                continue
            for i in t.operands():
                labels = self.work.problem.operands[i].labels
                if slot.label in labels and not (slot.kind == "gather" and i == slot.index):
                    cut += 2 * math.prod(self.work.sizes[t.out][c] for c in labels)
        # Row stripes cut the same weights.
        return cut * self.prices.copy_s_per_byte / self.work.num_stripes


def _is_twin(other: Slot, slot: Slot) -> bool:
    return (
        slot.kind == other.kind == "scatter"
        and other.index != slot.index
        and (other.label, other.axes, other.shard_size) == (slot.label, slot.axes, slot.shard_size)
    )


def twins(slot: Slot, slots: Sequence[Slot]) -> tuple[Slot, ...]:
    """The same ReduceScatter of other results."""
    return tuple(s for s in slots if _is_twin(s, slot))
