"""What became of every collective einsum of a step: planned by the gate, scheduled by the compiler."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from overlapfx.aot.program import Program
from overlapfx.aot.timeline import Timeline
from overlapfx.plan.decide import CallSite, Plan
from overlapfx.plan.slots import Slot

# The kinds of transfer that a decomposition is made of; all else in its scope belongs to collectives left as they were.
_KINDS = {
    "ring": ("collective-permute",),
    "prefetch": ("collective-permute",),
    "stripe": ("all-gather", "reduce-scatter"),
    "exchange": ("all-to-all",),
}
NOT_PLANNED = "not planned"
NOT_SCHEDULED = "planned, not scheduled"
IN_PART = "scheduled in part"
SCHEDULED = "scheduled"


@dataclasses.dataclass(frozen=True)
class SiteReport:
    """One site of the program with all its executions: layers, passes, recomputation.

    `calls` are the decisions recorded under this name, one where all layers are alike; `executions` says how often a
    step runs them, NaN if there is no telling. `transfers` counts the asynchronous transfers of the decomposition in
    the program text, `hidden` those with work beside them. Seconds are per step: `compute_s` in the scope of the site,
    `exposed_s` waiting at its asynchronous transfers, `blocking_s` in its blocking collectives.
    """

    name: str
    calls: tuple[CallSite, ...]
    executions: float
    transfers: int
    hidden: int
    compute_s: float
    exposed_s: float
    blocking_s: float

    @property
    def planned(self) -> bool:
        """Whether the gate decomposed a collective here."""
        return any(call.plan.slot is not None for call in self.calls)

    @property
    def scheduled_s(self) -> float:
        """Seconds per step that the time line gives this site."""
        return self.compute_s + self.exposed_s + self.blocking_s

    @property
    def predicted_s(self) -> float | None:
        """What the gate predicted for it; None if the gate had nothing to decide, or executions are not known."""
        if not all(call.ways for call in self.calls) or math.isnan(self.executions):
            return None
        return self.executions * sum(call.plan.seconds for call in self.calls) / len(self.calls)

    @property
    def error(self) -> float | None:
        """Of the prediction, as part of what was scheduled; positive if it was too long."""
        predicted_s = self.predicted_s
        return None if predicted_s is None or not self.scheduled_s else predicted_s / self.scheduled_s - 1

    @property
    def state(self) -> str:
        """Planned or not, and if so whether the compiler scheduled work between starts and dones (case C13)."""
        if not self.planned:
            return NOT_PLANNED
        if self.hidden == 0:
            return NOT_SCHEDULED
        return SCHEDULED if self.hidden == self.transfers else IN_PART

    @property
    def decision(self) -> str:
        """How the collectives of this site run."""
        return "; ".join(dict.fromkeys(_decision(call) + _order(call) for call in self.calls))

    @property
    def slots(self) -> tuple[Slot, ...]:
        """Every collective of this site, each a candidate for decomposition."""
        return tuple(dict.fromkeys(slot for call in self.calls for slot in call.slots))

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it was decided so, and what was downgraded."""
        return tuple(dict.fromkeys(why for call in self.calls for why in (call.plan.reason, *call.plan.downgrades)))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "specs": sorted({spec for call in self.calls for spec in call.specs}),
            "state": self.state,
            "decision": self.decision,
            "reasons": list(self.reasons),
            "candidates": [dataclasses.asdict(slot) for slot in self.slots],
            "ways": [[_way(way) for way in call.ways] for call in self.calls],
            "transfers": self.transfers,
            "hidden_transfers": self.hidden,
            "executions": None if math.isnan(self.executions) else self.executions,
            "predicted_s": self.predicted_s,
            "scheduled_s": self.scheduled_s,
            "compute_s": self.compute_s,
            "exposed_s": self.exposed_s,
            "blocking_s": self.blocking_s,
        }


def _way(way: Plan) -> dict[str, Any]:
    """What was considered, with predicted seconds."""
    fields = {name: getattr(way, name) for name in ("method", "direction", "unroll", "seconds")}
    return {"slot": None if way.slot is None else f"{way.slot.kind} {way.slot.label}", **fields}


def report_sites(
    calls: Sequence[CallSite], program: Program, timeline: Timeline, products: Mapping[str, float]
) -> tuple[SiteReport, ...]:
    """Joins the decisions recorded while the step was traced with the compiled program and its time line.

    They meet in the names of scopes. A site is traced more than once (for the loss, for its gradient, for
    recomputation); equal records count once. products: FLOPs that one device executes, by scope; those of a site tell
    how often it runs.
    """
    by_name: dict[str, list[CallSite]] = {}
    for call in dict.fromkeys(calls):
        by_name.setdefault(call.name, []).append(call)
    ring_sizes = {t.name: len(t.groups[0]) for t in program.transfers() if t.groups}
    return tuple(
        _report(name, tuple(made), timeline, ring_sizes, _executions(name, made, products))
        for name, made in by_name.items()
    )


def _executions(name: str, calls: Sequence[CallSite], products: Mapping[str, float]) -> float:
    inside = scope_pattern(name)
    executed = sum(flops for scope, flops in products.items() if inside.search(scope))
    return executed * len(calls) / sum(call.flops for call in calls)


def _report(
    name: str, calls: tuple[CallSite, ...], timeline: Timeline, ring_sizes: Mapping[str, int], executions: float
) -> SiteReport:
    inside = scope_pattern(name)
    # (kind of transfer, size of the ring): the other collectives of a site may run asynchronously too.
    wanted = {
        (kind, call.plan.slot.num_shards)
        for call in calls
        if call.plan.slot is not None
        for kind in _KINDS[call.plan.method]
    }
    kinds = {kind for kind, _ in wanted}
    moved = [
        t
        for t in timeline.transfers
        if t.medium in ("ici", "dcn") and t.count and inside.search(t.op_name)
        # Permutes have no groups; only rings are made of them.
        if ((t.kind, ring_sizes[t.name]) in wanted if t.name in ring_sizes else t.kind in kinds)
    ]
    seconds = {"compute": 0.0, "exposed": 0.0, "blocking": 0.0}
    for (category, _, instruction), spent in timeline.ledger.items():
        if category in seconds and inside.search(timeline.op_names.get(instruction, "")):
            seconds[category] += spent
    return SiteReport(
        name,
        calls,
        executions,
        len(moved),
        sum(t.is_overlapped for t in moved),
        seconds["compute"],
        seconds["exposed"],
        seconds["blocking"],
    )


def scope_pattern(name: str) -> re.Pattern[str]:
    """Matches the scope `name` as a whole part of a path such as `jit(step)/jvp(mlp.up)/while/body`."""
    return re.compile(rf"(?:^|[/(]){re.escape(name)}(?:[/)]|$)")


def describe_slot(slot: Slot) -> str:
    """`gather d over x=4, 402.7 MB`: the bytes that each device receives."""
    return f"{slot.kind} {slot.label} over {'*'.join(slot.axes)}={slot.num_shards}, {slot.wire_bytes / 1e6:.3g} MB"


def _order(call: CallSite) -> str:
    return "" if call.order == "compiler" or call.plan.slot is None else f", order {call.order}"


def _decision(call: CallSite) -> str:
    return call.plan.how if call.slots else "nothing to communicate"
