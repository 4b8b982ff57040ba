"""The mixture of experts trains alike on every mesh, overlapped or not, and counts what it uses."""

from __future__ import annotations

import dataclasses
import functools
import io
import re

import jax
import numpy as np
import pytest
from family_harness import MESHES, NUM_ROWS, Family

from configs import moe as moe_config
from overlapfx.aot.products import count
from overlapfx.config import Overlap, from_config_dict
from overlapfx.layers.moe import capacity
from overlapfx.plan.decide import record_sites
from overlapfx.plan.flops import mixture_step
from overlapfx.train import state
from overlapfx.train.console import Console

SEQ_LEN = 16


@functools.cache
def batch(seed: int) -> dict[str, np.ndarray]:
    """Random tokens of two documents in every row, then padding; one row is all padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (NUM_ROWS, SEQ_LEN + 1)).astype(np.int32)
    lengths, cuts = rng.integers(4, SEQ_LEN + 1, (NUM_ROWS, 1)), rng.integers(1, 4, (NUM_ROWS, 1))
    lengths[5] = 0
    place = np.arange(SEQ_LEN)
    text = place < lengths
    return {
        "inputs": tokens[:, :-1] * text,
        "targets": tokens[:, 1:] * text,
        "mask": text.astype(np.float32),
        "segments": (text * (1 + (place >= cuts))).astype(np.int32),
    }


SIZES = {"d_model": 32, "num_layers": 4, "num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "d_ff": 48}
MOE = Family.of(moe_config.get_config("tiny"), {**SIZES, "seq_len": SEQ_LEN, "dropout": 0.1}, batch)
SMALL = MOE.config.model


@pytest.mark.slow
@pytest.mark.parametrize(("y", "x"), MESHES, ids=lambda v: str(v))
def test_same_losses_on_every_mesh_overlapped_or_not(y, x):  # C25
    MOE.assert_same_on(y, x, row_stripes=2 if y == 4 else 1)  # stripes double what is compiled


def test_xlas_partitioner_computes_the_same():  # the baseline of plans
    run = MOE.run(2, 2, partitioning="xla")
    run.start_from(MOE.reference.first)
    np.testing.assert_allclose(run.steps(1), MOE.reference.losses[:1], rtol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["all", "attention"])
def test_micro_batches_and_replicas_train_as_one_recomputed_or_not(remat):
    run = MOE.run(2, 2, model=dataclasses.replace(SMALL, remat=remat), replica=2, grad_accum=2)
    run.start_from(MOE.reference.first)
    np.testing.assert_allclose(run.steps(2), MOE.reference.losses[:2], rtol=3e-6)


def test_a_later_token_changes_nothing():
    """Though it may find no place with its experts because of earlier ones."""
    run = MOE.run(2, 2, model=dataclasses.replace(SMALL, capacity_factor=0.5))
    host = {name: array.copy() for name, array in batch(3).items()}
    host["segments"][:], host["mask"][:] = 1, np.arange(SEQ_LEN) < 12

    def evaluate(inputs):
        return jax.tree.map(float, run.eval_step(run.state.params, run.place({**host, "inputs": inputs})))

    before = evaluate(host["inputs"])
    assert before["dropped_tokens"][0] > 0.3 * before["dropped_tokens"][1]
    for places, same in ((slice(12, SEQ_LEN), True), (slice(11, 12), False)):
        changed = host["inputs"].copy()
        changed[:, places] = (changed[:, places] + 1) % 256
        assert (evaluate(changed)["loss"] == before["loss"]) == same


@pytest.mark.slow
def test_a_step_tells_what_was_dropped_and_auxiliary_losses_are_in_the_gradient_only():
    still, heavy = dataclasses.replace(SMALL, dropout=0.0), {"balance_weight": 1.0, "router_z_weight": 0.1}
    runs = [MOE.run(2, 2, model=model) for model in (still, dataclasses.replace(still, **heavy))]
    few, many = ({k: v for k, v in r.train_step(r.state, r.place(batch(0)))[1].items() if v.ndim == 0} for r in runs)
    for name in ("loss", "dropped_tokens", "balance_loss", "router_z_loss"):
        assert float(few[name]) == pytest.approx(float(many[name]), rel=1e-6)
    assert float(many["grad_norm"]) > 1.05 * float(few["grad_norm"])
    assert 0 < few["dropped_tokens"] < 0.3
    assert few["balance_loss"] >= 1 - 1e-6 and few["router_z_loss"] > 0


def test_the_line_of_a_step_shows_what_was_dropped():
    shown = io.StringIO()
    names = ("loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "model_tflops_per_device")
    values = dict.fromkeys(names, 1.0) | {"mfu_percent": None, "hfu_percent": None, "dropped_tokens": 0.0345}
    Console(1, file=shown).step(1, values)
    assert "  dropped 3.5 %  1 TFLOP/s/device" in shown.getvalue()


def test_every_product_between_shards_is_a_recorded_site():
    run = MOE.run(2, 2, overlap=Overlap("on", row_stripes=2))
    with record_sites() as sites:
        jax.make_jaxpr(run.train_step)(run.abstract_state, batch(0))
    names = {site.name for site in sites}
    forward = {"attention.qkv", "attention.out"}
    wanted = {f"{where}.{part}" for where in ("dense", "mixture") for part in forward}
    wanted |= {"dense.mlp.up", "dense.mlp.down", "experts.up", "experts.down", "logits"}
    assert wanted <= names
    assert all(any(name.startswith(f"{one}.") for name in names) for one in wanted), names  # the backward pass


@pytest.mark.parametrize(
    ("remat", "gated_experts", "factor"), [("none", True, 1.25), ("all", False, 1.0), ("attention", False, 1.25)]
)
def test_flops_by_formula_and_in_the_program(remat, gated_experts, factor):  # C23
    changes = {"gated_experts": gated_experts, "capacity_factor": factor, "num_kv_heads": 2, "dropout": 0.0}
    model = dataclasses.replace(SMALL, remat=remat, **changes)
    run = MOE.run(2, 2, model=model)
    in_program = count(jax.make_jaxpr(run.train_step)(run.abstract_state, batch(0)).jaxpr)
    # The plain program computes the masked half of attention and the experts' empty places too: 8 experts with 5 places
    # for 16 x 2 choices, none of them empty with the factor 1.
    recomputed = {"none": 0, "all": 2, "attention": 1}[remat]
    half = NUM_ROWS * model.num_layers * SEQ_LEN**2 * model.num_heads * model.head_dim
    empty = NUM_ROWS * {1.0: 0, 1.25: 8 * 5 - 16 * 2}[factor] * model.num_layers // 2
    product = 2 * empty * model.d_model * model.d_ff
    widening = 2 if gated_experts else 1
    more = half * (6 + recomputed) + product * (3 * (widening + 1) + widening * (remat != "none"))
    assert in_program == mixture_step(model, NUM_ROWS).hardware + more


def test_flops_by_hand():
    # 1 dense and 1 mixture layer, 2 sequences of 4 tokens, D 8, F 16, dense gated, 4 experts of which each token uses
    # 3, 2 heads of 3 with 1 key head, vocabulary 10.
    sizes = {"num_layers": 2, "d_model": 8, "d_ff": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 3}
    model = dataclasses.replace(
        SMALL, **sizes, seq_len=4, vocab_size=10, gated=True, gated_experts=False, num_experts=4, experts_per_token=3
    )
    attention = 2 * 8 * (6 + 3 + 3) + 2 * 6 * 8 + 2 * 4 * 6 / 2 * 2  # qkv, out, scores + context
    mixture = 2 * 8 * 4 + 3 * 2 * (2 * 8 * 16)  # the router, three experts of two products
    per_token = attention + 3 * (2 * 8 * 16) + attention + mixture + 2 * 8 * 10
    assert mixture_step(model, 2).model == 3 * 8 * per_token


def test_published_size():
    """32 (4 M N H + 3 M F) dense, 32 (4 M N H + 64 x 2 M F) mixtures, V M, from the real module, to three digits."""
    config = from_config_dict(moe_config.get_config("1T"))
    model = config.model
    described = state.describe(MOE.module.build(model, config.overlap))
    assert described.num_params() / 1e12 == pytest.approx(1.16, abs=0.005)
    unused = (model.num_experts - model.experts_per_token) * 2 * model.d_model * model.d_ff * model.num_layers / 2
    assert (described.num_params() - unused) / 1e9 == pytest.approx(96.6, abs=0.05)
    sizes = (model.num_layers, model.d_model, model.d_ff, model.num_heads, model.head_dim)
    assert sizes == (64, 8192, 32768, 128, 128)
    assert (model.num_experts, model.experts_per_token, model.seq_len) == (64, 2, 1024)
    assert config.mesh.num_devices == 1024
    # Utilization counts what is active: 6 FLOPs for each of these parameters (a few are not multiplied: positions, the
    # norms), and the products of attention, which have none.
    attention = 3 * 2 * model.num_layers * model.num_heads * model.head_dim * model.seq_len
    per_token = mixture_step(model, 1).model / model.seq_len - attention
    assert per_token / 6e9 == pytest.approx(96.6, abs=0.05)


def test_places_of_an_expert():
    assert capacity(1024, 64, 2, 1.25) == 40
    assert capacity(10, 8, 2, 1.0) == 3  # rounded up
    assert capacity(16, 2, 2, 2.0) == 16  # no expert gets a token twice


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_layers": 3}, "model.num_layers is 3; it must be even, since dense and mixture layers take turns."),
        ({"experts_per_token": 9}, "model.experts_per_token is 9, more than model.num_experts = 8; use at most that."),
        ({"num_experts": 6}, "model.num_experts is 6, which does not divide over mesh axis y of size 4; the nearest"),
        ({"capacity_factor": 0}, "model.capacity_factor is 0; it must be above 0."),
        ({"balance_weight": -1.0}, "model.balance_weight is -1.0; it must be at least 0."),
    ],
)
def test_config_refuses(change, sentence):
    values = moe_config.get_config("tiny").to_dict()
    values["model"].update(change)
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*$"):
        from_config_dict(values)
