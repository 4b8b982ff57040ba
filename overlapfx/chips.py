"""What one chip can do: the figures that plans are priced with, the peak that utilization is measured against."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one chip, or of the part of it that JAX calls a device; None where nothing trustworthy is published.

    peak_bf16_flops: dense FLOP/s (a multiplication and an addition are two), without sparsity.
    clock_hz: turns the compiler's estimated cycles into seconds.
    link_bytes_per_s: one link, one way; for a switched GPU the whole way to the switch counts as one link.
    torus_dims: dimensions of the torus of chips, 0 behind a switch; a dimension wraps around if its size is a multiple
        of `wrap_multiple`.
    devices_per_chip: JAX devices into which one chip is divided.
    assumed: names of the figures above that are not published but assumed here.
    async_all_gather: whether the compiler runs an AllGather beside work: found by compiling.
    """

    name: str
    peak_bf16_flops: float
    hbm_bytes_per_s: float | None
    hbm_bytes: float | None
    clock_hz: float | None
    link_bytes_per_s: float | None
    torus_dims: int
    source: str
    wrap_multiple: int | None = None
    devices_per_chip: int = 1
    assumed: tuple[str, ...] = ()
    async_all_gather: bool = True

    def per_device(self) -> Chip:
        """The share of one JAX device; links are not divided, since one device may use all of its chip's."""
        parts = self.devices_per_chip
        if parts == 1:
            return self
        return dataclasses.replace(
            self,
            name=f"{self.name} (1 of {parts} devices)",
            peak_bf16_flops=self.peak_bf16_flops / parts,
            hbm_bytes_per_s=None if self.hbm_bytes_per_s is None else self.hbm_bytes_per_s / parts,
            hbm_bytes=None if self.hbm_bytes is None else self.hbm_bytes / parts,
            devices_per_chip=1,
        )


_TPU_SOURCE = "Google Cloud TPU documentation (peak, HBM); JAX scaling book (links, torus)"
_NVIDIA_SOURCE = (
    "NVIDIA data sheet (dense bf16 is half the figure printed with sparsity; NVLink one way is half the total)"
)

TPU_V4 = Chip(
    "TPU v4",
    275e12,
    1200e9,
    32 * GIB,
    1.05e9,
    45e9,
    3,
    f"{_TPU_SOURCE}; clock: TPU v4 paper, ISCA 2023",
    wrap_multiple=4,
)
TPU_V5E = Chip("TPU v5e", 197e12, 819e9, 16 * GIB, 1.5e9, 45e9, 2, _TPU_SOURCE, wrap_multiple=16)
TPU_V5P = Chip(
    "TPU v5p",
    459e12,
    2765e9,
    95 * GIB,
    1.75e9,
    90e9,
    3,
    _TPU_SOURCE,
    wrap_multiple=4,
    assumed=("clock_hz",),
    async_all_gather=False,
)
TPU_V6E = Chip(
    "TPU v6e", 918e12, 1638e9, 32 * GIB, None, 90e9, 2, _TPU_SOURCE, wrap_multiple=16, async_all_gather=False
)
TPU_7X = Chip(
    "TPU7x",
    2307e12,
    7380e9,
    192 * GIB,
    None,
    100e9,
    3,
    "Google Cloud TPU documentation (link: a sixth of the chip's one-way interconnect bandwidth; wrap as v5p)",
    wrap_multiple=4,
    devices_per_chip=2,
    assumed=("wrap_multiple",),
)
A100_40GB = Chip("A100 40GB", 312e12, 1555e9, 40e9, None, 300e9, 0, _NVIDIA_SOURCE)
A100_80GB = Chip("A100 80GB", 312e12, 2039e9, 80e9, None, 300e9, 0, _NVIDIA_SOURCE)
A100_80GB_PCIE = Chip("A100 80GB PCIe", 312e12, 1935e9, 80e9, None, None, 0, _NVIDIA_SOURCE)
H100 = Chip("H100 SXM", 989.4e12, 3350e9, 80e9, None, 450e9, 0, _NVIDIA_SOURCE)
H100_PCIE = Chip("H100 PCIe", 756e12, 2000e9, 80e9, None, None, 0, _NVIDIA_SOURCE)
H100_NVL = Chip("H100 NVL", 835e12, 3900e9, 94e9, None, None, 0, _NVIDIA_SOURCE)
H200 = Chip("H200 SXM", 989.4e12, 4800e9, 141e9, None, 450e9, 0, _NVIDIA_SOURCE)
H200_NVL = Chip("H200 NVL", 835e12, 4800e9, 141e9, None, None, 0, _NVIDIA_SOURCE)

# Keyed by what `jax.Device.device_kind` says.
BY_DEVICE_KIND = {
    "TPU v4": TPU_V4,
    "TPU v5 lite": TPU_V5E,
    "TPU v5e": TPU_V5E,
    "TPU v5": TPU_V5P,
    "TPU v5p": TPU_V5P,
    "TPU v6 lite": TPU_V6E,
    "TPU v6e": TPU_V6E,
    "TPU7x": TPU_7X,
    "NVIDIA A100-SXM4-40GB": A100_40GB,
    "NVIDIA A100-SXM4-80GB": A100_80GB,
    "NVIDIA A100-PCIE-40GB": dataclasses.replace(A100_40GB, name="A100 40GB PCIe", link_bytes_per_s=None),
    "NVIDIA A100 80GB PCIe": A100_80GB_PCIE,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA H100 PCIe": H100_PCIE,
    "NVIDIA H100 NVL": H100_NVL,
    "NVIDIA H200": H200,
    "NVIDIA H200 NVL": H200_NVL,
}


def detect(device: jax.Device) -> Chip | None:
    """The figures of one JAX device, or None if its kind is not in the table (a CPU is measured instead)."""
    chip = BY_DEVICE_KIND.get(device.device_kind)
    return None if chip is None else chip.per_device()


def measure_cpu_peak(compute_dtype: str = "float32", num_devices: int | None = None) -> Chip:
    """What the matrix product of this machine reaches, divided among `num_devices` simulated devices (default: all
    local).

    Runs square products of a few sizes on one device, which may use every core, and keeps the best of several repeats:
    the peak of a CPU is not published per core count and clock, while a measured one compares like with like. Takes
    about a second. `peak_bf16_flops` holds the rate in `compute_dtype` ("float32" or "bfloat16").
    """
    import jax
    import jax.numpy as jnp

    cpu = jax.local_devices(backend="cpu")
    product = jax.jit(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32))
    best = 0.0
    for size in (512, 1024):
        a = jax.device_put(jnp.full((size, size), 0.5, compute_dtype), cpu[0])
        product(a, a).block_until_ready()
        for _ in range(8):
            start = time.perf_counter()
            product(a, a).block_until_ready()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    shares = num_devices or len(cpu)
    return Chip(
        "CPU (measured)", best / shares, None, None, None, None, 0, f"{compute_dtype} matrix product measured at start"
    )
