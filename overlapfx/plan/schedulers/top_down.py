"""Every transfer starts as early as it can, ends as late as it may, with work moved to where one would wait."""

from __future__ import annotations

from overlapfx.plan.schedulers.base import COMPUTE, DONE, MAX_IN_FLIGHT, START, Graph, Links, is_worth_waiting


def order(graph: Graph, cap: int = MAX_IN_FLIGHT) -> list[int]:
    """Schedules forwards; at most `cap` transfers are in flight at once.

    A START follows what it reads at once, a DONE stands just before its first user. Computations keep the order in
    which they were written, except that where the next one would wait for a transfer others that need not wait are
    taken from later intervals: the cheapest that fills the wait, or the dearest if none does (the paper's rebalancing
    by cost). It waits all the same where filling the wait would hold up a longer chain of transfers.

    Where constraints apart from data leave no order within the cap on this path, the order as written is returned.
    """
    return _TopDown(graph, cap).run()


class _TopDown:
    """The clock, the transfers in flight, the nodes whose turn may come.

    DONEs, like views of what they deliver, are lazy: they are scheduled only when a user is.
    """

    def __init__(self, graph: Graph, cap: int) -> None:
        self.graph, self.cap = graph, max(1, cap)
        self.missing = [len(needed) for needed in graph.needs]  # those neither scheduled nor lazy with their turn come
        self.links = Links()
        self.arrival: dict[int, float] = {}  # of what STARTs have sent
        self.lazy: dict[int, float] = {}  # lazy nodes whose turn has come, with the time when they need not wait
        self.flying = 0  # transfers started, not yet done; copies apart
        self.ready: set[int] = set()
        self.now = 0.0
        self.work_s = sum(node.seconds for node in graph.nodes)
        self.found: list[int] = []

    def run(self) -> list[int]:
        for i, count in enumerate(self.missing):
            if count == 0:
                self._offer(i)
        while self.ready:
            chosen = self._next()
            if chosen is None:
                return list(range(len(self.graph.nodes)))
            self._schedule(chosen)
        for i in sorted(self.lazy):
            if i in self.lazy:
                self._schedule(i)
        return self.found

    def _offer(self, i: int) -> None:
        """All that node i needs is scheduled, or is lazy with its turn come."""
        node = self.graph.nodes[i]
        late = [self.lazy[j] for j in self.graph.needs[i] if j in self.lazy]
        is_view = node.kind == COMPUTE and not (node.seconds or node.loads or node.size_bytes)
        if node.kind == DONE:
            self.lazy[i] = max([self.arrival[node.operands[0]], *late])
        elif is_view and late:
            self.lazy[i] = max(late)
        else:
            self.ready.add(i)
            return
        self._release(i)

    def _release(self, i: int) -> None:
        for user in self.graph.users[i]:
            self.missing[user] -= 1
            if self.missing[user] == 0:
                self._offer(user)

    def _wait(self, i: int) -> float:
        """Seconds that the program would wait before node i, a blocking collective for its links as well."""
        node = self.graph.nodes[i]
        until = [self.lazy[j] for j in self.graph.needs[i] if j in self.lazy]
        if node.kind == COMPUTE and node.loads:
            until.append(self.links.free_at(node))
        return max([0.0, *(t - self.now for t in until)])

    def _is_start(self, i: int) -> bool:
        return self.graph.nodes[i].kind == START and not self.graph.nodes[i].is_copy

    def _next(self) -> int | None:
        """The node whose turn it is, perhaps a DONE to make room for a START; None if the cap leaves none."""
        ready = sorted(self.ready)
        starts = [i for i in ready if self._is_start(i)]
        others = [i for i in ready if not self._is_start(i)]
        if starts and self.flying >= self.cap:
            dones = [i for i in self.lazy if self.graph.nodes[i].kind == DONE and not self.graph.nodes[i].is_copy]
            arrived = [i for i in dones if self.lazy[i] <= self.now]
            if arrived or not others:
                return min(arrived or dones, key=lambda i: (self.lazy[i], i), default=None)
            starts = []
        for i in starts:
            if self._wait(i) <= 0:
                # A blocking collective that stands before it would have to queue behind it.
                rivals = (j for j in others if j < i and self._shares_links(i, j) and self._wait(j) <= 0)
                return next(rivals, i)
        chosen = self._computation(others) if others else None
        waiting = [i for i in (*starts, *others) if self._wait(i) > 0]
        if chosen is not None:
            waiting = [i for i in waiting if self._deserves_wait(i, self.graph.nodes[chosen].seconds)]
        return min(waiting, key=lambda i: (self._wait(i), i)) if waiting else chosen

    def _shares_links(self, start: int, other: int) -> bool:
        links = {link for link, _ in self.graph.nodes[start].loads}
        return any(link in links for link, _ in self.graph.nodes[other].loads)

    def _computation(self, others: list[int]) -> int | None:
        """The next computation that need not wait: the first of all, else what fills the wait for the first."""
        wait = self._wait(others[0])
        if wait <= 0:
            return others[0]
        idle = [i for i in others if self._wait(i) <= 0]
        filling = [i for i in idle if self.graph.nodes[i].seconds >= wait]
        if filling:
            return min(filling, key=lambda i: (self.graph.nodes[i].seconds, i))
        return max(idle, key=lambda i: (self.graph.nodes[i].seconds, -i), default=None)

    def _deserves_wait(self, i: int, filler_s: float) -> bool:
        ready_s = self.now + self._wait(i)
        return is_worth_waiting(self.now, ready_s, self.graph.tail_s[i], filler_s, self.work_s)

    def _schedule(self, i: int) -> None:
        """Puts node i next, after the lazy nodes that it needs."""
        for j in self.graph.needs[i]:
            if j in self.lazy:
                self._schedule(j)
        node = self.graph.nodes[i]
        self.found.append(i)
        if i in self.lazy:
            if node.kind == DONE:
                self.now = max(self.now, self.lazy[i])
                self.flying -= not node.is_copy
            del self.lazy[i]
            return
        self.ready.remove(i)
        if node.kind == START:
            self.arrival[i] = self.links.send(node, self.now)
            self.flying += not node.is_copy
        else:
            self.now = (self.links.send(node, self.now) if node.loads else self.now) + node.seconds
            self.work_s -= node.seconds
        self._release(i)
