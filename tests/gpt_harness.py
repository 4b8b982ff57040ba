"""Small GPTs on any mesh of the simulated devices, for tests."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from family_harness import NUM_ROWS, Family, Run

from configs import gpt as gpt_config
from overlapfx.config import Overlap
from overlapfx.families import ModelConfig

SEQ_LEN = 16


@functools.cache
def batch(seed: int, seq_len: int = SEQ_LEN, vocab_size: int = 256) -> dict[str, np.ndarray]:
    """Random tokens with a ragged mask: each row counts a different number of targets; two documents in every row."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab_size, (NUM_ROWS, seq_len + 1)).astype(np.int32)
    lengths = rng.integers(1, seq_len + 1, (NUM_ROWS, 1))
    cuts = rng.integers(1, seq_len, (NUM_ROWS, 1))
    place = np.arange(seq_len)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "mask": (place < lengths).astype(np.float32),
        "segments": (1 + (place >= cuts)).astype(np.int32),
    }


SMALL_SIZES: dict[str, Any] = {
    "d_model": 32,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 4,
    "d_ff": 48,
    "seq_len": SEQ_LEN,
    "gated": False,
}
GPT = Family.of(gpt_config.get_config("tiny"), SMALL_SIZES, batch)
TINY, SMALL = GPT.config, GPT.config.model


def make_run(
    y: int,
    x: int,
    *,
    replica: int = 1,
    model: ModelConfig = SMALL,
    overlap: Overlap = Overlap("off"),
    grad_accum: int = 1,
) -> Run:
    return GPT.run(y, x, replica=replica, model=model, overlap=overlap, grad_accum=grad_accum)
