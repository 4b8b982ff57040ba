"""Every difference between the JAX and Flax versions that we support."""

from __future__ import annotations

import jax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which `x` may differ between devices, as shard_map's check_vma tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x` typed as varying over `axes` too; its transpose sums the cotangent over the axes that were added."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x
