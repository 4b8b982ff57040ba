"""What the configs of all families share."""

from __future__ import annotations

from ml_collections import ConfigDict

# Of a full size: sums travel in bfloat16, as XLA makes them of bfloat16 products (the published runs moved as much);
# what a layer gathers when it is recomputed lives until its own backward pass only, so that keeping it costs little
# memory.
FULL_SIZE = {"save_gathered": True, "accum_dtype": "bfloat16"}


def config(name: str) -> ConfigDict:
    """The config called `name` without its model, mesh, batch and whatever else is its own."""
    return ConfigDict(
        {
            "name": name,
            "seed": 0,
            "model": {},
            "mesh": {"y": 1, "x": 1, "replica": 1},
            "data": {
                "name": "pystdlib",
                "data_dir": "",
                "global_batch": 1,
                "num_workers": 0,
                "seed": 0,
                "max_skipped_records": 0,
            },
            "optimizer": {
                "learning_rate": 2e-4,
                "warmup_steps": 1000,
                "final_lr_ratio": 0.1,
                "b1": 0.9,
                "b2": 0.95,
                "eps": 1e-8,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
                "grad_accum": 1,
            },
            "train": {
                "num_steps": 100_000,
                "log_every": 1,
                "eval_every": 1000,
                "eval_batches": 16,
                "checkpoint_every": 1000,
                "checkpoint_keep": 3,
                "step_timeout_s": 1800.0,
                "max_skipped_steps": 3,
            },
            "overlap": {
                "mode": "auto",
                "method": "auto",
                "direction": "auto",
                "unroll": 2,
                "interleave": "auto",
                "scheduler": "compiler",
                "accum_dtype": "float32",
                "save_gathered": False,
                "row_stripes": 1,
                "sites": {},
            },
            "sample": {"prompt": "def ", "num_tokens": 200, "temperature": 0.8},
        }
    )
