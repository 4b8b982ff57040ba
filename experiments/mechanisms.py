"""What the installed JAX and TPU compiler make of an imposed order: `python -m experiments.mechanisms`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.arguments import Parser, one_sentence
from overlapfx.aot import slices, variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import compile_for
from overlapfx.aot.hlo import Instruction, Module, parse_module
from overlapfx.aot.read import time_line
from overlapfx.config import Overlap
from overlapfx.ops import order
from overlapfx.ops.collective_einsum import collective_einsum
from overlapfx.ops.instructions import Step
from overlapfx.plan.schedulers.base import DONE, START

PROG = "experiments.mechanisms"
TOPOLOGY = "v4:2x2x1"
_SCHEDULERS = ("bottom_up", "top_down")

# Called inside shard_map: an Einsum-ReduceScatter as a ring in both directions, an AllGather-Einsum in stripes.
_RING = functools.partial(
    collective_einsum,
    "tf,fd->td",
    out_scatter={"d": "x"},
    overlap=Overlap(mode="on", method="ring", direction="two", unroll=2),
)
_STRIPES = functools.partial(
    collective_einsum, "td,df->tf", lhs_gather={"d": "x"}, overlap=Overlap(mode="on", method="stripe")
)


@dataclasses.dataclass(frozen=True)
class Program:
    """A looped einsum with the shapes of its operands and how they lie; transfers: the primitive that moves data."""

    name: str
    fn: Callable[..., Any]
    shapes: Sequence[tuple[int, int]]
    specs: tuple[P, P]
    out: P
    transfers: tuple[str, ...]


PROGRAMS = (
    Program(
        "ring of ppermute", _RING, ((4096, 32768), (32768, 8192)), (P(None, "x"), P("x")), P(None, "x"), ("ppermute",)
    ),
    Program(
        "stripes of AllGather",
        _STRIPES,
        ((16384, 8192), (8192, 32768)),
        (P(None, "x"), P(None, "x")),
        P(None, "x"),
        ("all_gather",),
    ),
)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as compiled: its places, as `places` writes them, and its time line in milliseconds."""

    places: str
    step_ms: float
    waiting_ms: float


def places(letters: Iterable[str]) -> str:
    """S a start, D a done, P a product, in their order; between two products dones stand before starts."""
    return re.sub("[SD]+", lambda found: "".join(sorted(found[0])), "".join(letters))


def imposed_places(program: Program, mesh: Mesh, scheduler: str) -> tuple[str, dict[str, str]]:
    """Where a scheduler puts starts, dones and products; what `order.why_not` says there of each mechanism."""
    found: list[Step] = []
    reasons: dict[str, str] = {}

    def local(*operands: jax.Array) -> Any:
        found[:] = order.in_order(jax.make_jaxpr(program.fn)(*operands), scheduler)[1]
        reasons.update((how, order.why_not(how, program.transfers)) for how in order.MECHANISMS)
        return operands[0]

    jax.eval_shape(_mapped(program, mesh, local), *_arguments(program, mesh))
    letter = {START: "S", DONE: "D"}
    return places(letter.get(step.kind, "P" if step.is_product else "") for step in found), reasons


def compiled_places(module: Module) -> str:
    """Where they stand in the entry of a compiled program."""

    def letter(step: Instruction) -> str:
        if step.opcode in ("fusion", "convolution"):
            return "P" if "dot_general" in step.op_name else ""
        kind = step.opcode.removeprefix("collective-permute").removeprefix("all-gather")
        return {"-start": "S", "-done": "D"}.get(kind, "")

    return places(map(letter, module.computations[module.entry].instructions))


def compiled(program: Program, mesh: Mesh, fn: Callable[..., Any]) -> Compiled:
    """`fn`, the program in some order, compiled for TOPOLOGY with the options of our steps."""
    topology = slices.parse_slice(TOPOLOGY)
    made = compile_for(topology, _mapped(program, mesh, fn), _arguments(program, mesh), variants.OURS.options)
    line = time_line(made, Assumptions.for_slice(topology))
    waiting_s = line.exposed_s + line.blocking_s
    return Compiled(compiled_places(parse_module(made.text)), 1e3 * line.total_s, 1e3 * waiting_s)


def _mapped(program: Program, mesh: Mesh, fn: Callable[..., Any]) -> Any:
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=program.specs, out_specs=program.out))


def _arguments(program: Program, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(program.shapes, program.specs, strict=True)
    ]


_ROW = "{:10s} {:29s} {:>7s} {:>8s}  {:18s} {}".format


def rows(program: Program, mesh: Mesh) -> Iterator[str]:
    """The compiler's own order, then each of ours by each mechanism, a line as soon as it is compiled.

    Only starts that this JAX does not offer are left out; other mechanisms are compiled even if they are not used.
    """
    own = compiled(program, mesh, program.fn)
    yield _ROW("compiler", "", f"{own.step_ms:.3f}", f"{own.waiting_ms:.3f}", "", own.places)
    for scheduler in _SCHEDULERS:
        wanted, reasons = imposed_places(program, mesh, scheduler)
        yield _ROW(scheduler, "", "", "", "wanted", wanted)
        used = next(how for how in order.MECHANISMS if not reasons[how])
        for how in order.MECHANISMS:
            if how == order.ASYNCHRONOUS and reasons[how]:
                yield _ROW("", how, "", "", reasons[how], "")
                continue
            made = compiled(program, mesh, order.impose(program.fn, scheduler, how))
            verdict = {wanted: "as wanted", own.places: "the compiler's own"}.get(made.places, "neither")
            by = f"{how}{' *' if how == used else ''}"
            yield _ROW("", by, f"{made.step_ms:.3f}", f"{made.waiting_ms:.3f}", verdict, made.places)


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles looped einsums in the compiler's own order, then in each of ours by each mechanism; returns 0."""
    Parser(prog=f"python -m {PROG}", description=main.__doc__).parse_args(argv)
    with one_sentence(PROG):
        slices.require_compiler()
        slices.prepare_environment()
    mesh, _ = slices.make_slice_mesh(slices.parse_slice(TOPOLOGY), {"x": 4})
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))
    print(f"Looped einsums for {TOPOLOGY} with {versions} (estimates); the mechanism with a star is the one used.")
    print("S: start, D: done, P: product.")
    for program in PROGRAMS:
        print(f"\n{program.name}")
        print(_ROW("order", "by", "ms", "waiting", "", "places"))
        for row in rows(program, mesh):
            print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
