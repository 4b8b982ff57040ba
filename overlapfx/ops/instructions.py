"""From a traced function to the instruction graph that schedulers put in order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxprs_in_params

from overlapfx import chips
from overlapfx.plan.schedulers.base import COMPUTE, DONE, START, Graph, Node

Value = int | Literal  # a number that names a value, or a constant written in place

# Primitives that only name a traced function: its operations stand for them.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
# Transfers that can run beside computation once they are issued; others hold the processor.
TRANSFERS = ("ppermute", "all_gather")
_BLOCKING = frozenset(
    {"psum", "psum_invariant", "reduce_scatter", "all_to_all", "pmax", "pmin", "all_gather_invariant"}
)
# Loops, and what is recomputed (whose name has changed over time), with the traced functions that they run.
BODIES = {
    "scan": ("jaxpr",),
    "while": ("body_jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}
# What an order is about: operations long enough to hide a transfer.
_LONG = frozenset({"dot_general", "conv_general_dilated", "cond", "pallas_call", *BODIES})
_PIECEWISE = """
abs add and ceil clamp convert_element_type copy copy_p cos div dynamic_update_slice eq erf erf_inv exp exp2 expm1 floor
ge gt integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pcast pow pvary
reduce_precision rem round rsqrt select_n sign sin sqrt square stop_gradient sub tan tanh xor
"""
# Operations that the compiler can fuse behind a product: element by element, or written into a larger array.
_FUSED = frozenset(_PIECEWISE.split())
# Operations that only name, and those that read no more than they return.
_FREE = frozenset({"optimization_barrier", "reshape", "squeeze", "expand_dims", "pvary", "pcast", "broadcast_in_dim"})
_SLICES = frozenset({"slice", "dynamic_slice", "gather"})


@dataclasses.dataclass(frozen=True)
class Operation:
    """One equation with its values: `reads` and `writes` are numbered through the whole function."""

    eqn: JaxprEqn
    reads: tuple[Value, ...]
    writes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Flat:
    """A traced function without calls: values `inputs` come in, `outputs` go out, `constants` are known."""

    inputs: tuple[int, ...]
    constants: dict[int, Any]
    operations: tuple[Operation, ...]
    outputs: tuple[Value, ...]


@dataclasses.dataclass
class Step:
    """One node: the operations that belong together; kind as in the graph.

    is_long: whether its place counts. start: what a DONE waits for.
    """

    kind: str
    operations: list[Operation]
    is_long: bool = False
    start: Step | None = None

    @property
    def is_product(self) -> bool:
        """Whether it is an einsum or a convolution, with what is fused behind it."""
        return self.is_long and self.operations[0].eqn.primitive.name in ("dot_general", "conv_general_dilated")

    def writes(self) -> set[int]:
        """Values that it makes."""
        return {w for op in self.operations for w in op.writes}

    def reads(self) -> list[int]:
        """Values that it takes from elsewhere, each once."""
        own = self.writes()
        found = [r for op in self.operations for r in op.reads if isinstance(r, int) and r not in own]
        return list(dict.fromkeys(found))


def transfers(jaxpr: Jaxpr) -> frozenset[str]:
    """The names of all primitives in it, loops included, that can be transfers beside computation."""
    here = frozenset(eqn.primitive.name for eqn in jaxpr.eqns).intersection(TRANSFERS)
    return here.union(*(transfers(inner) for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params)))


def flatten(closed: ClosedJaxpr) -> Flat:
    """Numbers every value and replaces calls by what they call, loops apart."""
    operations: list[Operation] = []
    constants: dict[int, Any] = {}
    count = 0

    def fresh(_: Any) -> int:
        nonlocal count
        count += 1
        return count - 1

    def inline(jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Value]) -> list[Value]:
        names: dict[Var, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            number = fresh(var)
            names[var], constants[number] = number, const

        def value(atom: Any) -> Value:
            return atom if isinstance(atom, Literal) else names[atom]

        for eqn in jaxpr.eqns:
            reads = [value(atom) for atom in eqn.invars]
            called = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
            if called is not None:
                closed = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
                names.update(zip(eqn.outvars, inline(closed.jaxpr, closed.consts, reads), strict=True))
                continue
            writes = tuple(map(fresh, eqn.outvars))
            names.update(zip(eqn.outvars, writes, strict=True))
            operations.append(Operation(eqn, tuple(reads), writes))
        return [value(atom) for atom in jaxpr.outvars]

    inputs = [fresh(var) for var in closed.jaxpr.invars]
    outputs = inline(closed.jaxpr, closed.consts, inputs)
    return Flat(tuple(inputs), constants, tuple(operations), tuple(outputs))


def group(flat: Flat) -> list[Step]:
    """Operations as steps, in a legal order: a product with what can be fused behind it is one step.

    An addition joins the product that it adds up, even where it has to wait for a transfer: the compiler would fuse it
    with one product or another, and this one is free to be put after the transfer (the paper's figure 11b).
    """
    steps: list[Step] = []
    maker: dict[int, Step] = {}  # of each value
    needs: dict[int, set[int]] = {}  # by identity of a step: those that it needs, directly

    def add(step: Step) -> None:
        steps.append(step)
        needs[id(step)] = {id(maker[r]) for r in step.reads() if r in maker}
        maker.update(dict.fromkeys(step.writes(), step))

    def reaches(begin: Iterable[int], target: int) -> bool:
        seen, todo = set[int](), list(begin)
        while todo:
            here = todo.pop()
            if here == target:
                return True
            if here not in seen:
                seen.add(here)
                todo += needs[here]
        return False

    for op in flat.operations:
        name = op.eqn.primitive.name
        if name in TRANSFERS:
            start = Step(START, [op])
            add(start)
            done = Step(DONE, [], start=start)
            steps.append(done)
            needs[id(done)] = {id(maker[op.writes[0]])}
            maker.update(dict.fromkeys(op.writes, done))
            continue
        if name in _FUSED:
            makers = {id(maker[r]): maker[r] for r in op.reads if isinstance(r, int) and r in maker}
            home = next((s for s in reversed(list(makers.values())) if s.is_product), None)
            others = makers.keys() - {id(home)}
            if home is not None and _keeps_shape(op, home) and not reaches(others, id(home)):
                home.operations.append(op)
                needs[id(home)] |= others
                maker.update(dict.fromkeys(op.writes, home))
                continue
        add(Step(COMPUTE, [op], is_long=name in _LONG or name in _BLOCKING))
    return _sorted(steps, needs)


def _keeps_shape(op: Operation, home: Step) -> bool:
    """Whether the operation works on each element of what the product made, or writes it into an array."""
    made = home.writes()
    if op.eqn.primitive.name == "dynamic_update_slice":
        return op.reads[1] in made and op.reads[0] not in made
    shapes = {_shape(var) for var, r in zip(op.eqn.invars, op.reads, strict=True) if r in made}
    return shapes == {_shape(op.eqn.outvars[0])}


def _sorted(steps: list[Step], needs: dict[int, set[int]]) -> list[Step]:
    """Steps in an order in which each follows what it needs, otherwise as they stand."""
    found: list[Step] = []
    done: set[int] = set()
    by_id = {id(step): step for step in steps}
    for step in steps:
        todo = [id(step)]
        while todo:
            here = todo[-1]
            missing = [n for n in needs[here] if n not in done and here not in done]
            if missing:
                todo += missing
                continue
            todo.pop()
            if here not in done:
                done.add(here)
                found.append(by_id[here])
    return found


@dataclasses.dataclass(frozen=True)
class Rates:
    """What steps are priced with: FLOP/s, bytes/s of memory and of one link, seconds per hop."""

    flops: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    hop_s: float = 1e-6

    @classmethod
    def here(cls) -> Rates:
        """Of the devices that are traced for; of a TPU v4 where they are none that we have figures of."""
        device = jax.sharding.get_abstract_mesh().abstract_device
        chip = chips.BY_DEVICE_KIND.get(getattr(device, "device_kind", ""), chips.TPU_V4).per_device()
        if chip.hbm_bytes_per_s is None or chip.link_bytes_per_s is None:
            chip = chips.TPU_V4
        assert chip.hbm_bytes_per_s is not None and chip.link_bytes_per_s is not None
        return cls(chip.peak_bf16_flops, chip.hbm_bytes_per_s, chip.link_bytes_per_s)


def make_graph(flat: Flat, steps: Sequence[Step], rates: Rates) -> Graph:
    """The steps as nodes, with estimates of time and memory."""
    maker: dict[int, int] = {}
    place: dict[int, int] = {}  # by identity of a step
    links: dict[Any, int] = {}
    nodes: list[Node] = []
    for i, step in enumerate(steps):
        place[id(step)] = i
        if step.start is not None:
            start = place[id(step.start)]
            nodes.append(Node(f"{nodes[start].name}-done", DONE, (start,), shares=(start,)))
            maker.update(dict.fromkeys(step.start.writes(), i))
            continue
        operands = tuple(dict.fromkeys(maker[r] for r in step.reads() if r in maker))
        name = step.operations[0].eqn.primitive.name
        size = sum(_bytes(var) for var in step.operations[-1].eqn.outvars)
        if step.kind == START or name in _BLOCKING:
            loads, latency = _wire(step.operations[0].eqn, rates, links)
            nodes.append(Node(name, step.kind, operands, loads=loads, latency_s=latency, size_bytes=size))
        else:
            nodes.append(Node(name, COMPUTE, operands, seconds=_seconds(step, rates), size_bytes=size))
        maker.update(dict.fromkeys(step.writes(), i))
    results = {maker[out] for out in flat.outputs if isinstance(out, int) and out in maker}
    return Graph(tuple(nodes), tuple(sorted(results)))


def _shape(var: Any) -> tuple[int, ...]:
    return tuple(var.aval.shape)


def _bytes(var: Any) -> int:
    """Bytes of a value; 0 for tokens and the like."""
    shape, dtype = getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)
    return 0 if shape is None or dtype is None else math.prod(shape) * dtype.itemsize


def _seconds(step: Step, rates: Rates) -> float:
    """Arithmetic or memory traffic, whichever takes longer; a loop takes as long as its body, as often as it runs."""
    first, last = step.operations[0].eqn, step.operations[-1].eqn
    if first.primitive.name in _FREE:
        return 0.0
    flops = sum(_flops(op.eqn) for op in step.operations)
    inner = sum(_inner_seconds(op.eqn, rates) for op in step.operations)
    own, read = step.writes(), dict[int, int]()
    for op in step.operations:
        for r, var in zip(op.reads, op.eqn.invars, strict=True):
            if isinstance(r, int) and r not in own:
                # A slice reads what it keeps, an update in place what it writes.
                part = op.eqn.outvars[0] if op.eqn.primitive.name in _SLICES else var
                read[r] = 0 if op.eqn.primitive.name == "dynamic_update_slice" else _bytes(part)
    written = _bytes(last.invars[1]) if last.primitive.name == "dynamic_update_slice" else _bytes(last.outvars[0])
    return max(flops / rates.flops, (sum(read.values()) + written) / rates.hbm_bytes_per_s) + inner


def _flops(eqn: JaxprEqn) -> float:
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(_shape(eqn.invars[0])[d] for d in contracted)
        return 2.0 * depth * math.prod(_shape(eqn.outvars[0]))
    if eqn.primitive.name == "conv_general_dilated":
        kernel = _shape(eqn.invars[1])
        features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * math.prod(kernel) / features * math.prod(_shape(eqn.outvars[0]))
    return 0.0


def _inner_seconds(eqn: JaxprEqn, rates: Rates) -> float:
    """Arithmetic inside a loop or branch: all of its iterations, all of its branches."""
    inner = [eqn.params[name] for name in BODIES.get(eqn.primitive.name, ())] + list(eqn.params.get("branches", ()))
    jaxprs = [body.jaxpr if isinstance(body, ClosedJaxpr) else body for body in inner]
    total = sum(_flops(e) / rates.flops + _inner_seconds(e, rates) for jaxpr in jaxprs for e in jaxpr.eqns)
    return total * int(eqn.params.get("length", 1))


def _wire(eqn: JaxprEqn, rates: Rates, links: dict[Any, int]) -> tuple[tuple[tuple[int, float], ...], float]:
    """(loads, latency): a permute occupies the links of its direction, every other collective both."""
    name, wire_s = eqn.primitive.name, _bytes(eqn.invars[0]) / rates.link_bytes_per_s
    axes = eqn.params.get("axis_name", eqn.params.get("axes", ()))
    axes = axes if isinstance(axes, tuple) else (axes,)
    perm = eqn.params.get("perm", ())
    if name == "ppermute" and perm:
        hops = (perm[0][1] - perm[0][0]) % len(perm)
        way, hops = (-1, len(perm) - hops) if 2 * hops > len(perm) else (1, hops)
        return ((links.setdefault((axes, way), len(links)), wire_s * hops),), hops * rates.hop_s
    size = math.prod(jax.lax.axis_size(axis) for axis in axes if isinstance(axis, str))
    factor = {"all_gather": size - 1, "reduce_scatter": (size - 1) / size, "psum": 2 * (size - 1) / size}.get(name, 1.0)
    both = [links.setdefault((axes, way), len(links)) for way in (-1, 1)]
    return tuple((link, factor * wire_s / 2) for link in both), size / 2 * rates.hop_s
