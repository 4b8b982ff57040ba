"""The GPT trains alike on every mesh, overlapped or not, however it is cut."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_harness import MESHES, NUM_ROWS
from gpt_harness import GPT, SMALL, batch, make_run
from jax.sharding import PartitionSpec as P
from tolerances import TOLERANCES

from configs import gpt as gpt_config
from models import gpt
from overlapfx.aot.products import count
from overlapfx.config import Overlap, from_config_dict
from overlapfx.plan.decide import record_sites
from overlapfx.plan.flops import decoder_step
from overlapfx.train import state, step

# Every site decomposed, two row stripes side by side.
OVERLAPPED = Overlap("on", row_stripes=2)
WITH_DROPOUT = dataclasses.replace(SMALL, dropout=0.1)
DROPPING = dataclasses.replace(GPT, config=dataclasses.replace(GPT.config, model=WITH_DROPOUT))


@pytest.mark.parametrize("overlap", [Overlap("off"), OVERLAPPED], ids=["blocking", "overlapped"])
@pytest.mark.parametrize(("y", "x"), MESHES, ids=lambda v: str(v))
def test_same_start_and_same_losses_on_every_mesh(y, x, overlap):  # C25
    run = DROPPING.run(y, x, overlap=overlap)
    first = jax.tree.map(np.asarray, DROPPING.reference.first.params)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, run.state.params), first)
    DROPPING.assert_trains_alike(run)


def test_loss_is_the_global_sum_over_the_global_count():
    run = make_run(4, 2)
    host = batch(0)
    params = run.state.params
    nll_sum, tokens = run.eval_step(params, run.place(host))["loss"]
    assert float(tokens) == host["mask"].sum()
    _, metrics = run.train_step(run.state, run.place(host))
    np.testing.assert_allclose(float(metrics["loss"]), float(nll_sum) / host["mask"].sum(), rtol=1e-6)
    assert float(metrics["tokens"]) == host["mask"].sum()


@pytest.mark.parametrize(
    "change",
    [
        {"gated": True, "num_kv_heads": 2},
        {"positions": "learned", "activation": "relu"},
        {"remat": "all"},
        {"remat": "attention"},
    ],
    ids=lambda change: "-".join(map(str, change.values())),
)
def test_variants_agree_with_one_device(change):
    model = dataclasses.replace(SMALL, **change)
    want = make_run(1, 1, model=model).steps(2)
    np.testing.assert_allclose(make_run(2, 2, model=model, overlap=OVERLAPPED).steps(2), want, rtol=3e-6)
    if "remat" in change:
        np.testing.assert_allclose(want, make_run(1, 1).steps(2), rtol=1e-6)


def test_micro_batches_are_weighted_by_their_tokens():
    want = make_run(1, 1, model=WITH_DROPOUT).steps(2)
    np.testing.assert_allclose(make_run(2, 2, model=WITH_DROPOUT, grad_accum=4).steps(2), want, rtol=3e-6)


def test_replicas_train_as_one():
    want = make_run(1, 1).steps(2)
    np.testing.assert_allclose(make_run(2, 2, replica=2, overlap=OVERLAPPED).steps(2), want, rtol=3e-6)


def test_bfloat16_compute_keeps_float32_weights_and_follows_float32():
    run = make_run(2, 2, model=dataclasses.replace(SMALL, compute_dtype="bfloat16"), overlap=OVERLAPPED)
    want = make_run(1, 1).steps(2)
    np.testing.assert_allclose(run.steps(2), want, rtol=TOLERANCES["bfloat16"])
    assert {leaf.dtype for leaf in jax.tree.leaves(run.state.params)} == {jnp.dtype("float32")}


def test_a_later_token_or_another_document_changes_nothing():
    run = make_run(2, 2)
    host = {k: v.copy() for k, v in batch(3).items()}
    host["segments"][:] = 1 + (np.arange(SMALL.seq_len) >= 8)
    host["mask"][:] = (np.arange(SMALL.seq_len) >= 8) & (np.arange(SMALL.seq_len) < 12)

    def nll(inputs):
        return float(run.eval_step(run.state.params, run.place({**host, "inputs": inputs}))["loss"][0])

    before = nll(host["inputs"])
    for places, same in ((slice(0, 8), True), (slice(12, 16), True), (slice(8, 9), False)):
        changed = host["inputs"].copy()
        changed[:, places] = (changed[:, places] + 1) % 256
        assert (nll(changed) == before) == same


def test_optimizer_moments_and_weights_are_sharded():
    run = make_run(4, 2)
    adam = run.state.opt_state[1][0]
    for moments in (run.state.params, adam.mu, adam.nu):
        up = moments["blocks"]["mlp"]["up_DF"]
        assert up.sharding.spec == P(None, "y", "x")
        assert up.addressable_shards[0].data.size == up.size // 8


@pytest.mark.parametrize("remat", ["none", "all", "attention"])
@pytest.mark.parametrize("gated", [False, True])
def test_flops_by_formula_and_in_the_program(remat, gated):  # C23
    model = dataclasses.replace(SMALL, remat=remat, gated=gated, num_kv_heads=2, num_layers=3)
    run = make_run(2, 2, model=model)
    in_program = count(jax.make_jaxpr(run.train_step)(run.state, batch(0)).jaxpr)
    flops = decoder_step(model, NUM_ROWS)
    # The plain program computes the masked half of the attention products too: twice forward, four times backward, and
    # again where it is recomputed.
    half = NUM_ROWS * model.seq_len * model.num_layers * model.seq_len * model.num_heads * model.head_dim
    recomputed = {"none": 0, "all": 2, "attention": 1}[remat]
    assert in_program == flops.hardware + half * (6 + recomputed)


def test_flops_by_hand():
    # 1 layer, 2 sequences of 4 tokens, D 8, F 16, 2 heads of 3 with 1 key head, vocabulary 10.
    model = dataclasses.replace(
        SMALL, num_layers=1, d_model=8, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=3, seq_len=4, vocab_size=10
    )
    per_token = 2 * 8 * (6 + 3 + 3) + 2 * 6 * 8 + 2 * 4 * 6 / 2 * 2 + 2 * 8 * 16 * 2  # qkv, out, scores + context, mlp
    assert decoder_step(model, 2).model == 3 * 8 * (per_token + 2 * 8 * 10)
    gated = dataclasses.replace(model, gated=True, remat="all")
    assert decoder_step(gated, 2).model == 3 * 8 * (per_token + 2 * 8 * 16 + 2 * 8 * 10)
    assert decoder_step(gated, 2).hardware - decoder_step(gated, 2).model == 8 * (per_token + 2 * 8 * 16 - 2 * 16 * 8)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("1B", 0.976),
        ("32B", 32.5),
        ("64B", 64.5),
        ("128B", 129.0),
        ("256B", 258.0),
        ("512B", 514.0),
        ("1024B", 1030.0),
        ("meena_500B", 507.0),
    ],
)
def test_published_sizes(name, billions):
    """12 L M^2 + V M + positions, of Meena L (4 M N H + 2 M F) + ..., from the real module, to three digits."""
    config = from_config_dict(gpt_config.get_config(name))
    described = state.describe(gpt.build(config.model, config.overlap))
    assert described.num_params() / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_product_between_shards_is_a_recorded_site():
    run = make_run(2, 2, overlap=OVERLAPPED)
    with record_sites() as sites:
        jax.make_jaxpr(run.train_step)(run.state, batch(0))
    names = {site.name for site in sites}
    forward = {"attention.qkv", "attention.out", "mlp.up", "mlp.down", "logits"}
    assert forward <= names
    assert all(any(n.startswith(f + ".") for n in names) for f in forward), names


def test_batch_without_a_counted_token_leaves_gradients_zero():
    run = make_run(2, 2)
    host = {**batch(0), "mask": np.zeros_like(batch(0)["mask"])}
    _, metrics = run.train_step(run.state, run.place(host))
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0


def test_batch_spec_names_every_axis_but_x():
    assert step.batch_spec(make_run(2, 2, replica=2).mesh) == P(("replica", "y"))
