"""Chooses how each collective of a problem runs."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from overlapfx.config import Overlap
from overlapfx.plan.chains import Piece, halves
from overlapfx.plan.cost import Pricing, Work, environment, twins
from overlapfx.plan.pattern import Operand, Problem, Result
from overlapfx.plan.slots import Slot

# Straight code lets the compiler's scheduler see every transfer; beyond this ring size its compile time is not worth
# it.
MAX_STRAIGHT_SHARDS = 16
DEFAULT_STRIPES = 4
MARGIN = 0.02  # a decomposition must promise more than the predictions are wrong by


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one problem runs: one collective is decomposed, all others are whole collectives before or after it.

    twins: scatters of other results over the same axes, decomposed in the same way, one after the other.
    """

    slot: Slot | None
    method: str = "blocking"
    direction: str = "one"
    unroll: int = 1
    interleave: str = "halves"
    loop: bool = False
    stripe_label: str = ""
    stripes: int = 1
    accum_dtype: str = "float32"
    reason: str = ""
    downgrades: tuple[str, ...] = ()
    twins: tuple[Slot, ...] = ()
    seconds: float = 0.0  # predicted
    whole_seconds: float = 0.0  # predicted with nothing decomposed

    def members(self) -> dict[int, Slot]:
        """The decomposed collectives by the index of their operand or result."""
        return {s.index: s for s in (self.slot, *self.twins) if s is not None}

    @property
    def how(self) -> str:
        """In a few words."""
        if self.slot is None:
            return "blocking"
        where = f"{self.slot.kind} {self.slot.label}"
        if self.method == "ring":
            return f"ring, {where}, {self.direction}, unroll {self.unroll}{', loop' if self.loop else ''}"
        if self.method == "stripe":
            return f"{self.stripes} stripes of {self.stripe_label}, {where}"
        return f"{self.method}, {where}"


@dataclasses.dataclass(frozen=True)
class CallSite:
    """What was decided at one call, recorded while tracing; `order` says who orders its instructions, by what means.

    flops: 2 * multiply-adds of its products on one device.
    """

    name: str
    specs: tuple[str, ...]
    slots: tuple[Slot, ...]
    plan: Plan
    order: str = "compiler"
    ways: tuple[Plan, ...] = ()  # considered, fastest first
    flops: float = 0.0

    def line(self) -> str:
        """One line for a log."""
        slots = ", ".join(
            f"{s.kind} {s.label} over {'*'.join(s.axes)}={s.num_shards} ({s.wire_bytes} B)" for s in self.slots
        )
        how = self.plan.how
        notes = "".join(f"; {d}" for d in self.plan.downgrades)
        how += "" if self.order == "compiler" else f", order {self.order}"
        return (
            f"{self.name}: {' + '.join(self.specs)} [{slots or 'no collective'}] -> {how} ({self.plan.reason}{notes})"
        )


_recorder: contextvars.ContextVar[list[CallSite] | None] = contextvars.ContextVar("overlapfx_sites", default=None)


@contextlib.contextmanager
def record_sites() -> Iterator[list[CallSite]]:
    """Collects the CallSite of every collective einsum traced inside, forward and backward.

    A function that jit has traced before is not traced again and records nothing.
    """
    sites: list[CallSite] = []
    token = _recorder.set(sites)
    try:
        yield sites
    finally:
        _recorder.reset(token)


def record(site: CallSite) -> None:
    """Adds a site to the innermost `record_sites`, if there is one."""
    sites = _recorder.get()
    if sites is not None:
        sites.append(site)


