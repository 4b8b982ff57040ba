"""One training step: gradients inside shard_map, clipping and Adam on the sharded state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from overlapfx import chips, compat
from overlapfx.mesh import batch_axes
from overlapfx.ops import layout, order, ring
from overlapfx.plan import cost
from overlapfx.train.state import Model, TrainState
from overlapfx.types import Batch, Evaluation, Metrics, Params, PRNGKey

OPTIMIZER = "optimizer"  # scope of everything in a step that is no forward or backward pass


def batch_spec(mesh: Mesh) -> P:
    """Rows over every axis but x, on which each device sees whole rows."""
    return P(batch_axes(mesh))


def make_train_step(
    mesh: Mesh,
    model: Model,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    grad_accum: int,
    dropout: bool,
    partitioning: str = "shard_map",
    scheduler: str = "compiler",
    compiler_options: dict[str, Any] | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A jitted function (state, global batch) -> (next state, metrics); the old state is donated.

    If the loss or a gradient is not finite, the state comes back as it was, key and counters included.

    metrics: scalars loss (nats per counted token, before the update), grad_norm (before clipping), learning_rate,
        tokens (counted), skipped (1 if there was no update), what else the model's `loss` finds; and finite_leaves,
        bool [number of parameter arrays], for which gradients the sum of squares is finite, in the order of
        `jax.tree.leaves(state.params)`.
    partitioning: "xla" hands the same model to XLA's own partitioner instead, without overlap of ours: the baseline
        that plans compare with. Parameters and activations lie as in the other form.
    scheduler: who orders forward and backward pass, see `ops.order.impose`; only in shard_map.
    """
    assert partitioning in ("shard_map", "xla"), partitioning
    gradients = _gradients_fn(mesh, model, grad_accum, partitioning, scheduler)
    here = cost.Environment(chips.detect(mesh.devices.flat[0]) or chips.TPU_V4)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(state.key, state.step) if dropout else None
        with cost.pricing(here):
            nll_sum, count, grads, found = gradients(state.params, batch, key)
        with jax.named_scope(OPTIMIZER):
            # A batch without a counted token has no gradient rather than 0 / 0.
            scale = 1.0 / jnp.maximum(count, 1.0)
            grads = jax.tree.map(lambda g: g * scale, grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params: Any = optax.apply_updates(state.params, updates)
            metrics = {
                "loss": nll_sum * scale,
                "grad_norm": optax.tree.norm(grads),
                "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
                "tokens": count,
                **{name: value / jnp.maximum(counted, 1.0) for name, (value, counted) in found.items()},
            }
            updated = TrainState(state.step + 1, params, opt_state, state.key)
            return _unless_broken(state, updated, grads, metrics)

    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options)


def _unless_broken(
    state: TrainState, updated: TrainState, grads: Params, metrics: Metrics
) -> tuple[TrainState, Metrics]:
    """`updated`, or `state` where the loss or a gradient is not finite; the metrics say which.

    Decided on the devices: the host learns of it with the other metrics and nobody waits.
    """
    # The sum of squares is infinite or NaN if an entry is; the norm has computed it already, so it costs nothing here.
    squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(grads)]
    applies = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    pairs = [(new.step, new.params, new.opt_state) for new in (updated, state)]  # the key never changes
    count, params, opt_state = jax.tree.map(lambda new, old: jnp.where(applies, new, old), *pairs)
    return TrainState(count, params, opt_state, state.key), metrics | {
        "skipped": 1.0 - applies.astype(jnp.float32),
        "finite_leaves": jnp.isfinite(jnp.stack(squares)),
    }


def make_eval_step(mesh: Mesh, model: Model) -> Callable[[Params, Batch], Evaluation]:
    """A jitted function (params, global batch) -> what the model's `evaluate` finds, summed over all devices."""
    axes = batch_axes(mesh)

    def local(params: Params, batch: Batch) -> Evaluation:
        found = model.bind(params).evaluate(batch, _global_rows(axes, batch))
        return jax.tree.map(lambda value: lax.psum(value, axes), found)

    specs = (model.layouts, batch_spec(mesh))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))


def make_gradients(mesh: Mesh, model: Model, *, grad_accum: int, scheduler: str = "compiler") -> Any:
    """A jitted function (params, global batch, dropout key) -> (summed loss, counted tokens, gradients of the sum)."""
    gradients = _gradients_fn(mesh, model, grad_accum, "shard_map", scheduler)
    return jax.jit(lambda params, batch, key: gradients(params, batch, key)[:3])


def _global_rows(axes: tuple[str, ...], batch: Batch) -> Array:
    num_rows = next(iter(batch.values())).shape[0]
    return ring.index(axes) * num_rows + jnp.arange(num_rows)


def _cut(x: Array, num_micros: int) -> Array:
    """Micro-batches along a new first dimension, every device having a part of each."""
    cut = x.reshape(num_micros, x.shape[0] // num_micros, *x.shape[1:])
    return layout.constrain("mb" + "t" * (x.ndim - 1), cut)


def _gradients_fn(
    mesh: Mesh, model: Model, grad_accum: int, partitioning: str, scheduler: str
) -> Callable[..., tuple[Array, Array, Params, Evaluation]]:
    """(params, batch, key) -> summed loss, counted tokens, gradient of the *sum*, what else the model found: the caller
    divides once, so that every token weighs the same whatever the micro-batch or device it is on.
    """
    axes = batch_axes(mesh)

    def local(params: Params, batch: Batch, key: PRNGKey | None) -> tuple[Array, Array, Params, Evaluation]:
        rows = _global_rows(axes, batch)

        def summed_loss(params: Params, micro: Any) -> tuple[Array, tuple[Array, Evaluation]]:
            micro_batch, micro_rows = micro
            nll_sum, count, *found = model.bind(params).loss(micro_batch, micro_rows, key)
            return lax.psum(nll_sum, axes), lax.psum((count, found[0] if found else {}), axes)

        grad_fn = jax.value_and_grad(summed_loss, has_aux=True)
        if grad_accum == 1:
            (nll_sum, (count, found)), grads = grad_fn(params, (batch, rows))
            return nll_sum, count, grads, found
        micros = jax.tree.map(lambda x: _cut(x, grad_accum), (batch, rows))

        def accumulate(total: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, grad_fn(params, micro)), None

        zeros = jax.tree.map(lambda p: compat.vary(jnp.zeros(p.shape, p.dtype), compat.varying_axes(p)), params)
        sums = jax.eval_shape(summed_loss, params, jax.tree.map(lambda x: x[0], micros))
        start = (jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums), zeros)
        ((nll_sum, (count, found)), grads), _ = lax.scan(accumulate, start, micros)
        return nll_sum, count, grads, found

    out_specs = (P(), P(), model.layouts, P())
    if partitioning == "xla":
        return _whole(local, mesh, out_specs)
    specs = (model.layouts, batch_spec(mesh), P())
    return jax.shard_map(order.impose(local, scheduler), mesh=mesh, in_specs=specs, out_specs=out_specs)


def _whole(local: Callable[..., Any], mesh: Mesh, out_specs: Any) -> Callable[..., Any]:
    """`local` for XLA's partitioner: batch and features of activations, results by `out_specs`, laid as in paper.md."""
    axes_of_label = {"b": batch_axes(mesh), **dict.fromkeys("dfnv", ("x",))}
    whole = layout.partitioned_by_xla(local, mesh, axes_of_label)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs, is_leaf=lambda s: isinstance(s, P))
    return lambda *args: lax.with_sharding_constraint(whole(*args), shardings)
