"""Every difference between the JAX and Flax versions that we support."""

from __future__ import annotations

import contextlib
import importlib.util
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.xla_metadata import set_xla_metadata


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
    """Platform of the devices that the code being traced is for: "cpu", "gpu" or "tpu"; maybe not this process's."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def cuda_capability() -> tuple[int, ...] | None:
    """The compute capability of this process's first device, such as (9, 0); None unless that is an NVIDIA GPU."""
    version = getattr(jax.local_devices()[0], "compute_capability", "")
    # AMD GPUs have the attribute too, with a name like gfx90a in it.
    return tuple(map(int, version.split("."))) if version.replace(".", "").isdigit() else None


def bind_params(eqn: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the primitive of a traced equation is bound with besides its operands: functions first, then parameters."""
    found = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(found, tuple):  # before 0.12
        functions, params = found
        return list(functions), dict(params)
    return [], dict(found)


def can_start_transfers() -> bool:
    """Whether a transfer can be started and awaited apart in programs for the devices that are traced for.

    Before 0.12 JAX writes this in a form that TPU compilers refuse; other compilers than theirs and the CPU's are
    untried.
    """
    if target_platform() == "cpu":
        return True
    return target_platform() == "tpu" and importlib.util.find_spec("jax.experimental.overlap") is not None


def scheduling_group(number: int) -> contextlib.AbstractContextManager[Any]:
    """Operations traced inside belong to this scheduling group of the compiled program.

    jax.experimental.scheduling_groups writes an attribute that no TPU compiler reads; this is the one that they do.
    """
    manager: contextlib.AbstractContextManager[Any] = set_xla_metadata(_scheduling_group_id=str(number))
    return manager


def heeds_groups(transfer: str) -> bool:
    """Whether the compiler for the devices that are traced for runs this transfer beside the products of its group.

    Of a blocking ppermute TPU compilers drop the group before they make it asynchronous; other compilers are untried.
    """
    return target_platform() == "tpu" and transfer == "all_gather"


def lay_out(x: jax.Array, major_to_minor: tuple[int, ...]) -> jax.Array:
    """`x` with its dimensions in this order in memory."""
    return with_layout_constraint(x, Layout(major_to_minor=major_to_minor))
