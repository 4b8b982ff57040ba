"""Trip counts of while loops, worked out from the condition, the step in the body, the initial value."""

from __future__ import annotations

import dataclasses
import re

from overlapfx.aot.hlo import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PASS_THROUGH = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done", "optimization-barrier"})
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclasses.dataclass(frozen=True)
class _Linear:
    """An integer known as `element + offset`, where element is a part of the loop state (None: a plain constant)."""

    element: int | None
    offset: int


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """How often the body of the `while` instruction `loop` in `caller` runs; None if the text does not tell."""
    known = _KNOWN.search(loop.backend_config)
    if known:
        return int(known[1])
    body = module.computations.get(loop.attributes["body"].lstrip("%"))
    condition = module.computations.get(loop.attributes["condition"].lstrip("%"))
    if body is None or condition is None:
        return None
    compare = _comparison(module, condition, condition.root, None)
    if compare is None:
        return None
    left, right, direction = compare
    if left.element is None or _state_step(module, body, left.element) == 0:
        left, right, direction = right, left, _FLIPPED[direction]
    if left.element is None:
        return None
    step = _state_step(module, body, left.element)
    start = _initial(module, caller, loop, left.element)
    bound = right.offset
    if right.element is not None:
        entry = _initial(module, caller, loop, right.element)
        if entry is None or _state_step(module, body, right.element) != 0:
            return None
        bound += entry
    if step is None or start is None or step == 0:
        return None
    return _count(start + left.offset, step, bound, direction)


def _count(start: int, step: int, bound: int, direction: str) -> int | None:
    distance = bound - start
    if direction in ("LT", "GT"):
        toward = step > 0 if direction == "LT" else step < 0
        return max(0, -(-distance // step)) if toward else None
    if direction in ("LE", "GE"):
        toward = step > 0 if direction == "LE" else step < 0
        return max(0, distance // step + 1) if toward else None
    if direction == "NE" and distance % step == 0 and distance // step >= 0:
        return distance // step
    return None


def _comparison(
    module: Module, where: Computation, root: Instruction, arguments: tuple[_Linear | None, ...] | None
) -> tuple[_Linear, _Linear, str] | None:
    """Both sides and the direction of the comparison that decides, looked for through fusions and copies."""
    if root.opcode == "compare":
        left = _value(module, where, root.operands[0], arguments)
        right = _value(module, where, root.operands[1], arguments)
        if left is None or right is None:
            return None
        return left, right, root.attributes["direction"]
    if root.opcode == "fusion":
        inner = module.computations[root.called[0]]
        passed = tuple(_value(module, where, name, arguments) for name in root.operands)
        return _comparison(module, inner, inner.root, passed)
    if root.opcode in _PASS_THROUGH:
        return _comparison(module, where, where.by_name[root.operands[0]], arguments)
    return None


def _state_step(module: Module, body: Computation, element: int) -> int | None:
    """What one iteration adds to a state element; None if it does anything else to it."""
    if body.root.opcode != "tuple" or element >= len(body.root.operands):
        return None
    after = _value(module, body, body.root.operands[element], None)
    return after.offset if after is not None and after.element == element else None


def _initial(module: Module, caller: Computation, loop: Instruction, element: int) -> int | None:
    """Constant that a state element has when the loop starts."""
    state = caller.by_name.get(loop.operands[0])
    while state is not None and state.opcode in _PASS_THROUGH:
        state = caller.by_name.get(state.operands[0])
    if state is None or state.opcode != "tuple" or element >= len(state.operands):
        return None
    # The loop state of the caller is no constant here, so that only values without an element part count.
    value = _value(module, caller, state.operands[element], None)
    return value.offset if value is not None and value.element is None else None


def _value(
    module: Module, where: Computation, name: str, arguments: tuple[_Linear | None, ...] | None
) -> _Linear | None:
    """The value `name` as a constant or as a state element plus a constant.

    `arguments` are the values of a fused computation's parameters; None means that `where` has the loop state as its
    only parameter.
    """
    instruction = where.by_name.get(name)
    if instruction is None:
        return None
    opcode = instruction.opcode
    if opcode == "constant":
        text = instruction.literal.strip()
        return _Linear(None, int(text)) if re.fullmatch(r"-?\d+", text) else None
    if opcode == "parameter" and arguments is not None:
        return arguments[int(instruction.literal)]
    if opcode in _PASS_THROUGH:
        return _value(module, where, instruction.operands[0], arguments)
    if opcode == "get-tuple-element":
        return _element(module, where, instruction, arguments)
    if opcode in ("add", "subtract"):
        left = _value(module, where, instruction.operands[0], arguments)
        right = _value(module, where, instruction.operands[1], arguments)
        if left is None or right is None or (left.element is not None and right.element is not None):
            return None
        if opcode == "subtract":
            return None if right.element is not None else _Linear(left.element, left.offset - right.offset)
        return _Linear(left.element if right.element is None else right.element, left.offset + right.offset)
    if opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        passed = tuple(_value(module, where, operand, arguments) for operand in instruction.operands)
        return _value(module, inner, inner.root.name, passed)
    return None


def _element(
    module: Module, where: Computation, read: Instruction, arguments: tuple[_Linear | None, ...] | None
) -> _Linear | None:
    """Value of a get-tuple-element: of the loop state, of a tuple made here, or of a fusion with several results."""
    source = where.by_name.get(read.operands[0])
    if source is None:
        return None
    if source.opcode == "parameter" and arguments is None:
        return _Linear(read.index, 0)
    if source.opcode == "tuple":
        return _value(module, where, source.operands[read.index], arguments)
    if source.opcode == "fusion":
        inner = module.computations[source.called[0]]
        if inner.root.opcode == "tuple":
            passed = tuple(_value(module, where, operand, arguments) for operand in source.operands)
            return _value(module, inner, inner.root.operands[read.index], passed)
    return None
