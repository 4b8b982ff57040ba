"""Programs written for blocking collectives, rewritten under jit, scan and remat, forward and differentiated."""

from __future__ import annotations

from typing import Any

import core_jaxpr
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_programs as rp
from jax import lax
from jax.sharding import PartitionSpec as P
from rewrite_programs import RING, gather, scatter
from tolerances import assert_close

import overlapfx
from experiments import foreign

pytestmark = pytest.mark.core

STRUCTURE = ("scan", "remat2", "checkpoint", "shard_map", "while", "cond")
SIZES = foreign.Sizes(batch=4, time=8, width=16, heads=4, head_dim=4, hidden=32, experts=4, layers=2)
# Collective einsums of a layer forward and in its gradient, which computes all but the last sum again; sends in the
# gradient at 3 per ring over x, 1 over y and 7 over both, if it was rewritten and if what was rewritten was
# differentiated; collectives that stay in the gradient besides AllReduces.
EXPECTED = {
    # 4 forward: qkv, output, gate and up, down. 3 again. One stream each for both gradients of down and output, two
    # for those of the others: sums that are scattered, and gathered tokens once more.
    "sequence parallel": {"forward": 4, "gradient": 13, "sends": 39, "sends of gradient": 39, "blocking": 0},
    # 7 weights forward, 6 again, 7 gathered once more, 7 gradients scattered; the rewrite sees that two products of
    # `up` can share its stream, for neither waits for the other.
    "fully sharded": {"forward": 7, "gradient": 26, "sends": 26, "sends of gradient": 27, "blocking": 0},
    # 2 weights forward and again, 2 gathered once more, 2 gradients scattered. Biases are added, not multiplied: 2
    # gathered forward and again, 2 gradients scattered.
    "data parallel": {"forward": 2, "gradient": 8, "sends": 56, "sends of gradient": 56, "blocking": 6},
    # Gather and scatter forward and again, for the slots of the last sum feed the gradient of the gate. Both gradients
    # of down share a stream; one for each of up.
    "mixture of experts": {"forward": 2, "gradient": 7, "sends": 21, "sends of gradient": 21, "blocking": 0},
    # As the MLP of the first: 2 forward, 1 again, 1 for both gradients of down, 2 for those of up.
    "flax": {"forward": 2, "gradient": 6, "sends": 18, "sends of gradient": 18, "blocking": 0},
}


def structure(function: Any, *arguments: Any) -> dict[str, int]:
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    return {name: core_jaxpr.count(jaxpr, name) for name in STRUCTURE}


def example(name: str, check_vma: bool = True) -> tuple[Any, tuple[Any, Any]]:
    """The loss of a foreign program with arguments that keep activations near one."""
    program, mesh, rng = foreign.PROGRAMS[name], rp.simulated_mesh(rp.AXES), np.random.default_rng(11)
    x, parameters = program.arguments(mesh, SIZES, np.float32)
    values = {n: rng.standard_normal(p.shape) / p.shape[1] ** 0.5 for n, p in parameters.items()}
    tokens = rng.standard_normal(x.shape).astype(np.float32)
    return program.loss(mesh, check_vma), (tokens, {n: v.astype(np.float32) for n, v in values.items()})


@pytest.mark.parametrize("name", foreign.PROGRAMS)
def test_gradients_of_a_layer_stack(name: str) -> None:
    plain, arguments = example(name)
    before = jax.value_and_grad(overlapfx.overlap(plain, RING), (0, 1))
    after = overlapfx.overlap(jax.value_and_grad(plain, (0, 1)), RING)
    want, *got = rp.run(lambda *a: (jax.value_and_grad(plain, (0, 1))(*a), before(*a), after(*a)), *arguments)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(want))
    for made in got:
        jax.tree.map(assert_close, made, want)


@pytest.mark.parametrize(
    ("name", "check_vma"),
    [*((name, True) for name in EXPECTED), ("sequence parallel", False), ("fully sharded", False)],
)
def test_what_is_rewritten(name: str, check_vma: bool) -> None:
    expected = EXPECTED[name]
    plain, arguments = example(name, check_vma)
    gradient = jax.grad(plain, (0, 1))
    forward, after = overlapfx.overlap(plain, RING), overlapfx.overlap(gradient, RING)
    assert len(forward.report(*arguments).rewritten) == expected["forward"], str(forward.report(*arguments))
    assert structure(forward, *arguments) == structure(plain, *arguments)
    report = after.report(*arguments)
    assert len(report.rewritten) == expected["gradient"], str(report)
    left = [item for item in report.left if "AllReduce" not in item.collective]
    assert len(left) == expected["blocking"], str(report)
    assert structure(after, *arguments) == structure(gradient, *arguments)
    assert rp.counts(after, *arguments) == {"sends": expected["sends"], "blocking": len(left)}, str(report)
    differentiated = rp.counts(jax.grad(forward, (0, 1)), *arguments)
    assert differentiated == {"sends": expected["sends of gradient"], "blocking": len(left)}


