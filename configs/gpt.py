# Source: GPT scaling series on TPU v4 (public configuration; table "Models" of the specification); tiny is ours.
# Expected: tiny ends below 2.2 nats per byte on pystdlib after 300 steps.
#     Published MFU on v4, without recomputation, read off a plot (+-0.3): 32B 42.2 %, 128B 48.3 %, 256B 53.0 %,
#     512B 48.8 %, 1024B 53.5 %; 64B is not published.
# Command: make train, the same as: python -m launch.train --config=configs/gpt.py:tiny
"""GPT in seven sizes: a tiny byte-level one for a laptop, six of the published scaling series."""

from __future__ import annotations

from ml_collections import ConfigDict

# name: layers, M, heads, global batch, mesh (y, x), recomputation. F is 4 M, a head has 128, chips are y * x.
PUBLISHED = {
    "32B": (40, 8192, 64, 512, (16, 4), "attention"),
    "64B": (51, 10240, 80, 512, (16, 8), "attention"),
    "128B": (71, 12288, 96, 1024, (64, 4), "all"),
    "256B": (80, 16384, 128, 2048, (64, 8), "all"),
    "512B": (102, 20480, 160, 4096, (64, 16), "all"),
    "1024B": (142, 24576, 192, 4096, (256, 8), "all"),
}


def get_config(name: str = "tiny") -> ConfigDict:
    """The config called `name`; raises ValueError with the legal names for any other."""
    if name == "tiny":
        return _tiny()
    if name in PUBLISHED:
        return _published(name)
    raise ValueError(f"configs/gpt.py has no config {name!r}; choose one of tiny, {', '.join(PUBLISHED)}.")


def _tiny() -> ConfigDict:
    """1.1 million parameters, bytes as tokens, 8 devices."""
    config = _base("gpt_tiny")
    config.model = ConfigDict(
        {
            "family": "gpt",
            "vocab_size": 256,
            "num_layers": 4,
            "d_model": 128,
            "d_ff": 512,
            "num_heads": 4,
            "num_kv_heads": 4,
            "head_dim": 32,
            "seq_len": 128,
            "positions": "rotary",
            "activation": "gelu",
            "gated": True,
            "dropout": 0.0,
            "remat": "none",
            "compute_dtype": "float32",
        }
    )
    config.mesh.update({"y": 4, "x": 2})
    config.data.global_batch = 16
    config.optimizer.update({"learning_rate": 3e-3, "warmup_steps": 30})
    config.train.update(
        {"num_steps": 300, "log_every": 1, "eval_every": 100, "eval_batches": 8, "checkpoint_every": 100}
    )
    return config


def _published(name: str) -> ConfigDict:
    """One row of the table; what the table does not say (learning rate, number of steps) is ours."""
    num_layers, d_model, num_heads, global_batch, (y, x), remat = PUBLISHED[name]
    config = _base(f"gpt_{name}")
    config.model = ConfigDict(
        {
            "family": "gpt",
            "vocab_size": 32000,
            "num_layers": num_layers,
            "d_model": d_model,
            "d_ff": 4 * d_model,
            "num_heads": num_heads,
            "num_kv_heads": num_heads,
            "head_dim": 128,
            "seq_len": 1024,
            "positions": "learned",
            "activation": "gelu",
            "gated": False,
            "dropout": 0.0,
            "remat": remat,
            "compute_dtype": "bfloat16",
        }
    )
    config.mesh.update({"y": y, "x": x})
    config.data.global_batch = global_batch
    return config


def _base(name: str) -> ConfigDict:
    """What all sizes share; the model is filled in by the caller."""
    return ConfigDict(
        {
            "name": name,
            "seed": 0,
            "model": {},
            "mesh": {"y": 1, "x": 1, "replica": 1},
            "data": {"name": "pystdlib", "data_dir": "", "global_batch": 1, "num_workers": 0, "seed": 0},
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
                "sites": {},
            },
            "sample": {"prompt": "def ", "num_tokens": 200, "temperature": 0.8},
        }
    )
