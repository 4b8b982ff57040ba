"""The table of chips against figures written down by hand, with the measured peak of a CPU."""

from __future__ import annotations

import types

import jax
import pytest

from overlapfx import chips


def device(kind: str) -> jax.Device:
    """Something with the one attribute that detection looks at."""
    return types.SimpleNamespace(device_kind=kind)  # type: ignore[return-value]


# What JAX calls the device: peak bf16 TFLOP/s, HBM GB/s, HBM GiB, all of one device.
TPUS = {
    "TPU v4": (275, 1200, 32),
    "TPU v5 lite": (197, 819, 16),
    "TPU v5": (459, 2765, 95),
    "TPU v6 lite": (918, 1638, 32),
    # Two devices per chip of 2307 TFLOP/s, 7380 GB/s, 192 GiB.
    "TPU7x": (1153.5, 3690, 96),
}


@pytest.mark.parametrize("kind", TPUS)
def test_tpus(kind: str) -> None:
    chip = chips.detect(device(kind))
    assert chip is not None
    assert (chip.peak_bf16_flops / 1e12, chip.hbm_bytes_per_s / 1e9, chip.hbm_bytes / 2**30) == TPUS[kind]


@pytest.mark.parametrize(
    ("chip", "link_gbps", "torus_dims", "wrap", "clock_ghz"),
    [
        (chips.TPU_V4, 45, 3, 4, 1.05),
        (chips.TPU_V5E, 45, 2, 16, 1.5),
        (chips.TPU_V5P, 90, 3, 4, 1.75),
        (chips.TPU_V6E, 90, 2, 16, None),
        (chips.TPU_7X, 100, 3, 4, None),
        (chips.H200, 450, 0, None, None),
    ],
)
def test_links(chip: chips.Chip, link_gbps: float, torus_dims: int, wrap: int | None, clock_ghz: float | None) -> None:
    assert chip.link_bytes_per_s == link_gbps * 1e9
    assert (chip.torus_dims, chip.wrap_multiple) == (torus_dims, wrap)
    assert chip.clock_hz == (None if clock_ghz is None else clock_ghz * 1e9)


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
    ],
)
def test_gpus(kind: str, tflops: float) -> None:
    chip = chips.detect(device(kind))
    assert chip is not None
    assert chip.peak_bf16_flops == tflops * 1e12


@pytest.mark.parametrize("kind", ["cpu", "TPU v9", "NVIDIA A100", ""])
def test_an_unknown_chip_is_not_guessed(kind: str) -> None:
    assert chips.detect(device(kind)) is None


def test_the_devices_of_this_machine_are_not_in_the_table() -> None:
    assert chips.detect(jax.devices()[0]) is None


@pytest.mark.parametrize("chip", sorted(set(chips.BY_DEVICE_KIND.values()), key=lambda chip: chip.name))
def test_every_figure_has_a_source(chip: chips.Chip) -> None:
    assert chip.source
    # FLOP/s, bytes/s and bytes in their units: a chip below these is a slip by a factor of 1000.
    assert chip.peak_bf16_flops > 1e14
    assert chip.hbm_bytes_per_s is not None
    assert chip.hbm_bytes_per_s > 5e11
    assert chip.hbm_bytes is not None
    assert chip.hbm_bytes > 1e10
    # An assumption must say what it assumes.
    assert all(getattr(chip, name) is not None for name in chip.assumed)


def test_one_device_per_chip_is_the_chip() -> None:
    assert chips.TPU_V4.per_device() is chips.TPU_V4
    half = chips.TPU_7X.per_device()
    assert (half.name, half.devices_per_chip) == ("TPU7x (1 of 2 devices)", 1)
    assert half.per_device() is half


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_cpu_peak(dtype: str) -> None:
    chip = chips.measure_cpu_peak(dtype)
    assert chip.name == "CPU (measured)"
    assert dtype in chip.source
    # From a slow single core to a large server, over 8 simulated devices.
    assert 1e7 < chip.peak_bf16_flops < 1e14


def test_measured_peak_is_shared_by_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(float(n) for n in range(1000))
    monkeypatch.setattr(chips.time, "perf_counter", lambda: next(ticks))
    # One second for the largest product of 1024: 2 * 1024^3 FLOP, in 4 shares.
    assert chips.measure_cpu_peak("float32", num_devices=4).peak_bf16_flops == 536870912.0
