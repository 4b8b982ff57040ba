"""AllReduces of products become ReduceScatters and AllGathers where the gate finds that cheaper, and only there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_programs as rp
from jax import lax
from jax.sharding import PartitionSpec as P
from rewrite_programs import COLUMNS, Program

import overlapfx
from overlapfx.chips import TPU_V4
from overlapfx.config import Overlap
from overlapfx.plan.cost import AxisLinks, Environment, pricing
from overlapfx.plan.prices import PRICES, Prices

pytestmark = pytest.mark.core

# A chip so slow that the latency of a hop is nothing beside a few thousand bytes, and as quick with narrow products.
_SLOW = dataclasses.replace(
    TPU_V4, name="slow", peak_bf16_flops=2e5, link_bytes_per_s=3e5, hbm_bytes_per_s=TPU_V4.hbm_bytes_per_s / 1e6
)
SLOW = Environment(_SLOW)


@pytest.fixture(autouse=True, scope="module")
def narrow_products() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRICES, "slow", Prices({1: 1.0}, sum_s_per_byte=0.0, copy_s_per_byte=0.0))
        yield


# Two chains, each of which sends beside the other's products.
CHAINS = Overlap(mode="on", method="ring", direction="one", unroll=2)
X, W = (2, 64, 16), (16, 32)
_X, _W = (P("y", None, "x"), P("x"))
PROGRAMS = {
    "product": Program(lambda x, w: lax.psum(x @ w, "x"), (X, W), (_X, _W), P("y"), calls=1, sends=6, blocking=1),
    "reshaped, converted": Program(
        lambda x, w: lax.psum((x.reshape(-1, x.shape[-1]) @ w).astype(jnp.float32).T, ("x",)),
        (X, W),
        (_X, _W),
        P(None, "y"),
        calls=1,
        sends=6,
        blocking=1,
    ),
    "residual": Program(
        lambda x, r, w: r + 2 * lax.psum(x @ w, "x"),
        (X, (2, 64, 32), W),
        (_X, P("y"), _W),
        P("y"),
        calls=1,
        sends=6,
        blocking=1,
    ),
    "sum of two": Program(
        lambda x, v, w: lax.psum(x @ v + x @ w, "x"), (X, W, W), (_X, _W, _W), P("y"), calls=1, sends=6, blocking=1
    ),
    # Two arrays in one AllReduce, one of them no product.
    "beside another": Program(
        lambda x, w: sum(part.sum(1) for part in lax.psum((x @ w, x[..., :1]), "x")),
        (X, W),
        (_X, _W),
        P("y"),
        calls=1,
        sends=6,
        blocking=1,
    ),
    # What the AllGather brings feeds a product: both halves run beside arithmetic.
    "then a product": Program(
        lambda x, w, v: lax.psum(x @ w, "x") @ v,
        (X, W, (32, 48)),
        (_X, _W, P(None, "x")),
        COLUMNS,
        calls=2,
        sends=9,
    ),
}


# Without check_vma an AllReduce has another gradient.
NUMBERS = [(name, True) for name in PROGRAMS] + [(name, False) for name in ("product", "then a product")]


@functools.cache
def results(check_vma: bool) -> Any:
    """Of all programs in one compilation: plain, rewritten, differentiated then rewritten."""
    names = [name for name, checked in NUMBERS if checked == check_vma]
    arguments = {name: PROGRAMS[name].arguments() for name in names}

    def everything(arguments: Any) -> Any:
        return {name: rp.every_way(PROGRAMS[name].mapped(check_vma), arguments[name], CHAINS) for name in names}

    with pricing(SLOW):
        return rp.run(everything, arguments)


@pytest.mark.parametrize(("name", "check_vma"), NUMBERS)
def test_same_numbers(name: str, check_vma: bool) -> None:
    plain, rewritten, rewritten_gradient = results(check_vma)[name]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(plain))
    jax.tree.map(np.testing.assert_array_equal, rewritten, plain)
    jax.tree.map(np.testing.assert_array_equal, rewritten_gradient, plain)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_becomes_of_it(name: str, check_vma: bool) -> None:
    program = PROGRAMS[name]
    rewritten, arguments = overlapfx.overlap(program.mapped(check_vma), CHAINS), program.arguments()
    with pricing(SLOW):
        report = rewritten.report(*arguments)
        found = rp.counts(rewritten, *arguments)
    assert len(report.rewritten) == program.calls, str(report)
    assert not report.left, str(report)
    assert found == {"sends": program.sends, "blocking": program.blocking}
    replaced = [text for item in report.rewritten for text in item.replaced]
    assert replaced[0].startswith("AllReduce over x of float32[") and replaced[0].endswith(
        "] as ReduceScatter and AllGather"
    )


def left(program: Program, where: Environment, config: Overlap = CHAINS) -> str:
    """Why the AllReduces of a program stay, which then is the program it was."""
    plain, arguments = program.mapped(), program.arguments()
    with pricing(where):
        rewritten = overlapfx.overlap(plain, config)
        report = rewritten.report(*arguments)
        assert not report.rewritten, str(report)
        before, after = (str(jax.make_jaxpr(f)(*arguments)) for f in (plain, rewritten))
    assert before == after
    (reason,) = (item.reason for item in report.left)
    return reason


def test_whole_where_that_is_cheaper() -> None:
    # On a real chip the hops of a ring take longer than all else, whatever the mode says of other collectives.
    reason = left(PROGRAMS["product"], Environment())
    assert reason.startswith("ReduceScatter beside its product and AllGather are no cheaper: ")
    split_ms, whole_ms = (float(part.split(" ms")[0].split()[-1]) for part in reason.split(": ")[1].split(","))
    assert split_ms > whole_ms > 0


def test_whole_where_an_all_gather_is_an_all_reduce() -> None:
    # Over three dimensions of a torus TPU compilers make either half an AllReduce.
    summed = dataclasses.replace(SLOW, axes={"x": AxisLinks(native=6.0, members=(4, 4, 4))})
    assert "are no cheaper: " in left(PROGRAMS["product"], summed)


def _body(body: Callable[..., Any]) -> Program:
    return Program(body, (X, W), (_X, _W), P("y"), calls=0, sends=0)


LEFT = {
    "odd sizes": (
        _body(lambda x, w: lax.psum(x[:1, :63] @ w[:, :7], "x")),
        "no dimension of it divides by the number of devices",
    ),
    "used elsewhere": (
        _body(lambda x, w: (lambda y: lax.psum(y, "x") + lax.psum(jnp.sin(y), "x"))(x @ w)),
        "is also used elsewhere",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_reasons(name: str) -> None:
    program, reason = LEFT[name]
    assert reason in left(program, SLOW)


def test_mode_off() -> None:
    assert "the gate leaves it blocking (mode off)" in left(PROGRAMS["product"], SLOW, Overlap(mode="off"))


def test_in_a_rematerialized_scan() -> None:
    def layers(x: Any, w: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jnp.tanh(lax.psum(x[..., : w.shape[0]] @ w, "x")), None

        return lax.scan(jax.checkpoint(layer), x, w)[0]

    mesh = rp.simulated_mesh(rp.AXES)
    plain = jax.shard_map(layers, mesh=mesh, in_specs=(P("y"), P(None, "x")), out_specs=P("y"))
    arguments = (jax.ShapeDtypeStruct((2, 64, 16), np.float32), jax.ShapeDtypeStruct((3, 16, 16), np.float32))
    with pricing(SLOW):
        report = overlapfx.overlap(jax.grad(lambda *a: jnp.sum(plain(*a)), 1), CHAINS).report(*arguments)
    # Forward, recomputed, and the sum of what the devices of x say about the activations.
    assert [text for item in report.rewritten for text in item.replaced if " over x " in text] == [
        f"AllReduce over x of float32[1, 64, {width}] as ReduceScatter and AllGather" for width in (16, 16, 4)
    ], str(report)
