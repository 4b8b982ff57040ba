"""Tensor parallelism whose communication runs beside the einsums that depend on it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from overlapfx.config import Config, Overlap, from_config_dict

if TYPE_CHECKING:
    from overlapfx.ops.collective_einsum import collective_einsum, collective_einsum_grid, collective_einsum_multi
    from overlapfx.ops.rewrite import overlap

__version__ = "0.1.0"
__all__ = [
    "Config",
    "Overlap",
    "collective_einsum",
    "collective_einsum_grid",
    "collective_einsum_multi",
    "from_config_dict",
    "overlap",
]

# What needs JAX is imported on first use, so that launchers can set the environment before JAX starts.
_LAZY = {
    "collective_einsum": "overlapfx.ops.collective_einsum",
    "collective_einsum_grid": "overlapfx.ops.collective_einsum",
    "collective_einsum_multi": "overlapfx.ops.collective_einsum",
    "overlap": "overlapfx.ops.rewrite",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'overlapfx' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
