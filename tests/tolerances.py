"""The one table of numerical tolerances, keyed by dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

# Largest error allowed, as a share of the largest magnitude in the expected array: sums cancel, so an error relative to
# each element would say nothing. Each entry is the dtype's unit roundoff times the roundings that a test may stack.
TOLERANCES: dict[str, float] = {
    "float64": 1e-13,
    "float32": 4e-6,
    "bfloat16": 1.6e-2,
    "float16": 2e-3,
}


def tolerance(dtype: Any) -> float:
    """The tolerance of results that were rounded to `dtype`; KeyError for integers, which are compared exactly."""
    return TOLERANCES[jnp.dtype(dtype).name]


def assert_close(actual: Any, expected: Any, dtype: Any = None, where: str = "") -> None:
    """Asserts equal shapes and an error within the table; dtype: what rounding to expect, default that of `actual`."""
    limit = tolerance(dtype or actual.dtype)
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"{where}: shape {got.shape} instead of {want.shape}"
    if not want.size:
        return
    scale = float(np.max(np.abs(want)))
    error = float(np.max(np.abs(got - want)))
    assert np.all(np.isfinite(got)), f"{where}: not all values are finite"
    assert error <= limit * scale, f"{where}: error {error:.3g}, allowed {limit:.3g} of the largest value {scale:.3g}"
