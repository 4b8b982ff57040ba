"""An order that needs little memory, the input of the other schedulers."""

from __future__ import annotations

from overlapfx.plan.schedulers.base import DONE, Graph, peak_bytes


def order(graph: Graph) -> list[int]:
    """Takes whatever frees most memory next, the first as written among equals; as written if that needs no more.

    A transfer counts as one instruction that blocks, its DONE right behind its START, as it is before schedulers pull
    them apart. What a greedy choice frees now may cost more later, hence the comparison.
    """
    greedy = _greedy(graph)
    written = list(range(len(graph.nodes)))
    return greedy if peak_bytes(graph, greedy) < peak_bytes(graph, written) else written


def _greedy(graph: Graph) -> list[int]:
    missing = [len(needed) for needed in graph.needs]
    touched = [graph.touched(i) for i in range(len(graph.nodes))]
    kept = frozenset[int]().union(*(graph.memory[i] for i in graph.results))
    readers = [0] * len(graph.nodes)  # nodes that still touch the memory of each owner
    for owners in touched:
        for owner in owners:
            readers[owner] += 1

    done_of = {node.operands[0]: i for i, node in enumerate(graph.nodes) if node.kind == DONE}

    def growth(i: int) -> int:
        last = 2 if i in done_of else 1  # a START touches its source, and its DONE once more
        freed = sum(graph.nodes[o].size_bytes for o in touched[i] if readers[o] == last and o not in kept)
        return graph.nodes[i].size_bytes - freed

    ready = [i for i, count in enumerate(missing) if count == 0]
    found: list[int] = []
    while ready:
        behind = done_of.get(found[-1]) if found else None
        best = behind if behind in ready else min(ready, key=lambda i: (growth(i), i))
        ready.remove(best)
        found.append(best)
        for owner in touched[best]:
            readers[owner] -= 1
        for user in graph.users[best]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return found
