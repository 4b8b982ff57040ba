"""What the TPU compiler makes of a ReduceScatter along the columns of a matrix."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.aot.compile import compile_for
from overlapfx.aot.hlo import parse_module
from overlapfx.aot.slices import make_slice_mesh, parse_slice
from overlapfx.aot.variants import OURS
from overlapfx.config import Overlap
from overlapfx.ops.collective_einsum import collective_einsum_grid

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
BLOCKING = Overlap(mode="off")


def opcodes(num_columns: int) -> list[str]:
    """Of the gradient of a weight whose columns lie over four TPU v4 chips, from two row stripes."""
    topology = parse_slice("v4:2x2x1")
    mesh, _ = make_slice_mesh(topology, {"y": 4})

    def gradient(x_TF: jax.Array, w_FD: jax.Array, dy_TD: jax.Array) -> jax.Array:
        def product(w_FD: jax.Array) -> list[jax.Array]:
            gather = {"d": "y"}
            made = collective_einsum_grid("tf,fd->td", jnp.split(x_TF, 2), [w_FD], rhs_gather=gather, overlap=BLOCKING)
            return [row[0] for row in made]

        _, pullback = jax.vjp(product, w_FD)
        return pullback(jnp.split(dy_TD, 2))[0]

    shapes, specs = ((4096, 1024), (1024, num_columns), (4096, num_columns)), (P("y"), P(None, "y"), P("y"))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    fn = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[1])
    module = parse_module(compile_for(topology, fn, arguments, OURS.options).text)
    return [step.opcode for made in module.computations.values() for step in made.instructions]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_columns", [4 * 192, 4 * 256])
def test_is_a_reduce_scatter_whether_shards_are_whole_lanes_or_not(num_columns):
    found = opcodes(num_columns)
    assert "all-reduce" not in found
    assert "reduce-scatter" in found
