"""From the HLO graph to the steps of one device."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from overlapfx.aot.hlo import Computation, Instruction, Module
from overlapfx.aot.hlo_groups import Groups, parse_groups, parse_pairs
from overlapfx.aot.hlo_loops import trip_count
from overlapfx.aot.hlo_syntax import HloError
from overlapfx.aot.program import Blocking, Branch, Compute, Loop, Program, Start, Step, Transfer, Wait

COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"}
)
_FREE_WORDS = """
parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id iota optimization-barrier
add-dependency get-dimension-size domain
"""
_WORK_WORDS = """
abs add and atan2 bitcast-convert broadcast cbrt ceil clamp compare concatenate convert convolution copy cosine divide
dot dynamic-slice dynamic-update-slice erf exponential exponential-minus-one floor fusion gather is-finite log
log-plus-one logistic map maximum minimum multiply negate not or pad popcnt power reduce reduce-precision reduce-window
remainder reshape reverse rng rng-bit-generator round-nearest-afz round-nearest-even rsqrt scatter select
select-and-scatter shift-left shift-right-arithmetic shift-right-logical sign sine slice sort sqrt stochastic-convert
subtract tan tanh transpose xor
"""
# Custom calls that only name or join buffers.
_FREE_CALL_WORDS = """
AllocateBuffer ConcatBitcast Sharding AsyncCollectiveStart AsyncCollectiveDone PrepareAsyncCallStart
PrepareAsyncCallDone SliceId
"""
_FREE = frozenset(_FREE_WORDS.split())
_WORK = frozenset(_WORK_WORDS.split())
_FREE_CALLS = frozenset(_FREE_CALL_WORDS.split())
_EINSUM = frozenset({"convolution", "dot"})
_MEMORY_MOVES = frozenset({"copy", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather"})
# Custom calls that work on memory, such as zeroing what pads an array.
_MEMORY_CALLS = frozenset({"ZeroCrop"})
_KERNEL_CALLS = frozenset({"tpu_custom_call", "Mosaic"})
_HOST_SPACE = 5
# Values of a few registers' size are computed by the scalar unit beside everything else.
_SCALAR_BYTES = 4096
_CHAIN = re.compile(r'chain_id="(\w+)"')
_TARGET = re.compile(r'custom_call_target="?([^",]*)"?')
_COST = re.compile(r'"cost_estimate":(\{[^{}]*\})')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]+)"')
_DCN_TYPE = re.compile(r'_xla_megascale_transfer_type="([^"]+)"')
_DCN_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}')


def lower(module: Module, kernel_costs: Mapping[str, tuple[float, float]] | None = None) -> Program:
    """Reduce the scheduled program to steps; nothing is dropped without being counted.

    `kernel_costs` gives (FLOPs, bytes) of custom kernels whose instruction name or scope matches a regular expression;
    it goes before the kernel's own estimate. Raises ValueError if the module is not scheduled, since the order of its
    instructions would mean nothing.
    """
    if not module.is_scheduled:
        raise ValueError(
            f"HLO module {module.name!r} is not scheduled, so it has no time line; pass compiled.as_text(), not the "
            f"text of the lowered program."
        )
    lowering = _Lowering(module, kernel_costs or {})
    steps = lowering.computation(module.entry)
    return Program(module.name, steps, module.num_partitions, dict(lowering.unknown), dict(lowering.notes))


def lower_computation(
    module: Module, name: str, kernel_costs: Mapping[str, tuple[float, float]] | None = None
) -> list[tuple[Instruction, tuple[Step, ...], str]]:
    """Every instruction of one scheduled computation with the steps that it stands for, bodies of loops included.

    Third is the chain of a fused collective that the instruction starts, carries along or ends; empty for most.
    """
    lowering = _Lowering(module, kernel_costs or {})
    return [(i, steps, lowering.chain(i)) for i, steps in lowering.instructions(name)]


class _Lowering:
    """Walks scheduled computations, each once, and counts what it could not read."""

    def __init__(self, module: Module, kernel_costs: Mapping[str, tuple[float, float]]) -> None:
        self.module = module
        self.kernel_costs = kernel_costs
        self.unknown: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self._inside: dict[str, tuple[tuple[Computation, Instruction], ...]] = {}
        self._einsum: dict[str, bool] = {}

    def computation(self, name: str) -> tuple[Step, ...]:
        """Steps of one scheduled computation."""
        return tuple(step for _, steps in self.instructions(name) for step in steps)

    def instructions(self, name: str) -> list[tuple[Instruction, tuple[Step, ...]]]:
        """Every instruction of one scheduled computation with its steps."""
        here = self.module.computations[name]
        self.unknown += here.unread
        updates = {i.operands[0]: i for i in here.instructions if i.opcode.endswith("-update") and i.operands}
        sends = {_found(_RENDEZVOUS, i): i.name for i in here.instructions if i.opcode == "send"}
        chains: dict[str, str] = {}
        return [(i, tuple(self._steps(here, i, updates, sends, chains))) for i in here.instructions]

    def _steps(
        self,
        here: Computation,
        instruction: Instruction,
        updates: dict[str, Instruction],
        sends: dict[str, str],
        chains: dict[str, str],
    ) -> Sequence[Step]:
        """Steps of one instruction, given what it may refer to; chains grows."""
        opcode = instruction.opcode
        if opcode in _FREE:
            return ()
        if opcode == "while":
            trips = trip_count(self.module, here, instruction)
            if trips is None:
                self.unknown["while loop without a readable trip count (walked once)"] += 1
            body = self.computation(instruction.attributes["body"].lstrip("%"))
            return (Loop(instruction.name, instruction.op_name, trips, body),)
        if opcode == "conditional":
            self.notes["conditional: the longest branch is counted"] += 1
            return (Branch(instruction.name, tuple(self.computation(name) for name in instruction.called)),)
        if opcode == "call":
            return [step for callee in instruction.called for step in self.computation(callee)]
        if opcode in ("send", "recv", "send-done", "recv-done"):
            return self._between_slices(here, instruction, sends)
        if opcode.endswith(("-start", "-update", "-done")):
            return self._asynchronous(here, instruction, updates)
        if opcode == "fusion":
            return self._fusion(here, instruction, chains)
        return self._single(here, instruction)

    def chain(self, instruction: Instruction) -> str:
        """Which fused collective a fusion has a part of; empty if none."""
        inside = self._collectives_inside(instruction.called[0]) if instruction.opcode == "fusion" else ()
        return _found(_CHAIN, inside[0][1]) if inside else ""

    def _single(self, here: Computation, instruction: Instruction) -> list[Step]:
        """An instruction that is over when the next one begins."""
        opcode = instruction.opcode
        if opcode in COLLECTIVES:
            return [Blocking(self._collective(here, instruction, instruction.name))]
        if opcode == "custom-call":
            return self._custom_call(here, instruction)
        if opcode not in _WORK:
            self.unknown[f"opcode {opcode}"] += 1
        kind = "einsum" if opcode in _EINSUM else "other"
        return self._work(here, instruction, kind)

    def _work(self, here: Computation, instruction: Instruction, kind: str) -> list[Step]:
        cycles = instruction.estimated_cycles
        if cycles is None and instruction.shape.num_bytes <= _SCALAR_BYTES:
            return []
        if cycles is None:
            self.notes[f"{instruction.opcode} without estimated cycles (charged by its bytes)"] += 1
        moved = _bytes_moved(here, instruction)
        return [Compute(instruction.name, instruction.op_name, kind, cycles, 0.0, moved)]

    def _custom_call(self, here: Computation, instruction: Instruction) -> list[Step]:
        target = instruction.attributes.get("custom_call_target", "").strip('"')
        if target in _FREE_CALLS:
            return []
        if target not in _KERNEL_CALLS:
            if target not in _MEMORY_CALLS:
                self.unknown[f"custom call {target}"] += 1
            return self._work(here, instruction, "other")
        label = f"{instruction.name} {instruction.op_name}"
        given = next((cost for pattern, cost in self.kernel_costs.items() if re.search(pattern, label)), None)
        estimate = _COST.search(instruction.backend_config)
        flops, moved = 0.0, _bytes_moved(here, instruction)
        if given is not None:
            flops, moved = given
        elif estimate is not None:
            cost = json.loads(estimate[1])
            flops, moved = float(cost.get("flops", 0)), float(cost.get("bytes_accessed", 0)) or moved
        else:
            self.notes["custom kernel without a cost estimate (charged by its bytes)"] += 1
        return [Compute(instruction.name, instruction.op_name, "kernel", None, flops, moved)]

    def _fusion(self, here: Computation, instruction: Instruction, chains: dict[str, str]) -> list[Step]:
        """A fusion computes, or is a collective in disguise, or carries one along while it computes."""
        called = instruction.called[0]
        inside = self._collectives_inside(called)
        kind = "einsum" if self._has_einsum(called) else "other"
        if not inside:
            return self._work(here, instruction, kind)
        where, collective = inside[0]
        if len(inside) > 1:
            self.notes["fusion with more than one collective (the first is counted)"] += 1
        chain = _found(_CHAIN, collective)
        targets = {_found(_TARGET, i) for i in self.module.computations[called].instructions}
        targets |= {i.attributes.get("custom_call_target", "").strip('"') for i in where.instructions}
        if "AsyncCollectiveStart" in targets:
            chains[chain] = instruction.name
            return [Start(self._collective(where, collective, instruction.name))]
        if "AsyncCollectiveDone" in targets:
            if chain not in chains:
                self.unknown["end of a fused collective whose start was not found"] += 1
                return []
            return [Wait(chains[chain], instruction.name)]
        if chain in chains:
            return self._work(here, instruction, kind)
        transfer = self._collective(where, collective, instruction.name, scattered=self._scatters(where, collective))
        if kind == "einsum" or instruction.estimated_cycles is not None:
            self.notes["collective fused with work (charged one after the other)"] += 1
            return [Blocking(transfer), *self._work(here, instruction, kind)]
        return [Blocking(transfer)]

    def _asynchronous(self, here: Computation, instruction: Instruction, updates: dict[str, Instruction]) -> list[Step]:
        """A start, an update or a done; the transfer is known by the name of its start."""
        base, _, phase = instruction.opcode.rpartition("-")
        if phase == "done":
            return [Wait(_origin(here, instruction), instruction.name)]
        if phase == "start" and instruction.name in updates:
            return []  # the operands come with the update, so that is when data begins to move
        start = here.by_name[_origin(here, instruction)] if phase == "update" else instruction
        if base in COLLECTIVES:
            return [Start(self._collective(here, instruction, start.name))]
        if base in _MEMORY_MOVES:
            return [Start(_memory_move(here, start, base))]
        found = [pair for name in start.called for pair in self._collectives_inside(name)]
        if not found:
            self.notes[f"{start.opcode} of work without a collective (charged as a copy)"] += 1
            return [Start(dataclasses.replace(_memory_move(here, instruction, base), name=start.name))]
        where, collective = found[0]
        scattered = self._scatters(where, collective)
        return [Start(self._collective(where, collective, start.name, start.op_name, scattered))]

    def _between_slices(self, here: Computation, instruction: Instruction, sends: dict[str, str]) -> list[Step]:
        """Transfers of the multi-slice runtime: the exchange starts with the send, both ends wait for it."""
        opcode = instruction.opcode
        if opcode.endswith("-done"):
            begun = here.by_name.get(instruction.operands[0])
            key = sends.get(_found(_RENDEZVOUS, begun), begun.name) if begun is not None else instruction.operands[0]
            return [Wait(key, instruction.name)]
        if opcode == "recv" and _found(_RENDEZVOUS, instruction) in sends:
            return []
        kind = _found(_DCN_TYPE, instruction).lower().replace("_", "-") or opcode
        slices = _found(_DCN_SLICES, instruction)
        count = len(slices.split(",")) if slices else 2
        size = instruction.shape.elements[0].num_bytes if instruction.shape.elements else 0
        return [Start(Transfer(instruction.name, instruction.op_name, kind, "dcn", size, num_slices=count))]

    def _collective(
        self, where: Computation, collective: Instruction, name: str, op_name: str = "", scattered: bool = False
    ) -> Transfer:
        """The transfer of a collective instruction that stands in computation `where`."""
        kind = re.sub(r"-(start|update)$", "", collective.opcode)
        size = sum(shape.num_bytes for shape in where.operand_shapes(collective))
        label = collective.op_name or op_name
        try:
            if kind == "collective-permute":
                pairs = parse_pairs(collective.attributes.get("source_target_pairs", ""))
                return Transfer(name, label, kind, "ici", size, pairs=pairs)
            groups = parse_groups(collective.attributes.get("replica_groups", ""), self.module.num_partitions)
        except HloError as error:
            self.unknown[f"{kind}: {error}"] += 1
            groups = (tuple(range(self.module.num_partitions)),)
        if kind == "all-gather":
            size *= len(groups[0])
        return Transfer(name, label, "reduce-scatter" if scattered else kind, "ici", size, groups=_even(groups))

    def _collectives_inside(self, name: str) -> tuple[tuple[Computation, Instruction], ...]:
        """Collectives in a called computation and in those it calls."""
        if name not in self._inside:
            found: list[tuple[Computation, Instruction]] = []
            here = self.module.computations[name]
            for instruction in here.instructions:
                if re.sub(r"-start$", "", instruction.opcode) in COLLECTIVES:
                    found.append((here, instruction))
                elif instruction.opcode in ("fusion", "call"):
                    for callee in instruction.called:
                        found += self._collectives_inside(callee)
            self._inside[name] = tuple(found)
        return self._inside[name]

    def _has_einsum(self, name: str) -> bool:
        if name not in self._einsum:
            self._einsum[name] = any(
                i.opcode in _EINSUM or (i.opcode == "fusion" and self._has_einsum(i.called[0]))
                for i in self.module.computations[name].instructions
            )
        return self._einsum[name]

    def _scatters(self, where: Computation, collective: Instruction) -> bool:
        """Whether an all-reduce keeps only a slice of its result, which makes it a reduce-scatter."""
        return collective.opcode == "all-reduce" and where.root.opcode == "dynamic-slice"


def _bytes_moved(here: Computation, instruction: Instruction) -> float:
    """Bytes read and written; updates in place and slices touch only the part that they name."""
    shapes = here.operand_shapes(instruction)
    if instruction.opcode == "dynamic-update-slice" and len(shapes) > 1:
        return 2.0 * shapes[1].num_bytes
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2.0 * instruction.shape.num_bytes
    return float(instruction.shape.num_bytes + sum(shape.num_bytes for shape in shapes))


def _memory_move(here: Computation, instruction: Instruction, base: str) -> Transfer:
    """An asynchronous copy within a device or to its host."""
    shapes = [*here.operand_shapes(instruction), *instruction.shape.elements, instruction.shape]
    flat = [part for shape in shapes for part in (shape.elements or (shape,))]
    medium = "host" if any(shape.memory_space == _HOST_SPACE for shape in flat) else "memory"
    results = instruction.shape.elements
    moved = results[0 if base == "copy" else min(1, len(results) - 1)] if results else instruction.shape
    return Transfer(instruction.name, instruction.op_name, base, medium, moved.num_bytes)


def _origin(here: Computation, instruction: Instruction) -> str:
    """Name of the start that an update or done belongs to."""
    name = instruction.operands[0]
    while name in here.by_name:
        source = here.by_name[name]
        if not source.opcode.endswith("-update") and source.opcode not in ("get-tuple-element", "bitcast"):
            break
        name = source.operands[0]
    return name


def _found(pattern: re.Pattern[str], instruction: Instruction) -> str:
    """First match in the attributes that frontends set; empty if there is none."""
    match = pattern.search(instruction.attributes.get("frontend_attributes", ""))
    return match[1] if match else ""


@functools.lru_cache(maxsize=4096)
def _even(groups: Groups) -> Groups:
    """Groups of the size of the first; a ragged last group does not occur in programs that jax writes.

    Equal groups give the same object, by which the network knows that it has routed them already.
    """
    return tuple(group for group in groups if len(group) == len(groups[0]))
