"""What the arguments of a collective einsum promise: what is saved, what travels, what is applied where."""

from __future__ import annotations

import dataclasses
from typing import Any

import core_jaxpr
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_harness import (
    Case,
    check_exact,
    forward_program,
    make_values,
    place,
    sharded_program,
    some_options,
    unchecked_annotations,
)
from core_patterns import ONE_AXIS, mlp_down, mlp_up, query_key_value

from overlapfx.config import Overlap

pytestmark = pytest.mark.core

SOME = some_options()
ONE_WAY = Overlap(method="ring", direction="one", unroll=1)
COLLECTIVES = ("ppermute", "all_gather", "reduce_scatter", "psum_scatter", "all_to_all")


def gradient_jaxpr(case: Case, overlap: Overlap, dtype: Any = np.float32, **options: Any) -> Any:
    """Forward and backward of one case."""
    arrays = place(case, make_values(case, dtype=dtype))
    return jax.make_jaxpr(sharded_program(case, {"site": overlap}, **options))(*arrays).jaxpr


def forward_jaxpr(case: Case, overlap: Overlap, dtype: Any = np.float32, **options: Any) -> Any:
    lhs, rhs, _, _ = place(case, make_values(case, dtype=dtype))
    return jax.make_jaxpr(forward_program(case, overlap, **options))(lhs, rhs).jaxpr


def sent_dtypes(jaxpr: Any) -> set[str]:
    """Names of the dtypes that travel."""
    sends = [eqn for eqn in core_jaxpr.equations(jaxpr) if eqn.primitive.name in COLLECTIVES]
    return {str(eqn.invars[0].aval.dtype) for eqn in sends}


@pytest.mark.parametrize("method", ["blocking", "ring", "stripe", "prefetch"])
@pytest.mark.parametrize("pattern", [p for p in ONE_AXIS if p.startswith("gather")])
def test_save_gathered_spares_the_second_gather(pattern: str, method: str) -> None:
    case = ONE_AXIS[pattern](3, 2, 4)
    again = Overlap(method=method, direction="one", unroll=1)
    saved = dataclasses.replace(again, save_gathered=True)
    check_exact(case, {"again": again, "saved": saved})
    spared = core_jaxpr.count(gradient_jaxpr(case, again), *COLLECTIVES)
    spared -= core_jaxpr.count(gradient_jaxpr(case, saved), *COLLECTIVES)
    # A ring of three has two sends. Stripes are four, except that a contracting label becomes a free one of the
    # partner's gradient, which leaves no label to cut: a ring again.
    by_method = {"blocking": 1, "ring": 2, "prefetch": 2, "stripe": 2 if "contracting" in pattern else 4}
    assert spared == by_method[method]


@pytest.mark.parametrize("make", [mlp_up, mlp_down, query_key_value])
def test_save_gathered_on_two_axes(make: Any) -> None:
    saving = {name: dataclasses.replace(overlap, save_gathered=True) for name, overlap in SOME.items()}
    with unchecked_annotations():
        check_exact(make(2, 2, 2, 3), saving)


def with_bias(pattern: str, bias_labels: str) -> Case:
    return dataclasses.replace(ONE_AXIS[pattern](4, 3, 4), bias_labels=bias_labels)


@pytest.mark.parametrize(
    ("pattern", "bias_labels"),
    [
        ("gather_lhs_free", "c"),
        ("gather_lhs_free", "a"),  # has the communicated label, so every piece has a part of its own
        ("gather_lhs_free", "ct"),  # in another order than in the result
        ("gather_lhs_contracting", "tc"),
        ("gather_lhs_batch", "g"),
        ("gather_rhs_free", "cd"),
        ("gather_rhs_contracting", "d"),
        ("scatter_lhs_free", "a"),
        ("scatter_rhs_free", "cd"),
        ("scatter_batch", "gc"),
    ],
)
def test_bias_and_activation_with_their_gradients(pattern: str, bias_labels: str) -> None:
    with unchecked_annotations():
        check_exact(with_bias(pattern, bias_labels), SOME, activation=jax.nn.relu)


def test_biases_of_several_weights_without_activation() -> None:
    case = dataclasses.replace(query_key_value(2, 2, 2, 3), bias_labels="nh")
    check_exact(case, {"ring": Overlap(method="ring"), "stripe": Overlap(method="stripe")})


def test_bias_labels_default_to_the_last_ones() -> None:
    check_exact(with_bias("gather_rhs_free", "cd"), {"ring": Overlap(method="ring")}, bias_labels="")


@pytest.mark.parametrize(
    ("pattern", "overlap", "pieces"),
    [
        ("gather_lhs_free", ONE_WAY, 4),  # every shard that arrives makes final rows
        ("gather_lhs_batch", dataclasses.replace(ONE_WAY, direction="two"), 8),
        ("gather_lhs_contracting", ONE_WAY, 1),  # a sum that is complete at the end only
        ("gather_lhs_contracting", Overlap(method="stripe"), 4),
        ("scatter_lhs_free", Overlap(method="stripe"), 4),
        ("scatter_lhs_free", ONE_WAY, 1),
        ("gather_lhs_free", Overlap(method="prefetch"), 1),
        ("gather_lhs_free", Overlap(method="blocking"), 1),
    ],
)
def test_the_activation_is_applied_per_piece_where_that_is_exact(pattern: str, overlap: Overlap, pieces: int) -> None:
    jaxpr = forward_jaxpr(ONE_AXIS[pattern](4, 2, 4), overlap, activation=jax.lax.tanh)
    assert core_jaxpr.count(jaxpr, "tanh") == pieces


@pytest.mark.parametrize("pattern", ["gather_rhs_free", "gather_rhs_contracting", "scatter_lhs_free"])
def test_float32_weights_travel_as_bfloat16_and_have_float32_gradients(pattern: str) -> None:
    case = ONE_AXIS[pattern](4, 2, 4)
    for overlap in (ONE_WAY, Overlap(method="stripe"), Overlap(method="blocking")):
        # Integers up to 9 are exact in bfloat16; results and gradients are larger and arrive unrounded.
        check_exact(case, {"site": overlap}, compute_dtype=jnp.bfloat16, out_dtype=jnp.float32)
        forward = forward_jaxpr(case, overlap, compute_dtype=jnp.bfloat16, out_dtype=jnp.float32)
        assert sent_dtypes(forward) == {"float32" if pattern.startswith("scatter") else "bfloat16"}


@pytest.mark.parametrize("accum_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", ["blocking", "ring", "stripe", "exchange"])
def test_the_dtype_of_travelling_sums_is_an_option(method: str, accum_dtype: str) -> None:
    overlap = Overlap(method=method, accum_dtype=accum_dtype)
    for dtype in (np.float32, jnp.bfloat16):
        jaxpr = forward_jaxpr(ONE_AXIS["scatter_rhs_free"](4, 2, 4), overlap, dtype)
        assert sent_dtypes(jaxpr) == {accum_dtype}


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dtypes_of_results_and_gradients(dtype: Any, out_dtype: Any) -> None:
    jaxpr = gradient_jaxpr(ONE_AXIS["gather_lhs_free"](2, 2, 2), ONE_WAY, dtype, out_dtype=out_dtype)
    assert [v.aval.dtype for v in jaxpr.outvars] == [dtype, dtype, out_dtype]
