"""What must stay before what for the sake of memory, however the instructions of a computation are ordered."""

from __future__ import annotations

from collections import Counter, defaultdict

from overlapfx.aot.hlo import Computation, Instruction, Module

# Instructions whose result lies in the memory of their operands.
_VIEWS = frozenset(
    {
        "tuple",
        "get-tuple-element",
        "bitcast",
        "optimization-barrier",
        "add-dependency",
        "domain",
        "while",
        "conditional",
    }
)
MAIN_SPACE, HOST_SPACE = 0, 5  # all other memories are on the chip
Key = str | tuple[str, int]  # a piece of memory: of an instruction, or an element of what a computation is called with


def shares(module: Module, instruction: Instruction) -> tuple[str, ...]:
    """Operands in whose memory the result lies: of views and updates in place."""
    if instruction.opcode in _VIEWS or instruction.opcode.endswith("-done"):
        return instruction.operands
    target = _updated(module, instruction)
    return () if target is None else (instruction.operands[target],)


def num_bytes(instruction: Instruction) -> Counter[int]:
    """Bytes of the result by memory space; of a start those of what arrives."""
    shape = instruction.shape
    if instruction.opcode.endswith("-start") and len(shape.elements) > 1:
        shape = shape.elements[0 if instruction.opcode == "copy-start" else 1]
    found = Counter[int]()
    for part in shape.elements or (shape,):
        found[part.memory_space] += part.num_bytes
    return found


def find(module: Module, here: Computation) -> list[set[int]]:
    """For each instruction the positions of earlier ones that must stay before it.

    They read what it overwrites, in place or as the next state of a loop.
    """
    readers: defaultdict[Key, set[int]] = defaultdict(set)
    found: list[set[int]] = []
    keys: dict[str, frozenset[Key]] = {}
    state = _state(here)
    for i, instruction in enumerate(here.instructions):
        read = frozenset[Key]().union(*(keys.get(name, frozenset()) for name in instruction.operands))
        lies_in = shares(module, instruction)
        if instruction.opcode == "parameter":
            own = frozenset[Key]({("parameter", -1)})
        elif instruction.opcode == "get-tuple-element" and read == {("parameter", -1)}:
            own = frozenset({("parameter", instruction.index)})
        elif lies_in:
            own = frozenset[Key]().union(*(keys.get(name, frozenset()) for name in lies_in))
        else:
            own = frozenset({instruction.name})
        keys[instruction.name] = own
        over = {key for key in state.get(instruction.name, ()) if key not in own}
        if (target := _updated(module, instruction)) is not None:
            over |= keys.get(instruction.operands[target], frozenset())
        found.append({j for key in over for j in readers[key]})
        for key in read:
            readers[key].add(i)
    return found


def _updated(module: Module, instruction: Instruction) -> int | None:
    """Number of the operand that an instruction updates in place; None if it makes a new array."""
    if instruction.opcode == "dynamic-update-slice":
        return 0
    if instruction.opcode != "fusion" or not instruction.called:
        return None
    inside = module.computations[instruction.called[0]]
    root = inside.root
    while root.opcode in ("bitcast", "convert") and root.operands and root.operands[0] in inside.by_name:
        root = inside.by_name[root.operands[0]]
    if root.opcode != "dynamic-update-slice":
        return None
    source = inside.by_name.get(root.operands[0])
    while source is not None and source.opcode == "bitcast":
        source = inside.by_name.get(source.operands[0])
    if source is None or source.opcode != "parameter":
        return None
    number = int(source.literal)
    return number if number < len(instruction.operands) else None


def _state(here: Computation) -> dict[str, list[Key]]:
    """In the body of a loop: which elements of the loop's state each instruction leaves its value in."""
    parameters = [i for i in here.instructions if i.opcode == "parameter"]
    root = here.root
    if root.opcode != "tuple" or len(parameters) != 1 or parameters[0].shape != root.shape:
        return {}
    written: defaultdict[str, list[Key]] = defaultdict(list)
    for number, name in enumerate(root.operands):
        while name in here.by_name and here.by_name[name].opcode in ("bitcast", "copy-done"):
            name = here.by_name[name].operands[0]
        written[name].append(("parameter", number))
    return written
