"""The device mesh of a run, made from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from overlapfx.config import MeshConfig


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None, *, arrange: bool = True) -> Mesh:
    """A mesh over all of `devices` (default: every device of the run) with axes ["replica",] "y", "x", outermost first.

    The replica axis exists only where there is more than one replica. On a TPU neighbours along an axis are neighbours
    on the physical torus as far as JAX's assignment can arrange it; replicas are laid over slices. With arrange=False
    the devices stay in the order given, x fastest.
    Raises ValueError if the number of devices is not the number that the mesh has.
    """
    devices = jax.devices() if devices is None else list(devices)
    if len(devices) != config.num_devices:
        raise ValueError(_wrong_number(config, devices))
    names = ("y", "x") if config.replica == 1 else ("replica", "y", "x")
    shape = (config.replica, config.y, config.x)
    arranged = _arrange(shape, devices) if arrange else np.array(devices, dtype=object).reshape(shape)
    return Mesh(arranged.reshape(arranged.shape[-len(names) :]), names, axis_types=(AxisType.Auto,) * len(names))


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes, in mesh order, over which a batch is sharded: all but the model axis."""
    return tuple(name for name in mesh.axis_names if name != "x")


def _arrange(shape: tuple[int, int, int], devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array of `shape` (replica, y, x), every slice holding whole replicas."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if shape[0] % len(slices):
        raise ValueError(
            f"The devices form {len(slices)} slices but mesh.replica is {shape[0]}; set mesh.replica to a multiple of "
            f"{len(slices)}, since only replicas may cross slices."
        )
    inner = (shape[0] // len(slices), *shape[1:])
    arranged = [
        # Splitting a torus dimension between axes is allowed: it is better than no mesh of this shape at all.
        mesh_utils.create_device_mesh(inner, slices[index], allow_split_physical_axes=True)
        for index in sorted(slices)
    ]
    return np.concatenate(arranged, axis=0)


def _wrong_number(config: MeshConfig, devices: Sequence[jax.Device]) -> str:
    """The one sentence that says how many devices are missing or left over, with the remedy."""
    product = f"mesh.y * mesh.x = {config.y} * {config.x}"
    if config.replica > 1:
        product = f"mesh.replica * mesh.y * mesh.x = {config.replica} * {config.y} * {config.x}"
    kind = devices[0].device_kind if devices else "no"
    remedy = (
        f"change the mesh, or simulate {config.num_devices} CPU devices: pass --devices={config.num_devices}, or set "
        f"JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count={config.num_devices} before JAX starts"
    )
    return f"{product} needs {config.num_devices} devices, but {len(devices)} ({kind}) are present; {remedy}."
