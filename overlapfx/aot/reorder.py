"""Another order of the same instructions of a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from overlapfx.aot import hazards
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.hlo import Computation, Instruction, Module
from overlapfx.aot.hlo_syntax import braced
from overlapfx.aot.lowering import lower, lower_computation
from overlapfx.aot.network import Network
from overlapfx.aot.program import Blocking, Compute, Program, Start, Step, Wait
from overlapfx.aot.timeline import Timeline, walk
from overlapfx.plan import schedulers
from overlapfx.plan.schedulers.base import COMPUTE, DONE, START, Graph, Node, most_in_flight, peak_bytes
from overlapfx.plan.torus import Coord, Torus

_GIVEN = ("parameter", "constant")  # memory that is there from the beginning


@dataclasses.dataclass(frozen=True)
class Reordered:
    """A program in the order of one scheduler, with what the order costs.

    peak_bytes: most main memory at once of values that the program makes, as counted by `schedulers.base.peak_bytes`:
        an estimate, since the compiler shares memory in ways that its text does not show. chip_bytes: the same for
        memories on the chip; an order that needs more there than the compiler's own would not be compiled as it stands.
        most_in_flight: most transfers between chips at once in any computation.
    """

    scheduler: str
    module: Module
    program: Program
    timeline: Timeline
    peak_bytes: int
    chip_bytes: int
    most_in_flight: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        line = self.timeline
        return {
            "scheduler": self.scheduler,
            "step_s": line.total_s,
            "compute_s": line.compute_s,
            "exposed_s": line.exposed_s,
            "blocking_s": line.blocking_s,
            "peak_bytes": self.peak_bytes,
            "chip_bytes": self.chip_bytes,
            "most_in_flight": self.most_in_flight,
        }


def reorder(
    module: Module, scheduler: str, torus: Torus, coords: Sequence[Coord], assumptions: Assumptions
) -> Reordered:
    """Puts every computation of a scheduled module in the order of `scheduler`, a name in SCHEDULERS.

    Loop bodies, branches and called computations included. An order respects data and control dependencies, and it
    never overwrites in place what is still to be read, so that it needs no copy that is not there. Copies to on-chip
    memory stay where the compiler put them among the computations. Raises ValueError if the module is not scheduled.
    """
    network = Network(torus, coords, lower(module).transfers(), assumptions)
    work = _Reordering(module, scheduler, network, torus, coords, assumptions)
    peak, chip = work.computation(module.entry)
    made = dataclasses.replace(module, computations={**module.computations, **work.done})
    program = lower(made)
    return Reordered(
        scheduler, made, program, walk(program, torus, coords, assumptions), peak, chip, work.most_in_flight
    )


class _Reordering:
    """Works from the innermost computations outwards, since the length of a loop depends on the order of its body."""

    def __init__(
        self,
        module: Module,
        scheduler: str,
        network: Network,
        torus: Torus,
        coords: Sequence[Coord],
        assumptions: Assumptions,
    ) -> None:
        self.module, self.scheduler, self.network = module, scheduler, network
        self.torus, self.coords, self.assumptions = torus, coords, assumptions
        self.done: dict[str, Computation] = {}
        self.peaks: dict[str, tuple[int, int]] = {}  # in main memory, on the chip
        self.most_in_flight = 0

    def computation(self, name: str) -> tuple[int, int]:
        """Reorders one computation after those that it runs.

        Returns the most bytes that it needs at once, in main memory and on the chip.
        """
        if name in self.peaks:
            return self.peaks[name]
        here = self.module.computations[name]
        called = {i.name: _runs(i) for i in here.instructions}
        scratch = {who: [self.computation(name) for name in names] for who, names in called.items()}
        current = dataclasses.replace(self.module, computations={**self.module.computations, **self.done})
        graph = self._graph(
            current, here, {who: max((p for p, _ in peaks), default=0) for who, peaks in scratch.items()}
        )
        order = schedulers.order(graph, self.scheduler)
        if not here.unread:  # a line that could not be read has no place in any other order
            lines = [line for line in here.lines if line.strip()]
            self.done[name] = Computation(name, tuple(lines[i] for i in order))
        else:
            order = list(range(len(graph.nodes)))
        self.most_in_flight = max(self.most_in_flight, most_in_flight(graph, order))
        chip = _on_chip(here, graph)
        inner = max((c for peaks in scratch.values() for _, c in peaks), default=0)
        self.peaks[name] = peak_bytes(graph, order), max(peak_bytes(chip, order), inner)
        return self.peaks[name]

    def _graph(self, module: Module, here: Computation, scratch: Mapping[str, int]) -> Graph:
        place = {instruction.name: i for i, instruction in enumerate(here.instructions)}
        before = hazards.find(module, here)
        begun: dict[str, int] = {}  # transfers by name, where they start
        ended: dict[str, int] = {}
        nodes: list[Node] = []
        links: dict[str, int] = {}  # the last part of each chain of fusions that carry a collective along
        for i, (instruction, steps, chain) in enumerate(lower_computation(module, here.name)):
            operands = tuple(dict.fromkeys(place[name] for name in instruction.operands if place.get(name, i) < i))
            after = {*before[i], *(place[name] for name in _controls(instruction) if place.get(name, i) < i)}
            if chain:
                after |= {links[chain]} if chain in links else set()
                links[chain] = i
            shares = hazards.shares(module, instruction)
            node = Node(
                instruction.name,
                COMPUTE,
                operands,
                size_bytes=0
                if shares or instruction.opcode in _GIVEN
                else hazards.num_bytes(instruction).get(hazards.MAIN_SPACE, 0),
                shares=tuple(place[name] for name in shares if place.get(name, i) < i),
                scratch_bytes=scratch[instruction.name],
            )
            if len(steps) == 1 and isinstance(steps[0], Start):
                transfer = steps[0].transfer
                begun[transfer.name] = i
                loads, latency = self.network.loads(transfer)
                is_copy = transfer.medium in ("memory", "host")
                node = dataclasses.replace(node, kind=START, loads=loads, latency_s=latency, is_copy=is_copy)
            elif len(steps) == 1 and isinstance(steps[0], Wait) and steps[0].key in begun:
                start = begun[steps[0].key]
                rest = tuple(j for j in operands if j != start)
                if steps[0].key not in ended:
                    ended[steps[0].key] = i
                    node = dataclasses.replace(
                        node, kind=DONE, operands=(start, *rest), size_bytes=0, shares=(start,),
                        is_copy=nodes[start].is_copy,
                    )  # fmt: skip
                else:  # the other end of an exchange, which finds it over
                    after.add(ended[steps[0].key])
            else:
                node = self._work(node, steps)
            nodes.append(dataclasses.replace(node, after=tuple(sorted(after - set(node.operands)))))
        return Graph(tuple(nodes), (place[here.root.name],))

    def _work(self, node: Node, steps: Sequence[Step]) -> Node:
        """What occupies the processor: computing, blocking collectives, or all that a loop, branch or call does."""
        if any(not isinstance(step, Compute | Blocking) for step in steps) or len(steps) > 2:
            program = Program(node.name, tuple(steps), self.module.num_partitions, {}, {})
            return dataclasses.replace(node, seconds=walk(program, self.torus, self.coords, self.assumptions).total_s)
        for step in steps:
            if isinstance(step, Compute):
                node = dataclasses.replace(node, seconds=step.seconds(self.assumptions))
            elif isinstance(step, Blocking):
                loads, latency = self.network.loads(step.transfer)
                node = dataclasses.replace(node, loads=loads, latency_s=latency)
        return node


def _runs(instruction: Instruction) -> tuple[str, ...]:
    """Computations that run instruction by instruction inside this one."""
    if instruction.opcode == "while":
        return (instruction.attributes["body"].lstrip("%"),)
    return instruction.called if instruction.opcode in ("call", "conditional") else ()


def _on_chip(here: Computation, graph: Graph) -> Graph:
    """The same graph with sizes in the memories of the chip."""
    spaces = (hazards.MAIN_SPACE, hazards.HOST_SPACE)
    sizes = [
        0 if node.shares else sum(n for space, n in hazards.num_bytes(i).items() if space not in spaces)
        for i, node in zip(here.instructions, graph.nodes, strict=True)
    ]
    nodes = (dataclasses.replace(n, size_bytes=s, scratch_bytes=0) for n, s in zip(graph.nodes, sizes, strict=True))
    return Graph(tuple(nodes), graph.results)


def _controls(instruction: Instruction) -> list[str]:
    return [name.lstrip("%") for name in braced(instruction.attributes.get("control-predecessors", "{}"))]
