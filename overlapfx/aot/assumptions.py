"""Every figure that a time line assumes, with where it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from overlapfx.chips import TPU_7X, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, Chip

# FLOP per clock cycle of the matrix units of one device: four units of 256 x 256 multiply-adds.
_MATRIX_FLOP_PER_CYCLE = 4 * 256 * 256 * 2
_DCN_GBIT_PER_CHIP = {TPU_V4.name: 25, TPU_V5E.name: 25, TPU_V5P.name: 50, TPU_V6E.name: 100, TPU_7X.name: 100}
_UNITS = {
    "clock_hz": "Hz",
    "peak_flops": "FLOP/s",
    "hbm_bytes_per_s": "B/s",
    "link_bytes_per_s": "B/s",
    "hop_latency_s": "s",
    "dcn_bytes_per_s": "B/s",
    "dcn_latency_s": "s",
    "host_bytes_per_s": "B/s",
}


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Figures of one device, in SI units; `sources` says for each where it comes from.

    `clock_hz` turns estimated cycles into seconds. `link_bytes_per_s` is one link, one way; `hop_latency_s` is paid per
    link of the longest route. `hbm_bytes_per_s` prices copies and instructions without an estimate, `peak_flops`
    custom kernels. `dcn_bytes_per_s` is a device's share of the network between slices, one way.
    """

    clock_hz: float
    peak_flops: float
    hbm_bytes_per_s: float
    link_bytes_per_s: float
    hop_latency_s: float
    dcn_bytes_per_s: float
    dcn_latency_s: float
    host_bytes_per_s: float
    sources: Mapping[str, str]

    @classmethod
    def for_chip(cls, chip: Chip, **overrides: float) -> Assumptions:
        """Published figures of `chip`, with `overrides` by field name.

        Raises ValueError for a chip that is no TPU, an unknown name, a figure that is not positive.
        """
        device = chip.per_device()
        if device.link_bytes_per_s is None or device.hbm_bytes_per_s is None or chip.name not in _DCN_GBIT_PER_CHIP:
            known = ", ".join(_DCN_GBIT_PER_CHIP)
            raise ValueError(f"no figures to model {chip.name} with; use one of {known}.")
        assumed = dict.fromkeys(chip.assumed, f"assumed; {chip.source}")
        clock, clock_source = device.clock_hz, assumed.get("clock_hz", chip.source)
        if clock is None:
            clock = device.peak_bf16_flops / _MATRIX_FLOP_PER_CYCLE
            clock_source = "assumed: peak FLOP/s over the FLOP per cycle of four 256 x 256 matrix units"
        dcn_gbit = _DCN_GBIT_PER_CHIP[chip.name]
        base = cls(
            clock_hz=clock,
            peak_flops=device.peak_bf16_flops,
            hbm_bytes_per_s=device.hbm_bytes_per_s,
            link_bytes_per_s=device.link_bytes_per_s,
            hop_latency_s=1e-6,
            dcn_bytes_per_s=dcn_gbit * 1e9 / 8 / chip.devices_per_chip,
            dcn_latency_s=10e-6,
            host_bytes_per_s=16e9 / chip.devices_per_chip,
            sources={
                "clock_hz": clock_source,
                "peak_flops": chip.source,
                "hbm_bytes_per_s": chip.source,
                "link_bytes_per_s": chip.source,
                "hop_latency_s": "JAX scaling book: about 1 us per hop",
                "dcn_bytes_per_s": f"Cloud TPU documentation: {dcn_gbit} Gbit/s per chip",
                "dcn_latency_s": "assumed: a few switches and two hosts",
                "host_bytes_per_s": "JAX scaling book: PCIe, about 16 GB/s per chip",
            },
        )
        return base.replace(**overrides)

    def replace(self, **overrides: float) -> Assumptions:
        """The same with some figures given by the user. Raises ValueError as `for_chip` does."""
        for name, value in overrides.items():
            if name not in _UNITS:
                raise ValueError(f"no assumption is called {name!r}; use one of {', '.join(_UNITS)}.")
            if not value > 0:
                raise ValueError(f"assumption {name}={value} must be positive; give it in {_UNITS[name]}.")
        given = dict.fromkeys(overrides, "given by the user")
        return dataclasses.replace(self, **overrides, sources={**self.sources, **given})

    def with_link_factor(self, factor: float) -> Assumptions:
        """The same with links `factor` times as fast, for a sensitivity row."""
        scaled = {"link_bytes_per_s": f"{factor:g} x {self.sources['link_bytes_per_s']}"}
        return dataclasses.replace(
            self, link_bytes_per_s=self.link_bytes_per_s * factor, sources={**self.sources, **scaled}
        )

    def rows(self) -> list[tuple[str, float, str, str]]:
        """(name, value, unit, source) of every figure."""
        return [(name, getattr(self, name), unit, self.sources[name]) for name, unit in _UNITS.items()]