def test_residuals_that_leave_are_named() -> None:
    # Without remat, what was gathered is kept for the backward pass: there is nothing to overlap it with.
    program = rp.PROGRAMS["rows"]
    gradient = jax.grad(lambda x, w: jnp.sum(program.mapped()(x, w) ** 2), (0, 1))
    report = overlapfx.overlap(gradient, RING).report(*program.arguments())
    assert any("rewrite before differentiating, or use jax.checkpoint" in item.reason for item in report.left)


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return scatter(jnp.maximum(gather(x, 0) @ w, 0) @ w.T, 0)


@jax.custom_vjp
def with_own_rule(x, w):
    return layer(x, w)


def own_forward(x, w):
    return layer(x, w), (x, w)


def own_backward(residuals, dy):
    # Twice the gradient: it must be this rule that runs.
    _, pullback = jax.vjp(layer, *residuals)
    return jax.tree.map(lambda g: 2 * g, pullback(dy))


with_own_rule.defvjp(own_forward, own_backward)


@jax.custom_jvp
def with_own_tangents(x, w):
    return layer(x, w)


@with_own_tangents.defjvp
def own_tangents(primals, tangents):
    y, dy = jax.jvp(layer, primals, tangents)
    return y, 3 * dy


def in_loops(x, w):
    x = lax.fori_loop(0, 2, lambda _, x: layer(x, w), x)
    x = lax.while_loop(lambda x: jnp.sum(x) > 1e9, lambda x: layer(x, w) * 0, x)
    return lax.cond(lax.axis_index("y") >= 0, layer, lambda x, w: x, x, w)


def inside_jit(x, w):
    return jax.jit(lambda x, w: sum(layer(x, w) for _ in range(4)))(x, w)


SPECS = (P("x"), P(None, "x"))


def small(body: Any) -> Any:
    return jax.shard_map(body, mesh=rp.simulated_mesh({"y": 1, "x": 4}), in_specs=SPECS, out_specs=P("x"))


def small_arguments() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(-1, 2, shape).astype(np.float32) for shape in ((8, 4), (4, 8))]


NESTED = {"loops": in_loops, "jit": inside_jit, "custom_vjp": with_own_rule, "custom_jvp": with_own_tangents}


def test_inside_control_flow_and_custom_rules() -> None:
    arguments = small_arguments()

    def everything(*arguments: Any) -> Any:
        made = []
        for transform in (lambda f: f, lambda f: overlapfx.overlap(f, RING)):
            results = {name: transform(small(body))(*arguments) for name, body in NESTED.items()}
            for name in ("jit", "custom_vjp", "custom_jvp"):
                results["gradient of " + name] = rp.outputs_and_gradients(transform(small(NESTED[name])), arguments)
            made.append(results)
        return made

    plain, rewritten = rp.run(everything, *arguments)
    jax.tree.map(np.testing.assert_array_equal, rewritten, plain)


@pytest.mark.parametrize("name", NESTED)
def test_structure_stays(name: str) -> None:
    plain, arguments = small(NESTED[name]), small_arguments()
    rewritten = overlapfx.overlap(plain, RING)
    assert structure(rewritten, *arguments) == structure(plain, *arguments)
    assert rp.counts(plain, *arguments)["blocking"] > 0
    assert rp.counts(rewritten, *arguments)["blocking"] == 0, str(rewritten.report(*arguments))


def test_gradient_rules_are_rewritten_too() -> None:
    gradient = jax.grad(lambda *a: jnp.sum(overlapfx.overlap(small(with_own_rule), RING)(*a)))
    assert rp.counts(gradient, *small_arguments())["blocking"] == 0


def test_inside_shard_map_and_again() -> None:
    # On a body, and on what is rewritten already.
    arguments = small_arguments()
    inside, outside = small(overlapfx.overlap(layer, RING)), overlapfx.overlap(small(layer), RING)
    assert rp.counts(inside, *arguments) == rp.counts(outside, *arguments) == {"sends": 6, "blocking": 0}
    again = overlapfx.overlap(outside)
    assert rp.counts(again, *arguments) == {"sends": 6, "blocking": 0}


def test_jit_compiles_once_across_calls() -> None:
    traces = []

    @jax.jit
    def jitted(x, w):
        traces.append(1)
        return small(layer)(x, w)

    rewritten, arguments = overlapfx.overlap(jitted, RING), small_arguments()
    first = rewritten._rewrite(arguments, {})[1].jaxpr.eqns[0].params["jaxpr"]
    second = rewritten._rewrite(arguments, {})[1].jaxpr.eqns[0].params["jaxpr"]
    assert first is second
    assert len(traces) == 1


def test_pytrees_and_static_arguments() -> None:
    def scaled(batch: dict[str, Any], w: Any, *, power: int, name: str = "") -> dict[str, Any]:
        assert name == "given"
        return {"y": small(layer)(batch["x"], w) ** power, "none": None}

    x, w = small_arguments()
    rewritten = overlapfx.overlap(scaled, RING)
    got = rewritten({"x": x}, w, power=2, name="given")
    jax.tree.map(np.testing.assert_array_equal, got, scaled({"x": x}, w, power=2, name="given"))
    assert len(rewritten.report({"x": x}, w, power=2, name="given").rewritten) == 2
