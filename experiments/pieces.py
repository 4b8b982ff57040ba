"""The single pieces of a layer for which the project has goals: `python -m experiments.pieces`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16

from launch.arguments import Parser, one_sentence
from launch.progress import Progress
from overlapfx.aot import slices, variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import compile_for
from overlapfx.aot.read import time_line
from overlapfx.config import Overlap
from overlapfx.ops.collective_einsum import collective_einsum, collective_einsum_grid
from overlapfx.plan import cost

PROG = "experiments.pieces"
_STRIPES = 4
_NARROW, _STRIPED = "ours, bfloat16 sums", "ours, stripes"


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a layer on a slice with a mesh (y, x); times in milliseconds.

    shapes: of its operands, with how they lie; out: how results lie. make: the function on one device for a way to
    overlap. goal_ms: what the project wants of ours. more: a way of `_WAYS` besides blocking and the gate's, if any.
    """

    name: str
    topology: str
    mesh: tuple[int, int]
    goal_ms: float | None
    shapes: Sequence[tuple[tuple[int, ...], P]]
    out: Any
    make: Callable[[Overlap], Callable[..., Any]]
    more: tuple[str, ...] = ()


def mlp(overlap: Overlap) -> Callable[..., Any]:
    """Both einsums of a perceptron, in row stripes unless blocking; sums travel in the dtype of `overlap`."""

    def local(x: BFloat16[Array, "t d"], up: BFloat16[Array, "d f"], down: BFloat16[Array, "f d"]) -> Any:
        stripes = jnp.split(x, _STRIPES) if overlap.mode != "off" else [x]
        gather: dict[str, Any] = {"lhs_gather": {"d": "x"}, "rhs_gather": {"d": "y"}, "activation": jax.nn.gelu}
        hidden = collective_einsum_grid("td,df->tf", stripes, [up], overlap=overlap, name="up", **gather)
        scatter: dict[str, Any] = {"rhs_gather": {"d": "y"}, "out_scatter": {"d": "x"}}
        rows = [made[0] for made in hidden]
        out = collective_einsum_grid("tf,fd->td", rows, [down], overlap=overlap, name="down", **scatter)
        return jnp.concatenate([made[0] for made in out])

    return local


def mlp_with_gradients(overlap: Overlap) -> Callable[..., Any]:
    """The same with the gradients of all operands; the cotangent is the last one."""

    def local(*operands: Array) -> Any:
        out, pullback = jax.vjp(mlp(overlap), *operands[:-1])
        return out, *pullback(operands[-1])

    return local


def gathered_weight(overlap: Overlap) -> Callable[..., Any]:
    """A weight gathered along the contracted label."""
    return lambda x, w: collective_einsum("td,df->tf", x, w, rhs_gather={"d": "y"}, overlap=overlap, name="gather")


def scattered_product(overlap: Overlap) -> Callable[..., Any]:
    """A product summed over x."""
    return lambda x, w: collective_einsum("tf,fd->td", x, w, out_scatter={"d": "x"}, overlap=overlap, name="scatter")


def pieces(topology: str = "v4:8x8x8", mesh: tuple[int, int] = (64, 8), shrink: int = 1) -> tuple[Piece, ...]:
    """Those of the 256B model on its slice, and one weight of the 128B; shrink: divides every size."""
    y = mesh[0]
    tokens, width, hidden, square = (n // shrink for n in (32768, 16384, 65536, 12288))
    operands = (
        ((tokens * y, width), P("y", "x")),
        ((width, hidden), P("y", "x")),
        ((hidden, width), P("x", "y")),
    )
    both, grads = P("y", "x"), (P("y", "x"), P("y", "x"), P("y", "x"), P("x", "y"))
    small = ("v4:4x4x4", (16, 4)) if shrink == 1 else (topology, mesh)
    gathered = (((tokens // 8 * small[1][0], square), P("y")), ((square, square * small[1][1]), P("y", "x")))
    return (
        Piece("MLP forward", topology, mesh, 76.0, operands, both, mlp, (_NARROW,)),
        Piece(
            "MLP forward + backward",
            topology,
            mesh,
            None,
            (*operands, operands[0]),
            grads,
            mlp_with_gradients,
            (_NARROW,),
        ),
        Piece("contracting weight gather", *small, 5.2, gathered, both, gathered_weight, (_STRIPED,)),
        Piece(
            "Einsum-ReduceScatter, float32",
            topology,
            mesh,
            40.0,
            (((tokens * y, hidden), P("y", "x")), ((hidden, width), P("x"))),
            both,
            scattered_product,
        ),
    )


# "ours" is the gate's choice. A weight that is gathered alone has nothing to hide behind but its own einsum, which the
# gate does not count on: in a layer it is gathered while the one before computes.
_WAYS: Mapping[str, Overlap] = {
    "blocking": Overlap(mode="off"),
    "ours": Overlap(),
    _NARROW: Overlap(accum_dtype="bfloat16"),
    _STRIPED: Overlap(method="stripe"),
}


def rows(piece: Piece) -> Iterator[tuple[str, float, float, float]]:
    """(way, total, computing, waiting) in milliseconds, as compiled for the slice."""
    topology = slices.parse_slice(piece.topology)
    mesh, placement = slices.make_slice_mesh(topology, dict(zip(("y", "x"), piece.mesh, strict=True)))
    assumptions = Assumptions.for_slice(topology)
    for way in ("blocking", "ours", *piece.more):
        overlap = _WAYS[way]
        options = {} if overlap.mode == "off" else variants.OURS.options
        with cost.pricing(slices.environment(topology, placement)):
            made = compile_for(topology, _jitted(piece, mesh, overlap), _arguments(piece, mesh), options)
        line = time_line(made, assumptions)
        yield way, 1e3 * line.total_s, 1e3 * line.compute_s, 1e3 * (line.exposed_s + line.blocking_s)


def _jitted(piece: Piece, mesh: Mesh, overlap: Overlap) -> Any:
    specs = tuple(spec for _, spec in piece.shapes)
    return jax.jit(jax.shard_map(piece.make(overlap), mesh=mesh, in_specs=specs, out_specs=piece.out))


def _arguments(piece: Piece, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    return [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for shape, spec in piece.shapes
    ]


def main(argv: Sequence[str] | None = None, made: Callable[[], Sequence[Piece]] = pieces) -> int:
    """Prints a line per piece and way; returns 0."""
    parser = Parser(prog=PROG, description="Single pieces of a layer, compiled for TPU v4 slices (estimates).")
    parser.add_argument("--piece", action="append", choices=[piece.name for piece in made()], help="only this one")
    arguments: argparse.Namespace = parser.parse_args(argv)
    with one_sentence(PROG):
        slices.require_compiler()
        slices.prepare_environment()
    progress = Progress()
    print(f"{'piece':32s}{'way':22s}{'ms':>9s}{'compute':>9s}{'waiting':>9s}{'gain':>8s}   goal")
    for piece in made():
        if arguments.piece and piece.name not in arguments.piece:
            continue
        blocking_ms = None
        with progress.working(f"{piece.name} on {piece.topology}"):
            for way, total, computing, waiting in rows(piece):
                blocking_ms = blocking_ms or total
                goal = "" if piece.goal_ms is None or way == "blocking" else f"at most {piece.goal_ms:g} ms"
                cells = "".join(f"{ms:9.4g}" for ms in (total, computing, waiting))
                print(f"{piece.name:32s}{way:22s}{cells}{blocking_ms / total:7.3f}x   {goal}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
