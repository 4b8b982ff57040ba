"""Rewritten programs give the numbers of the plain ones bit for bit, with as many sends as the derivation says."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_programs as rp
from core_jaxpr import equations
from jax.sharding import PartitionSpec as P
from rewrite_programs import PROGRAMS, RING

import overlapfx
from overlapfx.ops import rewrite_calls, rewrite_dims, rewrite_forms

pytestmark = pytest.mark.core


@functools.cache
def results() -> Any:
    """Of all programs in one compilation: plain, rewritten, differentiated then rewritten; gathers and scatters."""
    arguments = {name: program.arguments() for name, program in PROGRAMS.items()}

    def everything(arguments: Any) -> Any:
        return {name: rp.every_way(program.mapped(), arguments[name], RING) for name, program in PROGRAMS.items()}

    return rp.run(everything, arguments)


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_numbers(name: str) -> None:
    plain, rewritten, rewritten_gradient = results()[name]
    assert any(np.any(leaf) for leaf in jax.tree.leaves(plain))
    jax.tree.map(np.testing.assert_array_equal, rewritten, plain)
    jax.tree.map(np.testing.assert_array_equal, rewritten_gradient, plain)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_expected_sends(name: str, check_vma: bool) -> None:
    program = PROGRAMS[name]
    plain, arguments = program.mapped(check_vma), program.arguments()
    rewritten = overlapfx.overlap(plain, RING)
    report = rewritten.report(*arguments)
    assert len(report.rewritten) == program.calls, str(report)
    assert not report.left, str(report)
    # Of two collectives the gate chooses one; the other stays blocking.
    chosen = [found.site.plan.slot.num_shards - 1 for found in report.rewritten if found.site.plan.slot]
    sends = sum(chosen) if program.blocking else program.sends
    assert rp.counts(rewritten, *arguments) == {"sends": sends, "blocking": program.blocking}, str(report)
    assert rp.counts(plain, *arguments)["sends"] == 0


def test_conversions_move_before_the_gather() -> None:
    def converted(x: Any, w: Any) -> Any:
        whole = rp.gather(x, 1).astype(jnp.bfloat16)
        return jnp.matmul(whole, w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)

    program = dataclasses.replace(PROGRAMS["rows"], body=converted)
    plain, arguments = program.mapped(), program.arguments()
    rewritten = overlapfx.overlap(plain, RING)
    sends = [e for e in equations(jax.make_jaxpr(rewritten)(*arguments).jaxpr) if e.primitive.name == "ppermute"]
    assert [eqn.outvars[0].aval.dtype for eqn in sends] == [jnp.bfloat16] * 3
    got, want = rp.run(lambda *a: (rewritten(*a), plain(*a)), *arguments)
    np.testing.assert_array_equal(got, want)


def wrong_axis(gather: Any) -> Any:
    def moved(op: Any, form: Any) -> Any:
        made = gather(op, form)
        return dataclasses.replace(made, dims=(made.dims[1], made.dims[0], *made.dims[2:]))

    return moved


def other_shard(unify: Any) -> Any:
    return lambda ours, theirs: unify(ours[::-1], theirs[::-1])


def swapped(several: Any) -> Any:
    def reordered(sites: Any) -> Any:
        def turn(shard: Any) -> Any:
            return dataclasses.replace(
                shard, build=lambda get: jnp.swapaxes(shard.build(get), -1, -2).reshape(shard.shape)
            )

        def turned(site: Any) -> Any:
            return dataclasses.replace(site, shards=(turn(site.shards[0]), site.shards[1]))

        return several(tuple(map(turned, sites)))

    return reordered


def minor_scatter(scatter: Any) -> Any:
    return lambda group, axes, parts: scatter(group[::-1], axes, parts)


def first_rows(value: Any, dims: Any) -> Any:
    """What every device would use if it did not matter where its shard lies."""
    shape = rewrite_dims.local_shape(dims)
    cut = tuple(slice(0, size) for size in shape)
    return rewrite_forms.Shard(shape, frozenset({value}), lambda get: get(value)[cut] if value.shape else get(value))


def square(x: Any, w: Any, scale: Any) -> Any:
    y = (rp.gather(x, 0) * scale) @ w
    mixed = y.reshape(4, 4, -1).transpose(1, 0, 2).reshape(y.shape)
    return rp.scatter(mixed, 0, "y")


def by_row(x: Any, w: Any, scale: Any) -> Any:
    return rp.scatter((rp.gather(x, 0) * scale[:, None]) @ w, 0, "y")


def unscaled(x: Any, w: Any, scale: Any) -> Any:
    return rp.scatter(rp.gather(x, 0) @ w, 0, "y") * scale[0]


FAULTS = {
    "none": (square, None, "", None),
    "a gather along another dimension": (unscaled, rewrite_forms, "_gather", wrong_axis),
    "an operand turned round": (square, rewrite_calls, "several", swapped),
    "the minor part scattered": (square, rewrite_dims, "scatter", minor_scatter),
    "a side operand that is not cut": (by_row, rewrite_forms, "_along", lambda _: first_rows),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, module, name, wrong = FAULTS[fault]
    shapes = ((16, 32), (32, 8), (16,) if body is by_row else (32,))
    specs = (P("x", "y"), P("y"), P() if body is by_row else P("y"))
    program = rp.Program(body, shapes, specs, P(("x", "y")), calls=1, sends=3)
    if module is not None:
        monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    plain, arguments = program.mapped(check_vma=False), program.arguments()
    rewritten = overlapfx.overlap(plain, RING)
    (found,) = rewritten.report(*arguments).rewritten
    assert len(found.replaced) == 2  # or the fault would not show
    got, want = rp.run(lambda *a: (rewritten(*a), plain(*a)), *arguments)
    assert np.array_equal(got, want) == (fault == "none")
