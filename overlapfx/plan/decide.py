"""Chooses how each collective of a problem runs."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from overlapfx.config import Overlap
from overlapfx.plan.chains import Piece, halves
from overlapfx.plan.pattern import Axes, Operand, Problem, Result, num_shards

# Straight code lets the compiler's scheduler see every transfer; beyond this ring size its compile time is not worth
# it.
MAX_STRAIGHT_SHARDS = 8
# A ring cuts its einsum into as many pieces as it has devices. The weight gradient of a 1024B model, scattered over 256
# devices, took five times its arithmetic in such pieces (time line on v4).
MAX_AUTO_SHARDS = 16
DEFAULT_STRIPES = 4


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


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one problem runs: at most one slot is decomposed, all others are blocking collectives before or after it."""

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


@dataclasses.dataclass(frozen=True)
class CallSite:
    """What was decided at one call, recorded while tracing."""

    name: str
    specs: tuple[str, ...]
    slots: tuple[Slot, ...]
    plan: Plan

    def line(self) -> str:
        """One line for a log."""
        slots = ", ".join(
            f"{s.kind} {s.label} over {'*'.join(s.axes)}={s.num_shards} ({s.wire_bytes} B)" for s in self.slots
        )
        how = self.plan.method if self.plan.slot is None else _how(self.plan)
        notes = "".join(f"; {d}" for d in self.plan.downgrades)
        return (
            f"{self.name}: {' + '.join(self.specs)} [{slots or 'no collective'}] -> {how} ({self.plan.reason}{notes})"
        )


def _how(plan: Plan) -> str:
    assert plan.slot is not None
    where = f"{plan.slot.kind} {plan.slot.label}"
    if plan.method == "ring":
        return f"ring of {where}, direction {plan.direction}, unroll {plan.unroll}{', loop' if plan.loop else ''}"
    if plan.method == "stripe":
        return f"{plan.stripes} stripes of {plan.stripe_label} around {where}"
    return f"{plan.method} of {where}"


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


def choose(
    name: str,
    problem: Problem,
    slots: Sequence[Slot],
    overlap: Overlap,
    sizes: Mapping[tuple[str, int], Mapping[str, int]],
) -> Plan:
    """The rule until a cost model decides: decompose the one collective that moves the most bytes.

    In mode "auto" only collectives over at most MAX_AUTO_SHARDS devices count. The method, when not given: a gathered
    label that is contracted is striped, because rings would read and write a running sum once per shard; every other
    collective is a ring. Rings of more than two devices send whole shards both ways. Whatever was asked for and cannot
    be had is downgraded, and the plan says why.
    """
    if not slots:
        return Plan(None, reason="nothing to communicate", accum_dtype=overlap.accum_dtype)
    if overlap.mode == "off" or overlap.method == "blocking":
        why = "mode off" if overlap.mode == "off" else "method blocking"
        return Plan(None, reason=why, accum_dtype=overlap.accum_dtype)
    # sizes: full label sizes of the array that each slot speaks about; one letter may differ between right operands.
    downgrades: list[str] = []
    candidates = list(slots)
    if overlap.mode == "auto" and overlap.method == "auto":
        candidates = [s for s in slots if s.num_shards <= MAX_AUTO_SHARDS]
        if not candidates:
            return Plan(
                None,
                reason=f"every collective is over more than {MAX_AUTO_SHARDS} devices",
                accum_dtype=overlap.accum_dtype,
            )
    if overlap.method in ("prefetch", "exchange"):
        kind = "gather" if overlap.method == "prefetch" else "scatter"
        candidates = [s for s in slots if s.kind == kind]
        if not candidates:
            downgrades.append(f"{overlap.method} needs a {kind}: ring instead")
            candidates = list(slots)
    slot = max(candidates, key=lambda s: s.wire_bytes)
    label_sizes = sizes[slot.kind, slot.index]
    method = _method(problem, slot, overlap, label_sizes, downgrades)
    stripe_label = _stripe_label(problem, slot, label_sizes) if method == "stripe" else ""
    direction = _direction(slot, overlap, method, downgrades)
    return Plan(
        slot=slot,
        method=method,
        direction=direction,
        unroll=_unroll(slot, overlap, method, direction, downgrades),
        interleave=_interleave(slot, overlap),
        loop=method == "ring" and slot.num_shards > MAX_STRAIGHT_SHARDS,
        stripe_label=stripe_label,
        stripes=min(DEFAULT_STRIPES, label_sizes.get(stripe_label, 1)),
        accum_dtype=overlap.accum_dtype,
        reason=f"most bytes of {len(slots)} collective{'s' if len(slots) > 1 else ''}",
        downgrades=tuple(downgrades),
    )


def _interleave(slot: Slot, overlap: Overlap) -> str:
    # On two devices the paper's form costs no extra hop and keeps the einsums whole.
    if overlap.interleave == "auto":
        return "parity" if slot.num_shards == 2 else "halves"
    return overlap.interleave


def _unroll(slot: Slot, overlap: Overlap, method: str, direction: str, downgrades: list[str]) -> int:
    splits = method == "ring" and slot.kind == "scatter" and _interleave(slot, overlap) == "halves"
    largest = halves(Piece(0, slot.shard_size))[0].size if direction == "two" else slot.shard_size
    if overlap.unroll == 2 and splits and largest < 2:
        downgrades.append(f"a shard of {slot.shard_size} cannot be split into two interleaved chains: unroll 1 instead")
        return 1
    return overlap.unroll


def _method(
    problem: Problem, slot: Slot, overlap: Overlap, label_sizes: Mapping[str, int], downgrades: list[str]
) -> str:
    method = overlap.method
    if (method == "prefetch" and slot.kind == "scatter") or (method == "exchange" and slot.kind == "gather"):
        return "ring"  # choose() has recorded why
    if method == "auto":
        contracting = slot.kind == "gather" and problem.role(slot.index, slot.label) == "contracting"
        method = "stripe" if contracting and _stripe_label(problem, slot, label_sizes) else "ring"
    if method == "stripe" and not _stripe_label(problem, slot, label_sizes):
        downgrades.append(f"no other label of {slot.kind} {slot.label} can be cut into stripes: ring instead")
        method = "ring"
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


def _direction(slot: Slot, overlap: Overlap, method: str, downgrades: list[str]) -> str:
    if method not in ("ring", "prefetch"):
        if overlap.direction not in ("auto", "one"):
            downgrades.append(f"{method} has no direction: {overlap.direction} is ignored")
        return "one"
    direction = overlap.direction
    if direction == "auto":
        # Half shards both ways would keep every round alike, but cost twice the messages and copies of halves.
        direction = "two_whole" if slot.num_shards > 2 else "one"
    if direction == "two" and len(halves(Piece(0, slot.shard_size))) < 2:
        downgrades.append(f"a shard of {slot.shard_size} has no halves for two directions: two_whole instead")
        direction = "two_whole"
    if direction == "two_whole" and slot.num_shards == 2:
        downgrades.append("a ring of 2 has one neighbour: one direction instead")
        direction = "one"
    return direction
