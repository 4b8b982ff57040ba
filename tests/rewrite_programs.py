"""Functions with blocking collectives, as people write them, beside what the rewrite should make of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from core_harness import integers, quick_compile, simulated_mesh
from core_jaxpr import count
from jax import lax
from jax.sharding import PartitionSpec as P

import overlapfx
from overlapfx.config import Overlap

AXES = {"y": 2, "x": 4}
# One send per hop and one ring per call, so that counts can be written down by hand.
RING = Overlap(mode="on", method="ring", direction="one", unroll=1)
COLLECTIVES = ("all_gather", "all_gather_invariant", "reduce_scatter")


@dataclasses.dataclass(frozen=True)
class Program:
    """A body for shard_map over y=2, x=4 with global shapes and partitions of its arguments and its result.

    calls: collective einsums that it becomes; sends: permutes in their rings; blocking: collectives that stay.
    """

    body: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[Any, ...]
    out: Any
    calls: int
    sends: int
    blocking: int = 0

    def mapped(self, check_vma: bool = True) -> Callable[..., Any]:
        mesh = simulated_mesh(AXES)
        return jax.shard_map(self.body, mesh=mesh, in_specs=self.specs, out_specs=self.out, check_vma=check_vma)

    def arguments(self) -> list[np.ndarray]:
        rng = np.random.default_rng(3)
        return [integers(rng, shape) for shape in self.shapes]


PROGRAMS: dict[str, Program] = {}


def program(shapes: Any, specs: Any, out: Any, **expected: int) -> Callable[..., Any]:
    def register(body: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[body.__name__] = Program(body, shapes, specs, out, **expected)
        return body

    return register


def gather(x: jax.Array, axis: int, name: Any = "x", tiled: bool = True) -> jax.Array:
    return lax.all_gather(x, name, axis=axis, tiled=tiled)


def scatter(x: jax.Array, axis: int, name: Any = "x", tiled: bool = True) -> jax.Array:
    return lax.psum_scatter(x, name, scatter_dimension=axis, tiled=tiled)


ROWS, COLUMNS = P("y", "x"), P("y", None, "x")
X, W = (4, 8, 12), (12, 16)


@program((X, W), (ROWS, P(None, "x")), COLUMNS, calls=1, sends=3)
def rows(x, w):
    return gather(x, 1) @ w


@program((X, W), (COLUMNS, P(None, "x")), COLUMNS, calls=1, sends=3)
def contracted(x, w):
    return jnp.einsum("btd,df->btf", gather(x, 2), w)


@program((X, W), (P("x"), P("x")), P("x"), calls=1, sends=3)
def weight(x, w):
    return x @ gather(w, 0)


@program(((4, 6, 5), (4, 5, 8)), (P("x"), P(None, None, "x")), P(None, None, "x"), calls=1, sends=3)
def batch(x, w):
    return jnp.einsum("ebd,edf->ebf", gather(x, 0), w)


@program((X, W), (COLUMNS, P("x")), ROWS, calls=1, sends=3)
def scattered_rows(x, w):
    return scatter(x @ w, 1)


@program((X, W), (COLUMNS, P("x")), COLUMNS, calls=1, sends=3)
def scattered_columns(x, w):
    return scatter(x @ w, 2)


@program(((8, 12), W), (P("x", "y"), P("y", "x")), P(None, ("x", "y")), calls=1, sends=3, blocking=1)
def gathered_then_scattered(x, w):
    return scatter(gather(x, 0) @ w, 1, "y")


@program((X, W), (P("y", "x"), P("y", "x")), COLUMNS, calls=1, sends=3, blocking=1)
def both_gathered(x, w):
    return gather(x, 1) @ gather(w, 0, "y")


@program((X, W), (ROWS, P(None, "x")), COLUMNS, calls=1, sends=3)
def flattened(x, w):
    whole = gather(x, 1)
    return (whole.reshape(-1, whole.shape[-1]) @ w).reshape(*whole.shape[:2], -1)


@program((X, (12, 4, 6)), (COLUMNS, P("x")), COLUMNS, calls=1, sends=3)
def heads(x, w):
    out = jnp.einsum("btd,dnh->btnh", x, w)
    return scatter(out.reshape(*out.shape[:2], -1), 2)


@program((X, (16, 12)), (P("x"), P(None, "x")), P("x"), calls=1, sends=3)
def transposed(x, w):
    return x @ gather(w, 1).T


@program(((4, 8, 12), W), (P("x"), P(None, "x")), P(None, None, None, "x"), calls=1, sends=3)
def stacked(x, w):
    return gather(x, 0, tiled=False) @ w


@program(((4, 12), W), (P(None, "x"), P("x")), P("x"), calls=1, sends=3)
def scattered_and_dropped(x, w):
    return scatter(x @ w, 0, tiled=False)[None]


@program(((*X,), (12,), W), (ROWS, P(), P(None, "x")), COLUMNS, calls=1, sends=3)
def scaled(x, scale, w):
    return (jnp.maximum(gather(x, 1), 0) * scale - 2) @ w


@program((X, W, (12, 8), (12, 8)), (ROWS, P(None, "x"), P(None, "x"), P(None, "x")), COLUMNS, calls=1, sends=3)
def query_key_value(x, q, k, v):
    whole = gather(x, 1)
    return jnp.concatenate([jnp.einsum("btd,df->btf", whole, w) for w in (q, k, v)], axis=2)


@program((X, W, W), (ROWS, P(None, "x"), P(None, "x")), COLUMNS, calls=1, sends=3)
def written_twice(x, g, u):
    return (gather(x, 1) @ g) * (gather(x, 1) @ u)


@program(((8, 16), (16, 12)), (P(("y", "x")), P(("y", "x"))), P(("y", "x")), calls=1, sends=7)
def over_two_axes(x, w):
    return x @ gather(w, 0, ("y", "x"))


@program(((8, 16), (16, 12)), (P(("y", "x")), P(("y", "x"))), P(("y", "x")), calls=1, sends=7)
def gathered_twice(x, w):
    return x @ gather(gather(w, 0), 0, "y")


@program(
    ((4, 8, 16), (16, 12)), (P(None, None, ("x", "y")), P(("x", "y"))), P(None, "x", "y"), calls=1, sends=3, blocking=1
)
def scattered_over_two_axes(x, w):
    return scatter(scatter(x @ w, 1), 2, "y")


def outputs_and_gradients(function: Callable[..., Any], arguments: Any, transform: Any = lambda f: f) -> Any:
    """Results, and gradients of their inner product with small integers."""
    out = jax.eval_shape(function, *arguments)
    weights = integers(np.random.default_rng(5), out.shape)

    def loss(*arguments: Any) -> Any:
        return jnp.sum(function(*arguments) * weights)

    gradients = transform(jax.grad(loss, tuple(range(len(arguments)))))
    return function(*arguments), gradients(*arguments)


def every_way(plain: Callable[..., Any], arguments: Any, config: Overlap) -> tuple[Any, Any, Any]:
    """Outputs and gradients: plain, rewritten, differentiated then rewritten."""

    def rewritten(function: Callable[..., Any]) -> Callable[..., Any]:
        return overlapfx.overlap(function, config)

    return (
        outputs_and_gradients(plain, arguments),
        outputs_and_gradients(rewritten(plain), arguments),
        outputs_and_gradients(plain, arguments, rewritten),
    )


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compiled quickly, as NumPy."""
    return jax.tree.map(np.asarray, jax.jit(function).lower(*arguments).compile(quick_compile())(*arguments))


def counts(function: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    """How often each kind of equation occurs that tells a rewritten program from a plain one."""
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return {"sends": count(jaxpr, "ppermute"), "blocking": count(jaxpr, *COLLECTIVES)}
