"""Scheduling groups: which transfers and products of an order the compiler is asked to keep together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from overlapfx.ops.instructions import Step
from overlapfx.plan.schedulers.base import DONE, START

# A program may hold several orders, and a group has the same number nowhere else in it.
_numbers = itertools.count(1)


def find_groups(ordered: Iterable[Step]) -> dict[int, int]:
    """The number of the group of each START and each product that is in one, by identity of the step.

    A group is one transfer, so that no limit on transfers in flight is exceeded, with the product that follows and
    those after it, until the DONE or until another transfer waits for a product. No member may depend on another one,
    so that a product which needs one before it in the group ends it.
    """
    found: dict[int, int] = {}
    waiting: list[Step] = []  # started, in no group, not awaited
    transfer: Step | None = None  # that of the open group
    made: set[int] = set()  # values that depend on products of the open group
    for step in ordered:
        depends = not made.isdisjoint(step.reads())
        if step.kind == START:
            waiting.append(step)
        elif step.kind == DONE:
            waiting = [start for start in waiting if start is not step.start]
            transfer = None if step.start is transfer else transfer
        elif step.is_product:
            if waiting:
                transfer, made = waiting.pop(0), set()
                found[id(transfer)] = next(_numbers)
            elif depends:
                transfer = None
            if transfer is not None:
                found[id(step)], depends = found[id(transfer)], True
        if depends:
            made |= step.writes()
    return found
