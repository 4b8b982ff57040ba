"""The encoder-decoder trains alike on every mesh, overlapped or not, and its decoder sees what it may."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from family_harness import MESHES, NUM_ROWS, Family

from configs import t5 as t5_config
from overlapfx.aot.products import count
from overlapfx.config import Overlap, from_config_dict
from overlapfx.layers.relative import bucket, by_distance
from overlapfx.plan.decide import record_sites
from overlapfx.plan.flops import encoder_decoder_step
from overlapfx.train import state

SEQ_LEN, TARGET_LEN, VOCAB_SIZE = 16, 8, 288


@functools.cache
def batch(seed: int) -> dict[str, np.ndarray]:
    """Random tokens; texts and targets of different lengths, one row all padding."""
    rng = np.random.default_rng(seed)
    text = np.arange(SEQ_LEN) < rng.integers(2, SEQ_LEN + 1, (NUM_ROWS, 1))
    counted = np.arange(TARGET_LEN) < rng.integers(1, TARGET_LEN + 1, (NUM_ROWS, 1))
    text[5], counted[5] = False, False
    return {
        "inputs": (rng.integers(1, VOCAB_SIZE, text.shape) * text).astype(np.int32),
        "targets": (rng.integers(1, VOCAB_SIZE, counted.shape) * counted).astype(np.int32),
        "mask": counted.astype(np.float32),
        "segments": text.astype(np.int32),
    }


SIZES = {"d_model": 32, "num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "d_ff": 48, "num_buckets": 8}
LENGTHS = {"seq_len": SEQ_LEN, "target_len": TARGET_LEN, "max_distance": 12}
T5 = Family.of(t5_config.get_config("tiny"), {**SIZES, **LENGTHS, "dropout": 0.1}, batch)
SMALL = T5.config.model


@pytest.mark.parametrize(("y", "x"), MESHES, ids=lambda v: str(v))
def test_same_losses_on_every_mesh_overlapped_or_not(y, x):  # C25
    T5.assert_same_on(y, x)


def test_xlas_partitioner_computes_the_same():  # the baseline of plans
    run = T5.run(2, 2, partitioning="xla")
    run.start_from(T5.reference.first)
    np.testing.assert_allclose(run.steps(1), T5.reference.losses[:1], rtol=3e-6)


def test_the_decoder_sees_the_text_and_earlier_targets_only():
    run = T5.run(2, 2)
    host = {name: array.copy() for name, array in batch(3).items()}
    host["segments"][:] = np.arange(SEQ_LEN) < 10
    host["mask"][:] = np.arange(TARGET_LEN) == 4

    def nll(name, places):
        changed = host[name].copy()
        changed[:, places] = (changed[:, places] + 1) % VOCAB_SIZE
        return float(run.eval_step(run.state.params, run.place({**host, name: changed}))["loss"][0])

    before = nll("inputs", slice(0))
    for name, places, same in (
        ("inputs", slice(0, 1), False),
        ("inputs", slice(9, 10), False),
        ("inputs", slice(10, SEQ_LEN), True),  # padding
        ("targets", slice(3, 4), False),
        ("targets", slice(5, TARGET_LEN), True),  # later
    ):
        assert (nll(name, places) == before) == same, (name, places)


def test_buckets_by_hand():
    # 8 buckets, two directions: 0, 1 and, up to 12, growth by sqrt(12 / 2): 2 to 4 and from 5 on.
    distance = np.arange(-7, 8)
    assert bucket(distance, 8, 12, causal=False).tolist() == [3, 3, 3, 2, 2, 2, 1, 0, 5, 6, 6, 6, 7, 7, 7]
    # One direction: 0 to 3 each, then growth by 3 ** (1 / 4) from 4 on: 4, 5, 6, 6, 7, ...
    distance = np.array([-100, -12, -10, -9, -8, -7, -6, -5, -4, -3, -1, 0, 1, 9])
    assert bucket(distance, 8, 12, causal=True).tolist() == [7, 7, 7, 6, 6, 6, 5, 4, 4, 3, 1, 0, 0, 0]


def test_a_bias_depends_on_distance():
    value = np.random.default_rng(0).normal(size=(2, 3 + 5 - 1)).astype(np.float32)
    got = np.asarray(by_distance(jax.numpy.asarray(value), 3))
    assert got.shape == (2, 3, 5)
    for t in range(3):
        for s in range(5):
            np.testing.assert_array_equal(got[:, t, s], value[:, s - t + 2])


def test_keys_and_values_of_the_text_share_one_gather():
    run = T5.run(2, 2, overlap=Overlap("on"))
    with record_sites() as sites:
        jax.make_jaxpr(run.train_step)(run.abstract_state, batch(0))
    by_name = {site.name: site for site in sites}
    for stack, parts in (("encoder", ("attention.qkv",)), ("decoder", ("attention.qkv", "cross.q", "cross.kv"))):
        for part in (*parts, "attention.out", "mlp.up", "mlp.down"):
            assert f"{stack}.{part}" in by_name
    assert len(by_name["decoder.cross.kv"].specs) == 2
    assert sum(slot.kind == "gather" and slot.label == "d" for slot in by_name["decoder.cross.kv"].slots) == 3


@pytest.mark.parametrize("remat", ["none", "all", "attention"])
def test_flops_by_formula_and_in_the_program(remat):  # C23
    model = dataclasses.replace(SMALL, remat=remat, num_kv_heads=2, num_layers=3, dropout=0.0)
    run = T5.run(2, 2, model=model)
    in_program = count(jax.make_jaxpr(run.train_step)(run.abstract_state, batch(0)).jaxpr)
    # The plain program computes the masked half of the decoder's self-attention too.
    half = NUM_ROWS * model.num_decoder_layers * TARGET_LEN**2 * model.num_heads * model.head_dim
    recomputed = {"none": 0, "all": 2, "attention": 1}[remat]
    assert in_program == encoder_decoder_step(model, NUM_ROWS).hardware + half * (6 + recomputed)


def test_flops_by_hand():
    # 1 + 1 layers, 1 sequence of 4 tokens and 2 targets, D 8, F 16 gated, 2 heads of 3 with 1 key head, vocabulary 10.
    sizes = {"num_layers": 1, "num_decoder_layers": 1, "d_model": 8, "d_ff": 16, "seq_len": 4, "target_len": 2}
    model = dataclasses.replace(SMALL, **sizes, num_heads=2, num_kv_heads=1, head_dim=3, vocab_size=10)
    mlp = 3 * 2 * 8 * 16
    encoder = 4 * (2 * 8 * (6 + 3 + 3) + 2 * 4 * 6 * 2 + 2 * 6 * 8 + mlp)
    self_attention = 2 * (2 * 8 * (6 + 3 + 3) + 2 * 2 * 6 / 2 * 2 + 2 * 6 * 8)
    cross_attention = 2 * 2 * 8 * 6 + 4 * 2 * 8 * (3 + 3) + 2 * (2 * 4 * 6 * 2) + 2 * 2 * 6 * 8
    decoder = self_attention + cross_attention + 2 * mlp
    assert encoder_decoder_step(model, 1).model == 3 * (encoder + decoder + 2 * 2 * 8 * 10)


def test_size():
    """64 x (4 M^2 + 3 M F) + 64 x (8 M^2 + 3 M F) + V M, from the real module, to three digits."""
    config = from_config_dict(t5_config.get_config("300B"))
    described = state.describe(T5.module.build(config.model, config.overlap))
    assert described.num_params() / 1e9 == pytest.approx(290, abs=0.5)
    assert T5.module.objective(config.model).text_len == 1138


def test_config_refuses_row_stripes():
    values = t5_config.get_config("tiny").to_dict()
    values["overlap"]["row_stripes"] = 2
    with pytest.raises(
        ValueError, match=r"^overlap.row_stripes is 2, but the layers of the family t5 take .*; use 1\.$"
    ):
        from_config_dict(values)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_buckets": 30}, "model.num_buckets is 30; it must be a multiple of 4, for two directions"),
        ({"max_distance": 16}, "model.max_distance is 16, but the nearest 16 distances (half of model.num_buckets)"),
        ({"positions": "rotary"}, "model.positions is 'rotary'; it must be one of relative."),
    ],
)
def test_config_refuses(change, sentence):
    values = t5_config.get_config("tiny").to_dict()
    values["model"].update(change)
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*$"):
        from_config_dict(values)
