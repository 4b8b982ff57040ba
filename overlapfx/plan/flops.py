"""Floating-point operations of a training step, counted by hand-checkable formulas."""

from __future__ import annotations

import dataclasses

from overlapfx.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step over the whole mesh: `model` for MFU, `hardware` (model plus recomputation) for HFU."""

    model: float
    hardware: float


def decoder_step(model: ModelConfig, num_sequences: int) -> StepFlops:
    """A decoder-only transformer trained on `num_sequences` sequences of model.seq_len tokens.

    Recomputed with remat "all": every product of a layer but its last, whose value no gradient needs. With "attention":
    the projections to query, key and value, the scores, and the widening product.
    """
    tokens = num_sequences * model.seq_len
    heads = model.num_heads * model.head_dim
    qkv = 2 * model.d_model * (heads + 2 * model.num_kv_heads * model.head_dim)
    out = 2 * heads * model.d_model
    scores = context = 2 * model.seq_len * heads / 2  # a causal query sees half of the keys
    up = 2 * model.d_model * model.d_ff * (2 if model.gated else 1)
    down = 2 * model.d_ff * model.d_model
    layer = qkv + scores + context + out + up + down
    recomputed = {"none": 0, "all": layer - down, "attention": qkv + scores + up}[model.remat]
    logits = 2 * model.d_model * model.vocab_size
    forward = model.num_layers * layer + logits
    total = 3 * tokens * forward
    return StepFlops(model=total, hardware=total + tokens * model.num_layers * recomputed)
