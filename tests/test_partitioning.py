"""The step that XLA's own partitioner cuts is the step of shard_map: the baseline of plans computes the same thing."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from gpt_harness import SMALL, TINY, batch, make_run

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.train import optimizer, step

MODEL = dataclasses.replace(SMALL, dropout=0.1, remat="attention", gated=True, num_kv_heads=4)


def prepared(partitioning, y=4, x=2, replica=1, overlap=Overlap("off"), grad_accum=1):
    run = make_run(y, x, replica=replica, model=MODEL, overlap=overlap)
    adam = optimizer.make_optimizer(TINY.optimizer, TINY.train.num_steps)
    schedule = optimizer.make_schedule(TINY.optimizer, TINY.train.num_steps)
    run.train_step = step.make_train_step(
        run.mesh, run.model, adam, schedule, grad_accum=grad_accum, dropout=True, partitioning=partitioning
    )
    return run


# Not both at once with one row per device: there XLA's partitioner gives another loss (jax 0.10.2 and 0.12.0.1 on CPU).
@pytest.mark.parametrize("case", [{"grad_accum": 2}, {"y": 2, "replica": 2}], ids=["micro-batches", "replicas"])
def test_same_loss_and_gradients(case):
    found = {}
    for partitioning in ("shard_map", "xla"):
        run = prepared(partitioning, **case)
        state, metrics = run.train_step(run.state, run.place(batch(0)))
        # Adam's first moment is the gradient, but for a factor.
        found[partitioning] = jax.tree.map(np.asarray, (metrics, state.opt_state))
    for got, want in zip(jax.tree.leaves(found["xla"]), jax.tree.leaves(found["shard_map"]), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-7)


def test_parameters_stay_where_they_are():
    run = prepared("xla")
    layouts = jax.tree.map(lambda leaf: leaf.sharding, run.state.params)
    compiled = run.train_step.lower(run.state, run.place(batch(0))).compile()
    after = compiled.output_shardings[0].params
    ranks = jax.tree.map(lambda leaf: leaf.ndim, run.state.params)
    assert jax.tree.all(jax.tree.map(lambda a, b, rank: a.is_equivalent_to(b, rank), after, layouts, ranks))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_over_devices_have_the_dtype_of_the_config(dtype, monkeypatch):
    monkeypatch.setattr(compat, "target_platform", lambda: "tpu")  # where products need not be widened
    run = prepared("xla", overlap=Overlap("off", accum_dtype=dtype))
    text = str(jax.make_jaxpr(run.train_step)(run.state, batch(0)))
    narrow, wide = (text.count(f"preferred_element_type={name}") for name in ("bfloat16", "float32"))
    # All einsums of the op; scores and contexts of attention cross no device.
    assert narrow > 2 * wide > 0 if dtype == "bfloat16" else wide > narrow == 0


def test_nothing_of_ours_is_left():
    run = prepared("xla", overlap=Overlap("on"))
    text = str(jax.make_jaxpr(run.train_step)(run.state, batch(0)))
    ours = r"\b(psum\w*|all_gather\w*|reduce_scatter|psum_scatter|ppermute|all_to_all|pmax|axis_index|shard_map)\["
    assert not re.findall(ours, text)
    # Operands and results of every einsum of activations, forward and recomputed.
    assert text.count("sharding_constraint[") > 10
    assert re.search(ours, str(jax.make_jaxpr(prepared("shard_map").train_step)(run.state, batch(0))))
