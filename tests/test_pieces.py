"""The single pieces of a layer: they compute what they say, and the command prints their times."""

from __future__ import annotations

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from experiments import pieces
from overlapfx.config import MeshConfig, Overlap
from overlapfx.mesh import make_mesh

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
TINY = functools.partial(pieces.pieces, "v4:2x2x1", (2, 2), shrink=64)


@pytest.mark.parametrize("mode", ["off", "on"])
def test_perceptron_and_its_gradients(mode):
    mesh = make_mesh(MeshConfig(y=2, x=2), jax.devices()[:4])
    rng = np.random.default_rng(0)
    x, up, down, dy = (rng.standard_normal(shape, np.float32) for shape in ((32, 16), (16, 64), (64, 16), (32, 16)))

    def plain(x, up, down):
        return jax.nn.gelu(x @ up) @ down

    wanted, pullback = jax.vjp(plain, *map(jnp.asarray, (x, up, down)))
    both = P("y", "x")
    made = jax.shard_map(
        pieces.mlp_with_gradients(Overlap(mode=mode)),
        mesh=mesh,
        in_specs=(both, both, P("x", "y"), both),
        out_specs=(both, both, both, P("x", "y")),
    )
    found = jax.jit(made)(x, up, down, dy)
    # Stripes are cut on every device, so the rows of the whole are the same ones.
    for got, want in zip(found, (wanted, *pullback(jnp.asarray(dy))), strict=True):
        assert_close(got, want)


@pytest.mark.slow
@needs_compiler
def test_every_piece_is_compiled_in_its_ways(capsys):
    assert pieces.main(["--piece=contracting weight gather", "--piece=MLP forward"], TINY) == 0
    lines = [line for line in capsys.readouterr().out.splitlines()[1:] if line]
    ways = [(line[:32].strip(), line[32:54].strip()) for line in lines]
    assert ways == [
        ("MLP forward", "blocking"),
        ("MLP forward", "ours"),
        ("MLP forward", "ours, bfloat16 sums"),
        ("contracting weight gather", "blocking"),
        ("contracting weight gather", "ours"),
        ("contracting weight gather", "ours, stripes"),
    ]
    for line in lines:
        total, computing, waiting = (float(cell) for cell in line[54:].split()[:3])
        assert 0 < computing <= total
        assert total == pytest.approx(computing + waiting, rel=0.01)
    assert lines[0].split()[-1] == "1.000x"
    assert lines[1].endswith("at most 76 ms")


def test_unknown_piece(capsys):
    with pytest.raises(SystemExit) as stopped:
        pieces.main(["--piece=attention"], TINY)
    assert stopped.value.code == 2
    assert "--piece" in capsys.readouterr().err