def choose(
    slots: Sequence[Slot],
    overlap: Overlap,
    sizes: Mapping[tuple[str, int], Mapping[str, int]],
    work: Work,
) -> tuple[Plan, tuple[Plan, ...]]:
    """The fastest way as predicted, with all that were considered, fastest first (nothing decomposed has MARGIN ahead).

    sizes: full label sizes of the array that each slot speaks about; one letter may differ between right operands.
    Considered are, in mode "auto", nothing decomposed, and each collective by each method that is legal for it, in each
    direction, with unroll 1 and that of `overlap`; less where `overlap` says which. Mode "on" decomposes whatever the
    prediction. What was asked for and cannot be had is downgraded, and the plan says why.
    """
    if not slots:
        return Plan(None, reason="nothing to communicate", accum_dtype=overlap.accum_dtype), ()
    if overlap.mode == "off" or overlap.method == "blocking":
        why = "mode off" if overlap.mode == "off" else "method blocking"
        return Plan(None, reason=why, accum_dtype=overlap.accum_dtype), ()
    pricing = Pricing(work, slots, environment())
    downgrades: list[str] = []
    whole = Plan(None, accum_dtype=overlap.accum_dtype, seconds=pricing.whole())
    plans = [whole] if overlap.mode == "auto" and overlap.method == "auto" else []
    for slot in _candidates(slots, overlap, downgrades):
        plans += _decomposed(slot, slots, overlap, sizes[slot.kind, slot.index], work.problem, pricing)
    plans.sort(key=lambda plan: plan.seconds * (1 - MARGIN if plan.slot is None else 1))
    best = plans[0]
    reason = f"{best.seconds * 1e3:.3g} ms predicted, {whole.seconds * 1e3:.3g} ms whole"
    downgrades += best.downgrades
    best = dataclasses.replace(best, reason=reason, downgrades=tuple(downgrades), whole_seconds=whole.seconds)
    return best, tuple(plans)


def _candidates(slots: Sequence[Slot], overlap: Overlap, downgrades: list[str]) -> list[Slot]:
    """Collectives that could be decomposed, one of each set of twins; given a method, the one that moves the most."""
    found = list(slots)
    if overlap.method in ("prefetch", "exchange"):
        kind = "gather" if overlap.method == "prefetch" else "scatter"
        found = [s for s in slots if s.kind == kind]
        if not found:
            downgrades.append(f"{overlap.method} needs a {kind}: ring instead")
            found = list(slots)
    if overlap.method != "auto":
        found = [max(found, key=lambda s: s.wire_bytes)]
    return [s for i, s in enumerate(found) if s not in (t for before in found[:i] for t in twins(before, slots))]


def _decomposed(
    slot: Slot,
    slots: Sequence[Slot],
    overlap: Overlap,
    label_sizes: Mapping[str, int],
    problem: Problem,
    pricing: Pricing,
) -> list[Plan]:
    """All ways to decompose one collective."""
    plans = []
    for method in _methods(slot, overlap):
        notes: list[str] = []
        method = _legal_method(problem, slot, method, label_sizes, notes)
        if notes and overlap.method == "auto":
            continue  # what it would be instead is there by itself
        stripe_label = _stripe_label(problem, slot, label_sizes) if method == "stripe" else ""
        stripes = min(DEFAULT_STRIPES, label_sizes.get(stripe_label, 1))
        for direction in _directions(slot, overlap, method):
            for unroll in _unrolls(slot, overlap, method):
                said = list(notes)
                way = _legal_direction(slot, overlap, method, direction, said)
                count = _legal_unroll(slot, overlap, method, way, unroll, said)
                plans.append(
                    Plan(
                        slot=slot,
                        method=method,
                        direction=way,
                        unroll=count,
                        interleave=_interleave(slot, overlap),
                        loop=method == "ring" and slot.num_shards > MAX_STRAIGHT_SHARDS,
                        stripe_label=stripe_label,
                        stripes=stripes,
                        accum_dtype=overlap.accum_dtype,
                        twins=twins(slot, slots),
                        seconds=pricing.decomposed(slot, method, way, count, stripes),
                        downgrades=tuple(said),
                    )
                )
    return plans


def _methods(slot: Slot, overlap: Overlap) -> tuple[str, ...]:
    if overlap.method != "auto":
        return (overlap.method,)
    return ("ring", "stripe", "prefetch") if slot.kind == "gather" else ("ring",)


