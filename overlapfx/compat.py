"""Every difference between the JAX and Flax versions that we support."""

from __future__ import annotations

import jax


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which `x` may differ between devices, as shard_map's check_vma tracks them."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """`x` typed as varying over `axes` too; its transpose sums the cotangent over the axes that were added.

    Axes that shard_map has not bound (of a vmap, which stands for a whole mesh in automatic partitioning) have no type.
    """
    bound = frozenset(jax.sharding.get_abstract_mesh().manual_axes)
    missing = tuple(sorted((axes & bound) - varying_axes(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def target_platform() -> str:
    """Platform of the devices that the code being traced will run on, "cpu" or "tpu"; not always this process's own."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
