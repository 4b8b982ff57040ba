"""Every decomposition on random numbers, where the order of summation matters, within the table of tolerances."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_harness import (
    Case,
    Variants,
    expected,
    forward_program,
    make_values,
    normals,
    pair_up,
    place,
    run_case,
    some_options,
    unchecked_annotations,
)
from core_patterns import ONE_AXIS, TWO_AXES
from tolerances import TOLERANCES, assert_close, tolerance

from overlapfx.config import Overlap

pytestmark = pytest.mark.core


def check_close(case: Case, variants: Variants, dtype: str) -> None:
    """Operands and cotangents in `dtype`; the single-device einsum computes with the same rounded values in float32."""
    values = make_values(case, normals, dtype)
    want = expected(case, values)
    with unchecked_annotations():
        got = run_case(case, variants, values)
    for name, result in got.items():
        for what, actual, desired in pair_up(result, want):
            assert actual.dtype == jnp.dtype(dtype)
            assert_close(actual, desired, where=f"{case.name} {name}: {what}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pattern", ONE_AXIS)
def test_one_axis(pattern: str, dtype: str) -> None:
    check_close(ONE_AXIS[pattern](5, 3, 6), some_options(), dtype)


@pytest.mark.parametrize("pattern", TWO_AXES)
def test_two_axes(pattern: str) -> None:
    check_close(TWO_AXES[pattern](2, 2, 3, 5), some_options(), "bfloat16")


@pytest.mark.parametrize("method", ["blocking", "ring", "stripe", "exchange"])
def test_a_sum_on_a_bfloat16_wire_stays_within_the_table(method: str) -> None:
    """The accumulator is rounded on each of its hops, here seven."""
    overlap = Overlap(method=method, direction="one" if method == "ring" else "auto", accum_dtype="bfloat16")
    check_close(ONE_AXIS["scatter_lhs_free"](8, 2, 6), {"bfloat16": overlap}, "bfloat16")


@pytest.mark.parametrize("dtype", [np.int32, np.float16])
def test_other_types_keep_their_type(dtype: type) -> None:
    case = ONE_AXIS["scatter_rhs_free"](4, 2, 3)
    lhs, rhs, _, _ = place(case, make_values(case, dtype=dtype))
    (got,) = jax.jit(forward_program(case, Overlap(method="ring")))(lhs, rhs)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got[0], np.einsum(case.spec, lhs, rhs[0], dtype=np.int64, casting="unsafe"))


def test_the_table_refuses_what_it_should() -> None:
    values = np.linspace(1, 2, 5, dtype=np.float32)
    assert_close(values, values + np.float32(1e-6))
    for bad in (values + np.float32(1e-4), values[:4], np.where(values > 1.5, np.nan, values)):
        with pytest.raises(AssertionError):
            assert_close(values, bad)
        with pytest.raises(AssertionError):
            assert_close(bad, values)
    with pytest.raises(KeyError):
        tolerance(np.int32)
    assert list(TOLERANCES) == ["float64", "float32", "bfloat16", "float16"]
