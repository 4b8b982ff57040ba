"""The order in which the instructions were written."""

from __future__ import annotations

from overlapfx.plan.schedulers.base import MAX_IN_FLIGHT, Graph


def order(graph: Graph, cap: int = MAX_IN_FLIGHT) -> list[int]:
    """Positions of the graph's nodes as they stand, whatever the cap."""
    del cap  # what was written is what is compared with
    return list(range(len(graph.nodes)))
