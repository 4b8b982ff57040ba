"""Small models of any family on any mesh of the simulated devices, for tests."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from overlapfx.config import Config, MeshConfig, Overlap, from_config_dict
from overlapfx.families import ModelConfig
from overlapfx.mesh import make_mesh
from overlapfx.train import optimizer, state, step

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
NUM_ROWS = 8


@dataclasses.dataclass
class Run:
    """A model on a mesh, ready to step; the first state is made when it is asked for."""

    mesh: Mesh
    model: state.Model
    config: Config
    train_step: Any
    eval_step: Any
    batch: Any

    @functools.cached_property
    def state(self) -> state.TrainState:
        return state.init_state(self.mesh, self.model, self._adam, self.config.seed)

    @property
    def abstract_state(self) -> state.TrainState:
        return state.abstract_state(self.mesh, self.model, self._adam, self.config.seed)

    @property
    def _adam(self) -> Any:
        return optimizer.make_optimizer(self.config.optimizer, self.config.train.num_steps)

    def start_from(self, first: state.TrainState) -> None:
        """Lays copies of the arrays of another run's state, or of a reference's, over this mesh."""
        layouts = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self.state = jax.device_put(jax.tree.map(_copy, first), layouts)  # a step deletes what it is given

    def eval_loss(self, seed: int = 0) -> float:
        """Mean loss of one fixed random batch."""
        total, count = self.eval_step(self.state.params, self.place(self.batch(seed)))["loss"]
        return float(total) / float(count)

    def steps(self, count: int, seed: int = 0) -> list[float]:
        """Losses of `count` steps on fixed random batches."""
        losses = []
        for k in range(count):
            self.state, metrics = self.train_step(self.state, self.place(self.batch(seed + k)))
            losses.append(float(metrics["loss"]))
        return losses

    def place(self, host: dict[str, np.ndarray]) -> Any:
        return jax.device_put(host, NamedSharding(self.mesh, step.batch_spec(self.mesh)))


def _copy(leaf: Any) -> Any:
    """On the host, where nothing is compiled to copy an array or to cut it for a mesh; NumPy does not hold keys."""
    return jnp.copy(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else np.array(leaf)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What a run on one device found: the state before, an evaluation of it, the losses of three steps, the end."""

    first: state.TrainState
    eval_loss: float
    losses: list[float]
    last: Any


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's tiny config with a smaller model, and batches for it: seed -> host arrays of NUM_ROWS rows."""

    config: Config
    batch: Any

    @classmethod
    def of(cls, config_dict: Any, small: dict[str, Any], batch: Any) -> Family:
        config = from_config_dict(config_dict)
        return cls(dataclasses.replace(config, model=dataclasses.replace(config.model, **small)), batch)

    @property
    def module(self) -> Any:
        return importlib.import_module(f"models.{self.config.model.family}")

    def run(
        self,
        y: int,
        x: int,
        *,
        replica: int = 1,
        model: ModelConfig | None = None,
        overlap: Overlap = Overlap("off"),
        grad_accum: int = 1,
        partitioning: str = "shard_map",
    ) -> Run:
        config = dataclasses.replace(
            self.config, mesh=MeshConfig(y, x, replica), model=model or self.config.model, overlap=overlap
        )
        mesh = make_mesh(config.mesh, jax.devices()[: config.mesh.num_devices])
        described = state.describe(self.module.build(config.model, config.overlap))
        adam = optimizer.make_optimizer(config.optimizer, config.train.num_steps)
        schedule = optimizer.make_schedule(config.optimizer, config.train.num_steps)
        settings: dict[str, Any] = {"grad_accum": grad_accum, "dropout": config.model.dropout > 0}
        train_step = step.make_train_step(mesh, described, adam, schedule, partitioning=partitioning, **settings)
        return Run(mesh, described, config, train_step, step.make_eval_step(mesh, described), self.batch)

    @functools.cached_property
    def reference(self) -> Reference:
        """Three steps on one device: what all meshes must agree with."""
        run = self.run(1, 1)
        first = jax.tree.map(_copy, run.state)
        eval_loss = run.eval_loss()
        return Reference(first, eval_loss, run.steps(3), jax.tree.map(np.asarray, run.state.params))

    def assert_trains_alike(self, run: Run) -> None:
        """The same three losses and the same end as on one device."""
        np.testing.assert_allclose(run.steps(3), self.reference.losses, rtol=3e-6)
        for got, want in zip(jax.tree.leaves(run.state.params), jax.tree.leaves(self.reference.last), strict=True):
            # Adam divides by the root of a tiny second moment in the first steps, which magnifies rounding.
            np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=3e-5)

    def assert_same_on(self, y: int, x: int, row_stripes: int = 2) -> None:
        """Overlapped, the same training as on one device; not overlapped, the same loss."""
        overlapped, blocking = self.run(y, x, overlap=Overlap("on", row_stripes=row_stripes)), self.run(y, x)
        for run in (overlapped, blocking):
            run.start_from(self.reference.first)
        self.assert_trains_alike(overlapped)
        np.testing.assert_allclose(blocking.eval_loss(), self.reference.eval_loss, rtol=3e-6)
