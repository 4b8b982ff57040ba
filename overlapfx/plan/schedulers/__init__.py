"""Schedulers: each puts the instructions of a graph in order."""

from __future__ import annotations

from collections.abc import Callable

from overlapfx.plan.schedulers import as_written, bottom_up, top_down
from overlapfx.plan.schedulers.base import Graph

# Each has the one interface `order(graph, cap) -> list`: positions of nodes in the order in which they should run.
SCHEDULERS: dict[str, Callable[..., list[int]]] = {
    "as_written": as_written.order,
    "bottom_up": bottom_up.order,
    "top_down": top_down.order,
}


def order(graph: Graph, scheduler: str) -> list[int]:
    """The order that `scheduler`, a name in SCHEDULERS, gives to the nodes of `graph`."""
    return SCHEDULERS[scheduler](graph)
