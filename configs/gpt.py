# Source: GPT scaling series on TPU v4 (public configuration; table "Models" of the specification); tiny and 1B
#     are ours, and so is meena_500B, which reaches the named size of the paper's Meena (vocabulary of 8192 as Meena's).
# Expected: tiny ends below 2.2 nats per byte on pystdlib after 300 steps.
#     Published MFU on v4, without recomputation, read off a plot (+-0.3): 32B 42.2 %, 128B 48.3 %, 256B 53.0 %,
#     512B 48.8 %, 1024B 53.5 %; 64B is not published.
#     1B, meena_500B: no published figure.
# Command: make train, the same as: python -m launch.train --config=configs/gpt.py:tiny
#     python -m experiments.single_chip, which trains 1B
#     overlapfx plan --config=configs/gpt.py:meena_500B --topology=v4:8x8x16
"""Decoders: a tiny byte-level one for a laptop, one for one chip, six of the published GPT scaling series, a Meena."""

from __future__ import annotations

from ml_collections import ConfigDict

from configs import _base

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
    if name == "1B":
        return _one_chip()
    if name == "meena_500B":
        return _meena()
    raise ValueError(
        f"configs/gpt.py has no config {name!r}; choose one of tiny, 1B, {', '.join(PUBLISHED)}, meena_500B."
    )


def _tiny() -> ConfigDict:
    """1.1 million parameters, bytes as tokens, 8 devices."""
    config = _base.config("gpt_tiny")
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
    config.overlap.mode = "on"  # at this size nothing is worth decomposing, but the machinery is to be seen at work
    config.optimizer.update({"learning_rate": 3e-3, "warmup_steps": 30})
    config.train.update(
        {"num_steps": 300, "log_every": 1, "eval_every": 100, "eval_batches": 8, "checkpoint_every": 100}
    )
    return config


def _published(name: str) -> ConfigDict:
    """One row of the table; what the table does not say (learning rate, number of steps) is ours."""
    num_layers, d_model, num_heads, global_batch, (y, x), remat = PUBLISHED[name]
    config = _base.config(f"gpt_{name}")
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
    if name == "512B":  # 65536 tokens a device are more than its memory holds at once
        config.optimizer.grad_accum = 2
    # Row stripes hide each other's communication; eight gain a little at these sizes, lose at others or take too long
    # to compile (512B).
    config.overlap.update(_base.FULL_SIZE, row_stripes=8 if name in ("32B", "128B", "256B") else 4)
    return config


def _one_chip() -> ConfigDict:
    """0.976 billion parameters, which with their float32 Adam state and all activations fit into 32 GiB."""
    config = _published("32B")
    config.name = "gpt_1B"
    config.model.update(
        {
            "num_layers": 18,
            "d_model": 2048,
            "d_ff": 8192,
            "num_heads": 16,
            "num_kv_heads": 16,
            "seq_len": 2048,
            "remat": "none",
        }
    )
    config.mesh.update({"y": 1, "x": 1})
    config.data.global_batch = 4
    config.overlap.update({"row_stripes": 1, "save_gathered": False})  # nothing is communicated
    return config


def _meena() -> ConfigDict:
    """507 billion parameters on 1024 chips; heads of 128 that together are wider than the model."""
    config = _published("512B")
    config.name = "gpt_meena_500B"
    config.model.update(
        {"vocab_size": 8192, "num_layers": 120, "d_model": 18432, "d_ff": 65536, "num_heads": 192, "num_kv_heads": 192}
    )
    config.data.global_batch = 2048
    return config
