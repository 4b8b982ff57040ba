"""Every figure that a time line assumes, with where it comes from."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from overlapfx.aot.slices import Slice
from overlapfx.chips import TPU_7X, TPU_V4, TPU_V5E, TPU_V5P, TPU_V6E, Chip
from overlapfx.plan.torus import Torus

# FLOP per clock cycle of the matrix units of one device: four units of 256 x 256 multiply-adds.
_MATRIX_FLOP_PER_CYCLE = 4 * 256 * 256 * 2
_TORUS = "JAX scaling book"
_CORES = "Cloud TPU documentation: the link between the two devices of a chip against one between chips"
_DCN_GBIT_PER_CHIP = {TPU_V4.name: 25, TPU_V5E.name: 25, TPU_V5P.name: 50, TPU_V6E.name: 100, TPU_7X.name: 100}
# A causal forward pass over 140 heads of 128 features, 2 sequences of 2048 tokens, in 4.7 ms: its blocks of 512 are
# 10/16 of all, so 80 of 275 TFLOP/s; with the backward pass, 7 products instead of 2, in 23.7 ms 56 TFLOP/s.
_KERNELS = "assumed: what axlearn's benchmark measured of Pallas flash attention with a dense bias on TPU v4"
_SWITCHES = frozenset({"permute_wrap"})
_UNITS = {
    "clock_hz": "Hz",
    "peak_flops": "FLOP/s",
    "kernel_efficiency": "of peak",
    "hbm_bytes_per_s": "B/s",
    "hbm_bytes": "B",
    "link_bytes_per_s": "B/s",
    "hop_latency_s": "s",
    "wrap_multiple": "chips",
    "permute_wrap": "0 or 1",
    "core_links": "links",
    "dcn_bytes_per_s": "B/s",
    "dcn_latency_s": "s",
    "host_bytes_per_s": "B/s",
}


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Figures of one device, in SI units; `sources` says for each where it comes from, and is empty for what its chip
    does not have.

    `clock_hz` turns estimated cycles into seconds. `link_bytes_per_s` is one link, one way; `hop_latency_s` is paid per
    link of the longest route. `hbm_bytes_per_s` prices copies and instructions without an estimate, `peak_flops`
    utilization, `kernel_efficiency` of it the arithmetic of custom kernels, `hbm_bytes` is what a program must fit
    into. A dimension of the torus wraps around where its size is a multiple of `wrap_multiple`; `permute_wrap` is 0
    where permutes may not use those links; `core_links` is the speed of the link between the two devices of a chip, in
    links between chips. `dcn_bytes_per_s` is a device's share of the network between slices, one way.
    """

    clock_hz: float
    peak_flops: float
    kernel_efficiency: float
    hbm_bytes_per_s: float
    hbm_bytes: float
    link_bytes_per_s: float
    hop_latency_s: float
    wrap_multiple: float
    permute_wrap: float
    core_links: float
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
        if chip.name not in _DCN_GBIT_PER_CHIP:
            known = ", ".join(_DCN_GBIT_PER_CHIP)
            raise ValueError(f"no figures to model {chip.name} with; use one of {known}.")
        assert device.link_bytes_per_s and device.hbm_bytes_per_s and device.hbm_bytes and device.wrap_multiple
        assumed = dict.fromkeys(chip.assumed, f"assumed; {chip.source}")
        clock, clock_source = device.clock_hz, assumed.get("clock_hz", chip.source)
        if clock is None:
            clock = device.peak_bf16_flops / _MATRIX_FLOP_PER_CYCLE
            clock_source = "assumed: peak FLOP/s over the FLOP per cycle of four 256 x 256 matrix units"
        dcn_gbit = _DCN_GBIT_PER_CHIP[chip.name]
        base = cls(
            clock_hz=clock,
            peak_flops=device.peak_bf16_flops,
            kernel_efficiency=0.3,
            hbm_bytes_per_s=device.hbm_bytes_per_s,
            hbm_bytes=device.hbm_bytes,
            link_bytes_per_s=device.link_bytes_per_s,
            hop_latency_s=1e-6,
            wrap_multiple=device.wrap_multiple,
            permute_wrap=1.0,
            core_links=Torus.core_speed,
            dcn_bytes_per_s=dcn_gbit * 1e9 / 8 / chip.devices_per_chip,
            dcn_latency_s=10e-6,
            host_bytes_per_s=16e9 / chip.devices_per_chip,
            sources={
                "clock_hz": clock_source,
                "peak_flops": chip.source,
                "kernel_efficiency": _KERNELS,
                "hbm_bytes_per_s": chip.source,
                "hbm_bytes": chip.source,
                "link_bytes_per_s": chip.source,
                "hop_latency_s": "JAX scaling book: about 1 us per hop",
                "wrap_multiple": f"dimensions of a multiple of this are closed; {assumed.get('wrap_multiple', _TORUS)}",
                "permute_wrap": "permutes may use the links that close a dimension: found by compiling",
                "core_links": _CORES if chip.devices_per_chip > 1 else "",
                "dcn_bytes_per_s": f"Cloud TPU documentation: {dcn_gbit} Gbit/s per chip",
                "dcn_latency_s": "assumed: a few switches and two hosts",
                "host_bytes_per_s": "JAX scaling book: PCIe, about 16 GB/s per chip",
            },
        )
        return base.replace(**overrides)

    @classmethod
    def for_slice(cls, topology: Slice, **overrides: float) -> Assumptions:
        """As `for_chip`, with what is special to the slice's family."""
        base = cls.for_chip(topology.chip)
        if not topology.family.permute_wrap:
            source = "no permute may use the links that close a dimension, else it blocks: found with libtpu 0.0.52"
            base = dataclasses.replace(base, permute_wrap=0.0, sources={**base.sources, "permute_wrap": source})
        return base.replace(**overrides)

    def network(self, topology: Slice) -> Torus:
        """The torus of one slice as assumed."""
        return dataclasses.replace(
            topology.torus,
            wrap=tuple(size % self.wrap_multiple == 0 for size in topology.shape),
            permute_wrap=bool(self.permute_wrap),
            core_speed=self.core_links,
        )

    def replace(self, **overrides: float) -> Assumptions:
        """The same with some figures given by the user. Raises ValueError as `for_chip` does."""
        for name, value in overrides.items():
            if name not in _UNITS:
                raise ValueError(f"no assumption is called {name!r}; use one of {', '.join(_UNITS)}.")
            if name in _SWITCHES and value not in (0, 1):
                raise ValueError(f"assumption {name}={value} is a switch; give it as 0 or 1.")
            if name == "kernel_efficiency" and value > 1:
                raise ValueError(f"assumption {name}={value} is a part of the peak; give it as a number up to 1.")
            if name not in _SWITCHES and not 0 < value < math.inf:
                raise ValueError(f"assumption {name}={value} must be positive and finite; give it in {_UNITS[name]}.")
        given = dict.fromkeys(overrides, "given by the user")
        return dataclasses.replace(self, **overrides, sources={**self.sources, **given})

    def with_link_factor(self, factor: float) -> Assumptions:
        """The same with links `factor` times as fast, for a sensitivity row."""
        scaled = {"link_bytes_per_s": f"{factor:g} x {self.sources['link_bytes_per_s']}"}
        return dataclasses.replace(
            self, link_bytes_per_s=self.link_bytes_per_s * factor, sources={**self.sources, **scaled}
        )

    def rows(self) -> list[tuple[str, float, str, str]]:
        """(name, value, unit, source) of every figure that the chip has."""
        return [(n, getattr(self, n), unit, self.sources[n]) for n, unit in _UNITS.items() if self.sources[n]]
