"""The time line of one device, walked along its schedule."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.network import Network, row_name
from overlapfx.aot.program import Blocking, Branch, Compute, Loop, Program, Start, Step, Transfer, Wait
from overlapfx.plan.torus import Coord, Torus

# A loop is walked until two iterations last equally long, then the rest is multiplied.
_SAME = 1e-6
_MAX_WALKED = 8
# Where waiting for a medium is booked.
_WAIT_CATEGORY = {"ici": "exposed", "dcn": "dcn", "memory": "memory", "host": "host"}
# How the compiler names instructions that it repeats rather than keep their results.
_REPEATED = re.compile(r"\.remat\d*(\.|$)")
CATEGORIES = ("compute", "exposed", "blocking", "dcn", "memory", "host")


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that occupies a row for a while.

    `row` is "compute", a link direction of the watched device (`X+`), "core", "memory", "dcn" or "host". `category` is
    one of CATEGORIES on the compute row, "transfer" elsewhere, and "repeat" for iterations that were multiplied, not
    walked; `trips` counts those. `kind` is the kind of work or of collective.
    """

    row: str
    start_s: float
    end_s: float
    category: str
    kind: str
    name: str
    op_name: str = ""
    payload_bytes: int = 0
    trips: int = 0


@dataclasses.dataclass(frozen=True)
class AsyncTransfer:
    """What became of one asynchronous transfer over all its executions, in seconds.

    `work_s` is what the processor computed between start and done, `exposed_s` what it waited at the done,
    `transfer_s` the time from start to arrival, queueing included.
    """

    name: str
    op_name: str
    kind: str
    medium: str
    payload_bytes: int
    count: float
    transfer_s: float
    work_s: float
    exposed_s: float

    @property
    def is_overlapped(self) -> bool:
        """Whether any work was scheduled between start and done."""
        return self.work_s > 0


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Where the time of one device goes, in seconds.

    `ledger` holds seconds per (category, kind, instruction), loops multiplied; the categories are CATEGORIES and add up
    to `total_s`. `rows` orders the rows for pictures. `unknown` counts constructs that were not understood, `notes`
    those that were approximated.
    """

    total_s: float
    ledger: Mapping[tuple[str, str, str], float]
    transfers: tuple[AsyncTransfer, ...]
    events: tuple[Event, ...]
    rows: tuple[str, ...]
    op_names: Mapping[str, str]
    unknown: Mapping[str, int]
    notes: Mapping[str, int]
    assumptions: Assumptions

    def seconds(self, category: str, kind: str | None = None) -> float:
        """Seconds booked under a category, or under one kind of it."""
        return sum(s for (c, k, _), s in self.ledger.items() if c == category and kind in (None, k))

    def by_kind(self, category: str) -> dict[str, float]:
        """Seconds per kind of a category, longest first."""
        kinds: defaultdict[str, float] = defaultdict(float)
        for (c, kind, _), seconds in self.ledger.items():
            if c == category:
                kinds[kind] += seconds
        return dict(sorted(kinds.items(), key=lambda item: -item[1]))

    def in_scope(self, pattern: str) -> float:
        """Seconds of everything whose path of scopes matches the regular expression `pattern` anywhere."""
        found = re.compile(pattern)
        return sum(s for (_, _, name), s in self.ledger.items() if found.search(self.op_names.get(name, "")))

    @property
    def compute_s(self) -> float:
        """Computing, copies that block included."""
        return self.seconds("compute")

    @property
    def exposed_s(self) -> float:
        """Waiting for asynchronous transfers between chips."""
        return self.seconds("exposed")

    @property
    def blocking_s(self) -> float:
        """Blocking collectives."""
        return self.seconds("blocking")

    @property
    def repeated_s(self) -> float:
        """What the compiler itself does again since memory is short, beyond the program's own recomputation."""
        return sum(seconds for (_, _, name), seconds in self.ledger.items() if _REPEATED.search(name))

    @property
    def communication_s(self) -> float:
        """Everything that the processor spends on communication between chips and slices."""
        return self.exposed_s + self.blocking_s + self.seconds("dcn")

    @property
    def communication_share(self) -> float:
        """Part of the total that is communication, 0 to 1."""
        return self.communication_s / self.total_s if self.total_s else 0.0


