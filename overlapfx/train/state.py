"""What a training run remembers from step to step, with where each piece lives."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.layers import param
from overlapfx.train.names import leaf_names
from overlapfx.types import Params, PRNGKey


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "params", "opt_state", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """step: int32 [], updates applied so far, skipped ones not counted. params: float32 master weights.
    key: seeds the dropout of every step.

    Trees of the same structure carry shapes, PartitionSpecs or shardings instead of arrays, hence the open field types.
    """

    step: Any
    params: Any
    opt_state: Any
    key: Any


@dataclasses.dataclass(frozen=True)
class Model:
    """A Flax module split into what is traced (parameters, kept in the state) and what is not."""

    graph: Any
    template: Any
    layouts: Params
    make: Callable[[PRNGKey], nnx.Module]

    def bind(self, params: Params) -> Any:
        """The module with these parameters, global ones or the shards inside shard_map."""
        state = jax.tree.map(lambda leaf: leaf, self.template)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(self.graph, state)

    def names(self) -> list[str]:
        """Names of the parameter arrays, in the order of `jax.tree.leaves` of the parameters."""
        return leaf_names(nnx.to_pure_dict(self.template))

    def num_params(self) -> int:
        """Number of parameters, from the shapes of the real module."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.to_pure_dict(self.template)))


def describe(make: Callable[[PRNGKey], nnx.Module]) -> Model:
    """Splits the module that `make` builds from a key, without allocating a parameter."""
    module = nnx.eval_shape(lambda: make(jax.random.key(0)))
    graph, template = nnx.split(module)
    return Model(graph, template, param.layouts(module), make)


def init_fn(model: Model, optimizer: optax.GradientTransformation, seed: int) -> Callable[[], TrainState]:
    """A function without arguments that makes the first state; jit it with `state_shardings`, or take its shape."""

    def init() -> TrainState:
        init_key, run_key = jax.random.split(jax.random.key(seed))
        params = nnx.to_pure_dict(nnx.state(model.make(init_key), nnx.Param))
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), run_key)

    return init


def state_specs(model: Model, optimizer: optax.GradientTransformation, abstract: TrainState) -> TrainState:
    """PartitionSpecs of a state: optimizer moments lie where their parameters lie, everything else on every device."""
    opt_specs = optax.tree_map_params(
        optimizer,
        lambda _, spec: spec,
        abstract.opt_state,
        model.layouts,
        transform_non_params=lambda _: P(),
    )
    return TrainState(P(), model.layouts, opt_specs, P())


def state_shardings(
    mesh: Mesh, model: Model, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
    """NamedShardings of a state on `mesh`."""
    specs = state_specs(model, optimizer, abstract)
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))


def init_state(mesh: Mesh, model: Model, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """The first state, each device making its own shards; the same values on every mesh."""
    init = init_fn(model, optimizer, seed)
    return jax.jit(init, out_shardings=state_shardings(mesh, model, optimizer, jax.eval_shape(init)))()


def abstract_state(mesh: Mesh, model: Model, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Shapes, dtypes and shardings of a state, for restoring a checkpoint or compiling ahead of time."""
    shapes = jax.eval_shape(init_fn(model, optimizer, seed))
    shardings = state_shardings(mesh, model, optimizer, shapes)
    return jax.tree.map(lambda s, sh: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sh), shapes, shardings)
