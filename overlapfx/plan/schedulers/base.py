"""The graph of instructions that a scheduler puts in order, with what an order costs."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

COMPUTE, START, DONE = "compute", "start", "done"
# Transfers that a device keeps track of at once. Not published for TPUs: an assumption, far above what a ring needs.
MAX_IN_FLIGHT = 32


@dataclasses.dataclass(frozen=True)
class Node:
    """One instruction of one device.

    kind: COMPUTE occupies the processor for `seconds`; START hands a transfer to the links and takes no time; DONE
        waits until the transfer of its first operand, a START, has arrived.
    operands: positions in the graph of the nodes whose values it reads. after: of nodes that must come before it for
        another reason.
    loads: seconds by link, of a START's transfer or of a blocking collective (a COMPUTE that lasts until it is over);
        transfers queue on each link. latency_s: paid once per transfer.
    size_bytes: memory that its result needs; shares: the nodes whose memory its result lies in (views, tuples, updates
        in place; a DONE shares that of its START).
    scratch_bytes: memory needed only while it runs.
    is_copy: a START or DONE of a copy inside the device. It keeps its place among the computations, since what it
        copies to is small, and it is not counted among the transfers in flight.
    """

    name: str
    kind: str = COMPUTE
    operands: tuple[int, ...] = ()
    seconds: float = 0.0
    loads: tuple[tuple[int, float], ...] = ()
    latency_s: float = 0.0
    size_bytes: int = 0
    shares: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    scratch_bytes: int = 0
    is_copy: bool = False


@dataclasses.dataclass(frozen=True)
class Graph:
    """Instructions in the order in which they were written, which is one legal order; `results` are needed at the end.

    Raises ValueError for a node that needs one written after it, or for a DONE that does not wait for a START.
    """

    nodes: tuple[Node, ...]
    results: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for i, node in enumerate(self.nodes):
            late = [j for j in (*node.operands, *node.after) if not 0 <= j < i]
            if late:
                raise ValueError(
                    f"node {i} ({node.name}) needs node {late[0]}, which does not stand before it; write the graph in "
                    f"a legal order."
                )
            if node.kind == DONE and not (node.operands and self.nodes[node.operands[0]].kind == START):
                raise ValueError(
                    f"node {i} ({node.name}) is a done whose first operand is no start; give it its start."
                )

    @functools.cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes that must come before it, each once."""
        return tuple(tuple(dict.fromkeys((*node.operands, *node.after))) for node in self.nodes)

    @functools.cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node those that must come after it."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, needed in enumerate(self.needs):
            for j in needed:
                found[j].append(i)
        return tuple(map(tuple, found))

    @functools.cached_property
    def memory(self) -> tuple[frozenset[int], ...]:
        """For each node the nodes that own the memory in which its value lies."""
        found: list[frozenset[int]] = []
        for i, node in enumerate(self.nodes):
            own = frozenset((i,)) if node.size_bytes else frozenset()
            found.append(own.union(*(found[j] for j in node.shares)))
        return tuple(found)

    @functools.cached_property
    def durations(self) -> tuple[float, ...]:
        """Seconds that pass at each node when nothing is hidden or queued: a DONE lasts as long as its transfer."""
        wires = [max((load for _, load in node.loads), default=0.0) + node.latency_s for node in self.nodes]
        return tuple(
            0.0 if node.kind == START else wires[node.operands[0]] if node.kind == DONE else node.seconds + wires[i]
            for i, node in enumerate(self.nodes)
        )

    @functools.cached_property
    def lead_s(self) -> tuple[float, ...]:
        """For each node the longest chain of durations that must pass before it, with its own."""
        found: list[float] = []
        for needed, duration in zip(self.needs, self.durations, strict=True):
            found.append(max((found[j] for j in needed), default=0.0) + duration)
        return tuple(found)

    @functools.cached_property
    def tail_s(self) -> tuple[float, ...]:
        """For each node the longest chain of durations from it to the end, with its own."""
        found = [0.0] * len(self.nodes)
        for i in reversed(range(len(self.nodes))):
            found[i] = max((found[j] for j in self.users[i]), default=0.0) + self.durations[i]
        return tuple(found)

    def touched(self, i: int) -> frozenset[int]:
        """Owners of the memory that node i reads or writes; a transfer reads its source until its DONE."""
        node = self.nodes[i]
        read = [*node.operands, *(self.nodes[node.operands[0]].operands if node.kind == DONE else ())]
        return self.memory[i].union(*(self.memory[j] for j in read))


