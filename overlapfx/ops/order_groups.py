"""Scheduling groups: which transfers and products of an order the compiler is asked to keep together."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from overlapfx.ops.instructions import Step
from overlapfx.plan.schedulers.base import DONE, START

# A program may hold several orders, and a group has the same number nowhere else in it.
_numbers = itertools.count(1)


def find_groups(ordered: Sequence[Step]) -> dict[int, int]:
    """The number of the group of each START and each product that is in one, by identity of the step.

    A group is one transfer with all products between its START and its DONE, so that the compiler has the same place
    for it. No product can be in two groups, no member may depend on another one: a transfer of which that would be true
    is left to the compiler, with its products.
    """
    windows: dict[int, list[Step]] = {}  # by identity of a START: it and what follows until its DONE
    under_way: dict[int, list[Step]] = {}
    for step in ordered:
        if step.kind == DONE:
            windows[id(step.start)] = under_way.pop(id(step.start))
            continue
        if step.kind == START:
            under_way[id(step)] = []
        for window in under_way.values():
            window.append(step)
    shared = Counter(id(step) for window in windows.values() for step in window if step.is_product)
    found: dict[int, int] = {}
    for window in windows.values():
        products = [step for step in window if step.is_product]
        if products and all(shared[id(step)] == 1 for step in products) and _are_independent(window):
            number = next(_numbers)
            found.update((id(step), number) for step in (window[0], *products))
    return found


def _are_independent(window: Sequence[Step]) -> bool:
    """Whether no product needs what another one has made, directly or not."""
    made: set[int] = set()
    for step in window:
        depends = not made.isdisjoint(step.reads())
        if step.is_product and depends:
            return False
        if step.is_product or depends:
            made |= step.writes()
    return True
