"""A small typed graph of a compiled HLO program, read from its text."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from overlapfx.aot.hlo_syntax import HloError, Shape, attributes, braced, closing, parse_shape

_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_INSTRUCTION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLS = ("calls", "to_apply", "called_computations", "branch_computations", "true_computation", "false_computation")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    `operands` are names in the same computation; `literal` is the text between the parentheses of a constant or
    parameter; `attributes` keeps every attribute as text, `backend_config` and `metadata` included.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    literal: str
    attributes: Mapping[str, str]
    is_root: bool

    @property
    def backend_config(self) -> str:
        """The compiler's own notes as JSON text; empty if there are none."""
        return self.attributes.get("backend_config", "")

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own cost, in clock cycles of one core; None where it gives none."""
        match = _CYCLES.search(self.backend_config)
        return int(match[1]) if match else None

    @property
    def op_name(self) -> str:
        """Path of scopes and primitive in the traced program; empty if unknown."""
        match = _OP_NAME.search(self.attributes.get("metadata", ""))
        return match[1] if match else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction applies, loops apart (see `condition` and `body`)."""
        names: list[str] = []
        for key in _CALLS:
            if key in self.attributes:
                names += [name.lstrip("%") for name in braced(self.attributes[key])]
        return tuple(names)

    @property
    def index(self) -> int:
        """Position that a get-tuple-element reads."""
        return int(self.attributes["index"])


@dataclasses.dataclass(frozen=True)
class Computation:
    """A named list of instructions, in schedule order when the module is scheduled; parsed on first use."""

    name: str
    lines: tuple[str, ...]

    @functools.cached_property
    def _parsed(self) -> tuple[tuple[Instruction, ...], Counter[str]]:
        instructions, unread = [], Counter[str]()
        for line in self.lines:
            try:
                instructions.append(parse_instruction(line))
            except HloError:
                unread[f"unreadable line: {line.strip()[:60]}"] += 1
        return tuple(instructions), unread

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """Every instruction that could be read, in text order."""
        return self._parsed[0]

    @property
    def unread(self) -> Counter[str]:
        """Lines that could not be read, with how often each occurred."""
        return self._parsed[1]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        for instruction in self.instructions:
            if instruction.is_root:
                return instruction
        return self.instructions[-1]

    def parameter(self, number: int) -> Instruction | None:
        """Parameter instruction by number."""
        for instruction in self.instructions:
            if instruction.opcode == "parameter" and instruction.literal.strip() == str(number):
                return instruction
        return None

    def operand_shapes(self, instruction: Instruction) -> list[Shape]:
        """Shapes of the operands that can be found in this computation."""
        return [self.by_name[name].shape for name in instruction.operands if name in self.by_name]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: `computations` by name, the name of the `entry`, and what the header line says."""

    name: str
    computations: Mapping[str, Computation]
    entry: str
    num_partitions: int
    is_scheduled: bool

    def scheduled(self) -> Iterator[Computation]:
        """The entry and every loop body, branch or called computation that runs instruction by instruction."""
        seen: set[str] = set()
        todo = [self.entry]
        while todo:
            name = todo.pop()
            if name in seen or name not in self.computations:
                continue
            seen.add(name)
            yield self.computations[name]
            for instruction in self.computations[name].instructions:
                if instruction.opcode in ("call", "conditional"):
                    todo += instruction.called
                elif instruction.opcode == "while":
                    todo.append(instruction.attributes["body"].lstrip("%"))


def parse_module(text: str) -> Module:
    """Read HLO text as printed by `compiled.as_text()`. Raises HloError if it holds no entry computation."""
    lines = text.splitlines()
    header = lines[0] if lines and lines[0].startswith("HloModule") else ""
    computations: dict[str, Computation] = {}
    entry = ""
    name: str | None = None
    body: list[str] = []
    for line in lines:
        if name is None:
            match = _HEADER.match(line) if not line.startswith((" ", "HloModule")) else None
            if match:
                name, body = match[2], []
                entry = name if match[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(body))
            name = None
        elif line.strip():
            body.append(line)
    if not entry:
        raise HloError(
            f"the text ({len(lines)} lines) holds no ENTRY computation; pass what compiled.as_text() returns."
        )
    partitions = re.search(r"num_partitions=(\d+)", header)
    title = re.match(r"HloModule\s+([\w.\-]+)", header)
    return Module(
        title[1] if title else "",
        computations,
        entry,
        int(partitions[1]) if partitions else 1,
        "is_scheduled=true" in header,
    )


def parse_instruction(line: str) -> Instruction:
    """Read one line `[ROOT] %name = shape opcode(operands), attributes`. Raises HloError."""
    head = _INSTRUCTION.match(line)
    if head is None:
        raise HloError(f"expected an instruction in {line.strip()[:80]!r}.")
    shape, position = parse_shape(line, head.end())
    opcode = _OPCODE.match(line, position)
    if opcode is None:
        raise HloError(f"expected an opcode in {line.strip()[:80]!r}.")
    end = closing(line, opcode.end() - 1)
    inside = line[opcode.end() : end - 1]
    is_literal = opcode[1] in ("constant", "parameter")
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        shape=shape,
        operands=() if is_literal else tuple(_OPERAND.findall(inside)),
        literal=inside if is_literal else "",
        attributes=attributes(line[end:].lstrip().lstrip(",")),
        is_root=bool(head[1]),
    )