def _directions(slot: Slot, overlap: Overlap, method: str) -> tuple[str, ...]:
    if method not in ("ring", "prefetch") or overlap.direction != "auto":
        return (overlap.direction,)
    if slot.num_shards == 2:
        return ("one",)
    halved = ("two",) if len(halves(Piece(0, slot.shard_size))) == 2 else ()
    return ("one", *halved, "two_whole")


def _unrolls(slot: Slot, overlap: Overlap, method: str) -> tuple[int, ...]:
    """Where the method is open, unroll is the most that may be."""
    if overlap.method == "auto" and method == "ring" and slot.kind == "scatter":
        return tuple(sorted({1, overlap.unroll}))
    return (overlap.unroll,)


def _interleave(slot: Slot, overlap: Overlap) -> str:
    # On two devices the paper's form costs no extra hop and keeps the einsums whole.
    if overlap.interleave == "auto":
        return "parity" if slot.num_shards == 2 else "halves"
    return overlap.interleave


def _legal_unroll(slot: Slot, overlap: Overlap, method: str, direction: str, unroll: int, downgrades: list[str]) -> int:
    splits = method == "ring" and slot.kind == "scatter" and _interleave(slot, overlap) == "halves"
    largest = halves(Piece(0, slot.shard_size))[0].size if direction == "two" else slot.shard_size
    if unroll == 2 and splits and largest < 2:
        downgrades.append(f"a shard of {slot.shard_size} cannot be split into two interleaved chains: unroll 1 instead")
        return 1
    return unroll


def _legal_method(
    problem: Problem, slot: Slot, method: str, label_sizes: Mapping[str, int], downgrades: list[str]
) -> str:
    if (method == "prefetch" and slot.kind == "scatter") or (method == "exchange" and slot.kind == "gather"):
        return "ring"  # _candidates has recorded why
    if method == "prefetch" and slot.num_shards > MAX_STRAIGHT_SHARDS:
        # It runs early only where nothing stands between it and what is computed meanwhile, as a loop would.
        downgrades.append(
            f"a prefetch is written out, which {slot.num_shards} shards are too many for ({MAX_STRAIGHT_SHARDS} at "
            "most): ring instead"
        )
        return "ring"
    if method == "stripe" and not _stripe_label(problem, slot, label_sizes):
        downgrades.append(f"no other label of {slot.kind} {slot.label} can be cut into stripes: ring instead")
        return "ring"
    return method


def _stripe_label(problem: Problem, slot: Slot, label_sizes: Mapping[str, int]) -> str:
    """The largest label, other than the communicated one, along which results can be assembled piece by piece."""
    array: Operand | Result = (problem.operands if slot.kind == "gather" else problem.results)[slot.index]
    sharded = {label for label, _ in (array.gather if isinstance(array, Operand) else array.scatter)}
    if slot.kind == "gather":
        results = [problem.results[t.out] for t in problem.terms if slot.index in t.operands()]
        usable = [c for c in array.labels if c not in sharded and all(c in r.labels for r in results)]
    else:
        usable = [c for c in array.labels if c not in sharded]
    usable = [c for c in usable if label_sizes[c] > 1]
    return max(usable, key=lambda c: label_sizes[c], default="")


def _legal_direction(slot: Slot, overlap: Overlap, method: str, direction: str, downgrades: list[str]) -> str:
    if method not in ("ring", "prefetch"):
        if overlap.direction not in ("auto", "one"):
            downgrades.append(f"{method} has no direction: {overlap.direction} is ignored")
        return "one"
    if direction == "auto":  # stripe that became a ring
        direction = "two_whole"
    if direction == "two" and len(halves(Piece(0, slot.shard_size))) < 2:
        downgrades.append(f"a shard of {slot.shard_size} has no halves for two directions: two_whole instead")
        direction = "two_whole"
    if direction == "two_whole" and slot.num_shards == 2:
        downgrades.append("a ring of 2 has one neighbour: one direction instead")
        direction = "one"
    return direction