@dataclasses.dataclass(frozen=True)
class Line:
    """What an order costs: seconds in total and waiting at DONEs, most memory at once, most transfers at once."""

    total_s: float
    exposed_s: float
    peak_bytes: int
    most_in_flight: int


class Links:
    """Queues of the links, one behind each; transfers occupy them in the order in which they are sent."""

    def __init__(self) -> None:
        self._busy_until: defaultdict[int, float] = defaultdict(float)

    def send(self, node: Node, now_s: float) -> float:
        """Occupies the links of a START or blocking collective sent at `now_s`; returns when all has arrived."""
        end = now_s
        for link, load_s in node.loads:
            self._busy_until[link] = max(now_s, self._busy_until[link]) + load_s
            end = max(end, self._busy_until[link])
        return end + node.latency_s

    def free_at(self, node: Node) -> float:
        """When all links that the node uses are free."""
        return max((self._busy_until[link] for link, _ in node.loads), default=0.0)


def simulate(graph: Graph, order: Sequence[int]) -> Line:
    """The time line of `order`: one row that computes or waits, beside it the transfers in flight."""
    links = Links()
    arrival: dict[int, float] = {}
    now = exposed = 0.0
    for i in order:
        node = graph.nodes[i]
        if node.kind == START:
            arrival[i] = links.send(node, now)
        elif node.kind == DONE:
            waited = max(0.0, arrival[node.operands[0]] - now)
            now, exposed = now + waited, exposed + waited
        else:
            now = (links.send(node, now) if node.loads else now) + node.seconds
    return Line(now, exposed, peak_bytes(graph, order), most_in_flight(graph, order))


def most_in_flight(graph: Graph, order: Iterable[int]) -> int:
    """Most transfers that are started, not yet done, at once."""
    flying = most = 0
    for i in order:
        if not graph.nodes[i].is_copy:
            flying += {START: 1, DONE: -1}.get(graph.nodes[i].kind, 0)
            most = max(most, flying)
    return most


def peak_bytes(graph: Graph, order: Sequence[int]) -> int:
    """Most memory of the graph's own values at once.

    A value lives from its instruction to the last one that touches it, `results` to the end; while an instruction runs
    its operands live beside its result.
    """
    last: dict[int, int] = {}
    for place, i in enumerate(order):
        for owner in graph.touched(i):
            last[owner] = place
    kept = frozenset[int]().union(*(graph.memory[i] for i in graph.results))
    dying: defaultdict[int, int] = defaultdict(int)
    for owner, place in last.items():
        if owner not in kept:
            dying[place] += graph.nodes[owner].size_bytes
    live = peak = 0
    for place, i in enumerate(order):
        live += graph.nodes[i].size_bytes
        peak = max(peak, live + graph.nodes[i].scratch_bytes)
        live -= dying[place]
    return peak


def check_order(graph: Graph, order: Sequence[int]) -> None:
    """Raises ValueError unless `order` holds every node once, each after all that it needs."""
    place = {i: k for k, i in enumerate(order)}
    if len(order) != len(graph.nodes) or len(place) != len(graph.nodes):
        raise ValueError(f"an order of {len(graph.nodes)} nodes must hold each once; it holds {len(order)} entries.")
    for i, needed in enumerate(graph.needs):
        for j in needed:
            if place[j] > place[i]:
                raise ValueError(
                    f"{graph.nodes[i].name} stands before {graph.nodes[j].name}, which it needs; the order is illegal."
                )


def is_worth_waiting(now_s: float, ready_s: float, chain_s: float, filler_s: float, work_s: float) -> bool:
    """Whether to wait until `ready_s` for a node with a chain of `chain_s` behind it, and not compute something else.

    What else there is takes `filler_s` and would delay the chain; `work_s` is all the computing that is left. Both
    estimates are lower bounds: the rest takes as long as the work or as the chain.
    """
    waiting = ready_s + max(work_s, chain_s)
    computing = now_s + max(work_s, filler_s + chain_s)
    return waiting < computing - 1e-12
