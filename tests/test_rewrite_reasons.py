"""What is not rewritten is left alone, and the report says why, for each reason there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rewrite_programs as rp
from jax import lax
from jax.sharding import PartitionSpec as P
from rewrite_programs import COLUMNS, RING, ROWS, W, X, gather, scatter

import overlapfx
from overlapfx.config import Overlap

pytestmark = pytest.mark.core


@dataclasses.dataclass(frozen=True)
class Left:
    """A body that stays as it is but for `calls` collective einsums; why, once for each collective that stays."""

    body: Callable[..., Any]
    reasons: tuple[str, ...]
    shapes: Any = (X, W)
    specs: Any = (ROWS, P(None, "x"))
    out: Any = COLUMNS
    calls: int = 0
    config: Overlap = RING


def groups(x, w):
    return lax.all_gather(x, "x", axis=1, tiled=True, axis_index_groups=[[0, 1], [2, 3]]) @ w


def used_elsewhere(x, w):
    whole = gather(x, 1)
    return (whole @ w) * jnp.sum(whole, axis=2, keepdims=True)


def leaves(x, w):
    whole = gather(x, 1)
    return whole @ w, whole


def no_product(x, w):
    return jnp.sort(gather(x, 1) + w[0, 0], axis=1)


def not_a_product(x, w):
    return scatter(x + w[0, 0], 1)


def product_used_elsewhere(x, w):
    y = x @ w
    return scatter(y, 1) + y[:, :2]


def with_another_term(x, w):
    return scatter(x @ w + 1, 1)


def precise(x, w):
    return jnp.matmul(gather(x, 1), w, precision=lax.Precision.HIGHEST)


def integers(x, w):
    return gather(x.astype(jnp.int32), 1) @ w.astype(jnp.int32)


def narrow(x, w):
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jnp.matmul(gather(x, 1), w, preferred_element_type=jnp.float16)


def all_reduced(x, w):
    return lax.psum(x @ w, "x")


def cut_apart(x, w):
    # Tokens of all devices, interleaved: the second half is not a shard.
    whole = gather(x, 1)
    return whole.reshape(whole.shape[0], 2, 4, -1)[:, 1] @ w


def shuffled(x, w):
    return gather(x, 1)[:, ::-1] @ w


def minor(x, w):
    y = (x @ w).reshape(*x.shape[:2], 2, -1)
    return scatter(y.reshape(*x.shape[:2], -1), 2)


def already(x, w):
    blocking = Overlap(mode="off")
    return overlapfx.collective_einsum("btd,df->btf", x, w, lhs_gather={"t": "x"}, overlap=blocking)


PARTIAL = {"specs": (COLUMNS, P("x")), "out": ROWS}
COLUMNAR = {"specs": (COLUMNS, P("x")), "out": COLUMNS}
LEFT = {
    "groups": Left(groups, ("axis_index_groups",)),
    "used elsewhere": Left(used_elsewhere, ("its result is used by reduce_sum, test_rewrite_reasons.py:",)),
    "a result": Left(leaves, ("its result leaves the function it is in",), out=(COLUMNS, P("y", None, "x"))),
    "no product": Left(no_product, ("its result feeds no product",), out=P("y", None, "x")),
    "not a product": Left(not_a_product, ("what it sums comes from add, test_rewrite_reasons.py:",), **PARTIAL),
    "product used": Left(product_used_elsewhere, ("is also used elsewhere",), **PARTIAL),
    "another term": Left(with_another_term, ("what it sums comes from add",), **PARTIAL),
    "precision": Left(precise, ("a product that it feeds",)),
    "integers": Left(integers, ("the product is of int32",)),
    "narrow result": Left(narrow, ("is wanted as float16",)),
    "AllReduce": Left(all_reduced, ("AllGather are no cheaper",), specs=PARTIAL["specs"], out=P("y")),
    "slice": Left(cut_apart, ("its result is used by",)),
    "reversed": Left(shuffled, ("its result is used by rev",)),
    "minor part": Left(minor, ("the major part of the scattered dimension has size 2, over 4 devices",), **COLUMNAR),
    "gate off": Left(rp.rows, ("the gate leaves it blocking (",), config=Overlap(mode="off")),
    "already": Left(already, ("it is part of a collective einsum already",)),
}


@pytest.mark.parametrize("name", LEFT)
def test_reasons(name: str) -> None:
    left = LEFT[name]
    mesh = rp.simulated_mesh(rp.AXES)
    plain = jax.shard_map(left.body, mesh=mesh, in_specs=left.specs, out_specs=left.out)
    arguments = [jax.ShapeDtypeStruct(shape, np.float32) for shape in left.shapes]
    rewritten = overlapfx.overlap(plain, left.config)
    report = rewritten.report(*arguments)
    assert len(report.rewritten) == left.calls, str(report)
    assert len(report.left) == len(left.reasons), str(report)
    for found, reason in zip(report.left, left.reasons, strict=True):
        assert reason in found.reason, str(report)
        assert ("overlapfx/ops/ring.py:" if name == "already" else "rewrite") in found.source, found.source
    assert str(report).startswith("nothing was rewritten")
    before, after = (str(jax.make_jaxpr(f)(*arguments)) for f in (plain, rewritten))
    assert before == after


def test_axis_of_one_device() -> None:
    mesh = rp.simulated_mesh({"x": 1})
    plain = jax.shard_map(rp.rows, mesh=mesh, in_specs=(P(None, "x"), P()), out_specs=P(None, "x"))
    report = overlapfx.overlap(plain).report(np.ones(X, np.float32), np.ones(W, np.float32))
    assert [item.reason for item in report.left] == ["the axis has size 1: there is nothing to communicate"]


def test_known_to_be_the_same_everywhere() -> None:
    # check_vma knows that every device along x has the whole result; pieces would lose that.
    def invariant(x: Any, w: Any) -> Any:
        return lax.all_gather(x, "x", axis=1, tiled=True, to="invarying") @ w

    mesh = rp.simulated_mesh(rp.AXES)
    plain = jax.shard_map(invariant, mesh=mesh, in_specs=(ROWS, P()), out_specs=P("y"))
    report = overlapfx.overlap(plain, RING).report(np.ones(X, np.float32), np.ones(W, np.float32))
    assert "its result is known to be the same along x" in report.left[0].reason


def test_no_collectives_at_all() -> None:
    doubled = overlapfx.overlap(lambda x: {"twice": x * 2})
    assert doubled(3.0) == {"twice": 6.0}
    assert str(doubled.report(jnp.ones(2))).splitlines() == [str(doubled.report(jnp.ones(2)))]


def test_report_reads_well() -> None:
    program = rp.PROGRAMS["query_key_value"]
    report = overlapfx.overlap(program.mapped(), RING).report(*program.arguments())
    (line,) = str(report).splitlines()
    assert line.startswith("rewritten: AllGather over x of float32[2, 2, 12] with 3 products, rewrite_programs.py:")
    # Python 3.12 and later have no frame of its own for a comprehension.
    assert report.rewritten[0].site.name.split(":")[0] in ("rewrite_programs", "query_key_value")
    assert "-> ring, gather b, one, unroll 1" in line


def test_settings_of_one_site() -> None:
    program = rp.PROGRAMS["rows"]
    (found,) = overlapfx.overlap(program.mapped(), RING).report(*program.arguments()).rewritten
    off = dataclasses.replace(RING, sites={found.site.name: {"mode": "off"}})
    report = overlapfx.overlap(program.mapped(), off).report(*program.arguments())
    assert ["the gate leaves it blocking (" in item.reason for item in report.left] == [True]
