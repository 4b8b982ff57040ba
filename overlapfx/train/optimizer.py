"""Adam with warm-up, cosine decay and clipping, from Optax."""

from __future__ import annotations

import jax
import optax

from overlapfx.config import OptimizerConfig
from overlapfx.types import Params


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by step: linear from 0 over warmup_steps, then cosine to final_lr_ratio of it at num_steps."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(num_steps, config.warmup_steps + 1),
        end_value=config.final_lr_ratio * config.learning_rate,
    )


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Clip by the global norm, then AdamW; norm scales are not decayed."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, num_steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=_decayed,
        ),
    )


def _decayed(params: Params) -> Params:
    return jax.tree_util.tree_map_with_path(lambda path, _: "scale" not in jax.tree_util.keystr(path), params)