def walk(
    program: Program, torus: Torus, coords: Sequence[Coord], assumptions: Assumptions, watched: int = 0
) -> Timeline:
    """Walk the schedule of `program` on `torus`, partition i at `coords[i]`; rows show the links of device `watched`.

    All devices are in lockstep, so that a transfer ends when its slowest part has arrived. Raises ValueError if there
    are fewer coordinates than partitions.
    """
    if len(coords) < program.num_partitions:
        raise ValueError(
            f"program {program.name!r} runs on {program.num_partitions} devices but {len(coords)} coordinates were "
            f"given; pass the coordinates in partition order."
        )
    network = Network(torus, coords, program.transfers(), assumptions, watched)
    walker = _Walker(network, assumptions)
    walker.run(program.steps)
    walker.finish()
    used = {event.row for event in walker.events}
    links = [row_name(torus, link) for link in torus.links_from(coords[watched])]
    order = [row for row in ("compute", *links, "dcn", "memory", "host") if row in used or row in ("compute", *links)]
    unknown = Counter(program.unknown) + walker.unknown
    notes = Counter(program.notes) + walker.notes
    return Timeline(
        total_s=walker.now,
        ledger=dict(walker.ledger),
        transfers=walker.transfers(),
        events=tuple(walker.events),
        rows=tuple(dict.fromkeys(order)),
        op_names=walker.op_names,
        unknown=dict(unknown),
        notes=dict(notes),
        assumptions=assumptions,
    )


@dataclasses.dataclass(frozen=True)
class _InFlight:
    transfer: Transfer
    start_s: float
    end_s: float
    computed_s: float


