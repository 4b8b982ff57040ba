"""Numbers as the cells of a table show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.sweep_rank import duration, gib

NONE = "n/a"
__all__ = ["NONE", "gib", "number", "percent", "ratio", "seconds", "speed_up", "step_time", "trade"]


def percent(share: float | None) -> str:
    """0 to 1 as `42.2 %`."""
    return NONE if share is None else f"{100 * share:.1f} %"


def ratio(value: float | None) -> str:
    """`1.234x`."""
    return NONE if value is None else f"{value:.3f}x"


def seconds(value: float | None) -> str:
    """A time with four digits."""
    return NONE if value is None else duration(value)


def step_time(result: Mapping[str, Any] | None) -> str:
    """The length of a step, marked if its program needs more memory than there is."""
    if result is None:
        return NONE
    return seconds(result["step_s"]) + ("" if result["fits"] else " (does not fit)")


def number(value: float) -> str:
    """A count as `1.04T`, `198.9B`, `12.3M`; small ones in full."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:,.0f}"


def speed_up(slow: Mapping[str, Any] | None, fast: Mapping[str, Any] | None) -> float | None:
    """How many times as fast the second step is; None if one of them is missing."""
    return None if slow is None or fast is None else slow["step_s"] / fast["step_s"]


def trade(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """What became of waiting and of computing from one program to the other; both have the seconds of a time line."""
    waits = [found["exposed_s"] + found["blocking_s"] for found in (before, after)]
    works = [found["compute_s"] for found in (before, after)]
    return (
        f"waiting for communication goes from {seconds(waits[0])} to {seconds(waits[1])}, "
        f"computing from {seconds(works[0])} to {seconds(works[1])}"
    )
