"""The environment variables that must be set before JAX is imported."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Mapping

from launch import flags

DEVICE_COUNT = "--xla_force_host_platform_device_count"
# By default XLA's CPU scheduler makes as much as possible ready at once, and its runtime tells permutes of one program
# apart by a number that they all share: two at the same time abort the process ("Id can't be larger than ...").
ONE_BY_ONE = "--xla_cpu_enable_concurrency_optimized_scheduler"


def simulated(devices: int, flags: str = "") -> str:
    """XLA_FLAGS with which a process simulates CPU devices: `flags`, and what they lack."""
    one_by_one = "" if ONE_BY_ONE in flags else f" {ONE_BY_ONE}=false"
    return f"{flags} {DEVICE_COUNT}={devices}{one_by_one}".strip()


# Device files of TPUs, NVIDIA GPUs, AMD GPUs.
ACCELERATOR_FILES = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*", "/dev/kfd")


def has_accelerator() -> bool:
    """Whether this machine shows the device file of an accelerator."""
    return any(glob.glob(pattern) for pattern in ACCELERATOR_FILES)


def device_environment(
    num_mesh_devices: int, devices: int | None, environ: Mapping[str, str], accelerator: bool
) -> dict[str, str]:
    """Variables to add so that JAX finds the devices of a mesh.

    devices: how many CPU devices to simulate, as asked on the command line; None leaves it to the mesh. Without an
    accelerator, as many are simulated as the mesh has. What the user has set stays, and a contradiction is a
    ValueError.
    """
    if devices is not None and devices < 1:
        raise ValueError(f"--devices is {devices}; it must be at least 1.")
    platforms = environ.get("JAX_PLATFORMS", "")
    if devices is not None and platforms not in ("", "cpu"):
        raise ValueError(
            f"--devices={devices} simulates CPU devices but JAX_PLATFORMS is {platforms!r}; leave one of them out."
        )
    added: dict[str, str] = {}
    if not platforms and (devices is not None or not accelerator):
        added["JAX_PLATFORMS"] = "cpu"  # also keeps JAX from looking for a TPU wherever libtpu is installed
    flags = environ.get("XLA_FLAGS", "")
    already = re.search(rf"{DEVICE_COUNT}=(\S*)", flags)
    if already and devices is not None and already[1] != str(devices):
        raise ValueError(f"--devices={devices} contradicts {already[0]} in XLA_FLAGS; leave one of them out.")
    on_cpu = platforms == "cpu" or "JAX_PLATFORMS" in added
    if on_cpu and not already:
        added["XLA_FLAGS"] = simulated(devices or num_mesh_devices, flags)
    return added


def prepare(num_mesh_devices: int, devices: int | None = None) -> dict[str, str]:
    """Sets the variables of `device_environment` for this process; returns those that it added.

    Raises ValueError for what `device_environment` and `flags.check` refuse.
    """
    # Too late after the import: JAX_PLATFORMS has been read by then, and a flag that does nothing must not pass
    # unnoticed.
    assert "jax" not in sys.modules, "launch.environment.prepare must run before jax is imported"
    flags.check(os.environ)
    added = device_environment(num_mesh_devices, devices, os.environ, has_accelerator())
    os.environ.update(added)
    return added
