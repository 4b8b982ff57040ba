"""The time line of a compiled program, in one call."""

from __future__ import annotations

from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import CompiledFor
from overlapfx.aot.hlo import parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.timeline import Timeline, walk


def time_line(compiled: CompiledFor, assumptions: Assumptions) -> Timeline:
    """What one device does, by `assumptions`, on the links that they give the slice."""
    return walk(
        lower(parse_module(compiled.text)), assumptions.network(compiled.topology), compiled.coords, assumptions
    )