class _Walker:
    """Moves the clock of one device along its steps."""

    def __init__(self, network: Network, assumptions: Assumptions) -> None:
        self.now = 0.0
        self.ledger: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        # Per asynchronous transfer: count, transfer, work, exposed.
        self.totals: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.events: list[Event] = []
        self.op_names: dict[str, str] = {}
        self.unknown: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._computed = 0.0
        self._network = network
        self._figures = assumptions
        self._in_flight: dict[str, _InFlight] = {}
        self._arrived: set[str] = set()
        self._seen: dict[str, Transfer] = {}

    def run(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Compute):
                self._compute(step)
            elif isinstance(step, Start):
                self._start(step.transfer)
            elif isinstance(step, Wait):
                self._wait(step)
            elif isinstance(step, Blocking):
                self._blocking(step.transfer)
            elif isinstance(step, Loop):
                self._loop(step)
            else:
                self._branch(step)

    def finish(self) -> None:
        """Count what was begun and never waited for."""
        if self._in_flight:
            self.unknown["transfer that nothing waits for"] += len(self._in_flight)

    def transfers(self) -> tuple[AsyncTransfer, ...]:
        return tuple(
            AsyncTransfer(
                name,
                transfer.op_name,
                transfer.kind,
                transfer.medium,
                transfer.payload_bytes,
                self.totals[name, "count"],
                self.totals[name, "transfer"],
                self.totals[name, "work"],
                self.totals[name, "exposed"],
            )
            for name, transfer in self._seen.items()
        )

    def _spend(self, seconds: float, category: str, kind: str, name: str, op_name: str, payload: int = 0) -> None:
        """Let time pass on the compute row."""
        if seconds <= 0:
            return
        self.events.append(Event("compute", self.now, self.now + seconds, category, kind, name, op_name, payload))
        self.ledger[category, kind, name] += seconds
        self.op_names[name] = op_name
        self.now += seconds

    def _compute(self, step: Compute) -> None:
        seconds = step.seconds(self._figures)
        self._computed += seconds
        self._spend(seconds, "compute", step.kind, step.name, step.op_name)

    def _send(self, transfer: Transfer) -> float:
        """Hand a transfer to the network; returns when it has arrived."""
        passage = self._network.send(transfer, self.now)
        for row, begin, end in passage.rows:
            if end > begin:
                what = (transfer.kind, transfer.name, transfer.op_name, transfer.payload_bytes)
                self.events.append(Event(row, begin, end, "transfer", *what))
        return passage.end_s

    def _start(self, transfer: Transfer) -> None:
        self._seen.setdefault(transfer.name, transfer)
        end = self._send(transfer)
        self._in_flight[transfer.name] = _InFlight(transfer, self.now, end, self._computed)

    def _wait(self, step: Wait) -> None:
        flight = self._in_flight.pop(step.key, None)
        if flight is None:
            # The two ends of an exchange between slices both wait for it; the second finds it over.
            if step.key not in self._arrived:
                self.unknown["wait for a transfer whose start was not found"] += 1
            return
        self._arrived.add(step.key)
        transfer = flight.transfer
        exposed = max(0.0, flight.end_s - self.now)
        key = transfer.name
        self.totals[key, "count"] += 1
        self.totals[key, "transfer"] += flight.end_s - flight.start_s
        self.totals[key, "work"] += self._computed - flight.computed_s
        self.totals[key, "exposed"] += exposed
        self._spend(
            exposed, _WAIT_CATEGORY[transfer.medium], transfer.kind, key, transfer.op_name, transfer.payload_bytes
        )

    def _blocking(self, transfer: Transfer) -> None:
        seconds = self._send(transfer) - self.now
        self._spend(seconds, "blocking", transfer.kind, transfer.name, transfer.op_name, transfer.payload_bytes)

    def _branch(self, step: Branch) -> None:
        """Walk the alternative that takes longest; the others leave no trace."""
        lengths = [sum(_length(s, self._figures) for s in alternative) for alternative in step.alternatives]
        if lengths:
            self.run(step.alternatives[lengths.index(max(lengths))])

    def _loop(self, loop: Loop) -> None:
        trips = 1 if loop.num_trips is None else loop.num_trips
        last = -1.0
        for walked in range(1, trips + 1):
            ledger, totals, begin, computed = self.ledger.copy(), self.totals.copy(), self.now, self._computed
            self.run(loop.body)
            duration = self.now - begin
            steady = abs(duration - last) <= _SAME * max(duration, 1e-12)
            if not (steady or walked == _MAX_WALKED):
                last = duration
                continue
            left = trips - walked
            if left == 0:
                return
            if not steady:
                self.notes[f"loop {loop.name} was not steady after {_MAX_WALKED} iterations"] += 1
            for key, seconds in self.ledger.items():
                self.ledger[key] += left * (seconds - ledger[key])
            for total, value in self.totals.items():
                self.totals[total] += left * (value - totals[total])
            self._computed += left * (self._computed - computed)
            # The queues stay as they are: what the body sent has arrived, what was sent before has its own time.
            begin, self.now = self.now, self.now + left * duration
            label = f"{loop.name}: {left} more iterations like the last"
            self.events.append(Event("compute", begin, self.now, "repeat", "loop", label, loop.op_name, trips=left))
            return


def _length(step: Step, figures: Assumptions) -> float:
    """Rough length of a step without queues, to compare alternatives: work by its price, transfers by their bytes."""
    if isinstance(step, Compute):
        return step.seconds(figures)
    if isinstance(step, Blocking):
        return step.transfer.payload_bytes / figures.link_bytes_per_s
    if isinstance(step, Loop):
        return (1 if step.num_trips is None else step.num_trips) * sum(_length(s, figures) for s in step.body)
    if isinstance(step, Branch):
        return max((sum(_length(s, figures) for s in a) for a in step.alternatives), default=0.0)
    return 0.0
