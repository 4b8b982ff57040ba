"""The paper's algorithm 2: from the results backwards, so that every transfer has what follows it to hide behind."""

from __future__ import annotations

import heapq

from overlapfx.plan.schedulers import memory
from overlapfx.plan.schedulers.base import COMPUTE, DONE, MAX_IN_FLIGHT, START, Graph, Links, is_worth_waiting


def order(graph: Graph, cap: int = MAX_IN_FLIGHT) -> list[int]:
    """Schedules from the results backwards; at most `cap` transfers are in flight at once.

    The clock runs backwards as well. A node is available once all its users are scheduled, and ready once its time has
    come: a START is ready when its transfer, begun backwards at its DONE, has had its time on the links, every other
    node at once. Until then it is pending. Among ready nodes come first STARTs, then DONEs, then what uses a DONE, so
    that transfers open early backwards, which is late in the program, with all that is still to be scheduled before
    them; nodes of a kind keep the order that needs little memory. A DONE beyond the cap is passed over. When nothing is
    ready the clock jumps to the first pending node: that is time in which the program waits.

    Where constraints apart from data leave no order within the cap on this path, the order as written is returned.
    """
    return _BottomUp(graph, cap).run()


class _BottomUp:
    """Queues with the clock that runs backwards."""

    def __init__(self, graph: Graph, cap: int) -> None:
        self.graph, self.cap = graph, cap
        self.place = {i: k for k, i in enumerate(memory.order(graph))}
        self.missing = [len(users) for users in graph.users]
        self.links = Links()
        self.ready_at: dict[int, float] = {}
        self.now = 0.0
        self.work_s = sum(node.seconds for node in graph.nodes)
        self.flying = 0
        self.pending: list[tuple[float, int, int]] = []
        self.ready: list[tuple[int, int, int]] = []  # (preference, place from the end, node)
        self.waits = [False] * len(graph.nodes)  # whether a node uses a DONE, perhaps through views
        for i, node in enumerate(graph.nodes):
            self.waits[i] = any(
                graph.nodes[j].kind == DONE or (self.waits[j] and not graph.nodes[j].seconds) for j in node.operands
            )

    def run(self) -> list[int]:
        found: list[int] = []
        for i, count in enumerate(self.missing):
            if count == 0:
                self._offer(i)
        while len(found) < len(self.graph.nodes):
            chosen = self._next()
            if chosen is None:
                return list(range(len(self.graph.nodes)))
            found.append(chosen)
            self._schedule(chosen)
        return found[::-1]

    def _offer(self, i: int) -> None:
        """Node i has become available."""
        heapq.heappush(self.pending, (self.ready_at.get(i, self.now), -self.place[i], i))

    def _next(self) -> int | None:
        """The best ready node that the cap allows, after a wait if need be; None if there is none at all."""
        while True:
            while self.pending and self.pending[0][0] <= self.now:
                _, place, i = heapq.heappop(self.pending)
                heapq.heappush(self.ready, (self._preference(i), place, i))
            passed_over = []
            chosen = None
            while self.ready and chosen is None:
                entry = heapq.heappop(self.ready)
                i = entry[2]
                if self._is_over_cap(i):
                    passed_over.append(entry)
                elif (free_s := self._links_free_at(i)) > self.now:
                    heapq.heappush(self.pending, (free_s, entry[1], i))
                else:
                    chosen = i
            for entry in passed_over:
                heapq.heappush(self.ready, entry)
            better = self._worth_waiting_for(chosen)
            if better is None:
                return chosen
            if chosen is not None:
                heapq.heappush(self.ready, (self._preference(chosen), -self.place[chosen], chosen))
            self.now = better

    def _worth_waiting_for(self, chosen: int | None) -> float | None:
        """The time to which the clock should jump before anything else; None if `chosen` should go next."""
        if chosen is None:
            return self.pending[0][0] if self.pending else None
        filler_s = self.graph.nodes[chosen].seconds
        times = [
            ready_s
            for ready_s, _, i in self.pending
            if is_worth_waiting(self.now, ready_s, self.graph.lead_s[i], filler_s, self.work_s)
        ]
        return min(times, default=None)

    def _preference(self, i: int) -> int:
        node = self.graph.nodes[i]
        if node.is_copy:
            return 3
        if node.kind == START or not (node.seconds or node.loads or node.size_bytes or node.kind == DONE):
            return 0  # what takes neither time nor memory only stands in the way of what it reads
        return 1 if node.kind == DONE else 2 if self.waits[i] else 3

    def _is_over_cap(self, i: int) -> bool:
        node = self.graph.nodes[i]
        return node.kind == DONE and not node.is_copy and self.flying >= self.cap

    def _links_free_at(self, i: int) -> float:
        """When a blocking collective need not queue behind a transfer: beside one it would only be slower."""
        node = self.graph.nodes[i]
        return self.links.free_at(node) if node.kind == COMPUTE and node.loads else 0.0

    def _schedule(self, i: int) -> None:
        node = self.graph.nodes[i]
        if node.kind == DONE:
            self.ready_at[node.operands[0]] = self.links.send(self.graph.nodes[node.operands[0]], self.now)
        elif node.kind != START:
            self.now = (self.links.send(node, self.now) if node.loads else self.now) + node.seconds
            self.work_s -= node.seconds
        if not node.is_copy:
            self.flying += {DONE: 1, START: -1}.get(node.kind, 0)
        for j in self.graph.needs[i]:
            self.missing[j] -= 1
            if self.missing[j] == 0:
                self._offer(j)
