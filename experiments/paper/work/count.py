"""What a model consists of, counted from the real module without allocating it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from overlapfx.config import Config, from_config_dict
from overlapfx.train import state


def find(task: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, and floating-point operations of one step over all devices."""
    config = from_config_dict(task["config"])
    family = importlib.import_module(f"models.{config.model.family}")
    flops = family.step_flops(config.model, config.data.global_batch)
    return {"num_params": num_params(config), "model_flops": flops.model, "hardware_flops": flops.hardware}


def num_params(config: Config) -> int:
    """Parameters of the whole model."""
    family = importlib.import_module(f"models.{config.model.family}")
    return state.describe(family.build(config.model, config.overlap)).num_params()
