"""Small GPTs on any mesh of the simulated devices, for tests."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from configs import gpt as gpt_config
from models import gpt
from overlapfx.config import Config, MeshConfig, ModelConfig, Overlap, from_config_dict
from overlapfx.mesh import make_mesh
from overlapfx.train import optimizer, state, step

TINY = from_config_dict(gpt_config.get_config("tiny"))
SMALL = dataclasses.replace(
    TINY.model, d_model=32, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, d_ff=48, seq_len=16, gated=False
)
NUM_ROWS = 8


@dataclasses.dataclass
class Run:
    """A model on a mesh, ready to step."""

    mesh: Mesh
    model: state.Model
    state: state.TrainState
    train_step: Any
    eval_step: Any

    def steps(self, count: int, seed: int = 0) -> list[float]:
        """Losses of `count` steps on fixed random batches."""
        losses = []
        for k in range(count):
            self.state, metrics = self.train_step(self.state, self.place(batch(seed + k)))
            losses.append(float(metrics["loss"]))
        return losses

    def place(self, host: dict[str, np.ndarray]) -> Any:
        return jax.device_put(host, NamedSharding(self.mesh, step.batch_spec(self.mesh)))


def make_run(
    y: int,
    x: int,
    *,
    replica: int = 1,
    model: ModelConfig = SMALL,
    overlap: Overlap = Overlap("off"),
    grad_accum: int = 1,
) -> Run:
    config = dataclasses.replace(TINY, mesh=MeshConfig(y, x, replica), model=model, overlap=overlap)
    mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices])
    return _run(config, mesh, grad_accum)


def _run(config: Config, mesh: Mesh, grad_accum: int) -> Run:
    described = state.describe(gpt.build(config.model, config.overlap))
    adam = optimizer.make_optimizer(config.optimizer, config.train.num_steps)
    schedule = optimizer.make_schedule(config.optimizer, config.train.num_steps)
    return Run(
        mesh,
        described,
        state.init_state(mesh, described, adam, config.seed),
        step.make_train_step(mesh, described, adam, schedule, grad_accum=grad_accum, dropout=config.model.dropout > 0),
        step.make_eval_step(mesh, described),
    )


@functools.cache
def batch(seed: int, seq_len: int = SMALL.seq_len, vocab_size: int = 256) -> dict[str, np.ndarray]:
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
