"""What pieces of einsums cost on each chip; `python -m experiments.prices` writes the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices of one chip, from programs compiled for it.

    columns: by the width of a piece, the time of its einsum over its arithmetic at peak. sum_s_per_byte: of a running
    sum that an einsum reads and writes, per byte of the sum. copy_s_per_byte: of a slice or a placed result.
    """

    columns: Mapping[int, float]
    sum_s_per_byte: float
    copy_s_per_byte: float


PRICES = {
    "TPU v4": Prices(
        columns={
            128: 2.495,
            256: 1.32,
            384: 1.089,
            512: 1.077,
            640: 1.067,
            768: 1.063,
            1024: 1.058,
            2048: 1.051,
            4096: 1.048,
            8192: 1.047,
            16384: 1.108,
        },
        sum_s_per_byte=2.47e-13,
        copy_s_per_byte=2.759e-12,
    ),
    "TPU v5e": Prices(
        columns={
            128: 2.696,
            256: 1.433,
            384: 1.14,
            512: 1.041,
            640: 1.043,
            768: 1.041,
            1024: 1.036,
            2048: 1.032,
            4096: 1.031,
            8192: 1.139,
            16384: 1.139,
        },
        sum_s_per_byte=1.66e-13,
        copy_s_per_byte=3.862e-12,
    ),
    "TPU v5p": Prices(
        columns={
            128: 2.205,
            256: 1.198,
            384: 1.066,
            512: 1.046,
            640: 1.048,
            768: 1.045,
            1024: 1.038,
            2048: 1.033,
            4096: 1.108,
            8192: 1.107,
            16384: 1.106,
        },
        sum_s_per_byte=2.4e-14,
        copy_s_per_byte=1.302e-12,
    ),
    "TPU v6e": Prices(
        columns={
            128: 5.385,
            256: 2.859,
            384: 1.997,
            512: 1.575,
            640: 1.522,
            768: 1.312,
            1024: 1.149,
            2048: 1.139,
            4096: 1.134,
            8192: 1.417,
            16384: 1.406,
        },
        sum_s_per_byte=2.22e-13,
        copy_s_per_byte=1.758e-12,
    ),
}
