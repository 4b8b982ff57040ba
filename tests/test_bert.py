"""The bidirectional encoder trains alike on every mesh, overlapped or not, and sees its own document only."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_harness import MESHES, NUM_ROWS, Family
from jax.sharding import PartitionSpec as P

from configs import bert as bert_config
from overlapfx.aot.products import count
from overlapfx.config import from_config_dict
from overlapfx.plan.flops import encoder_step
from overlapfx.train import state

SEQ_LEN, VOCAB_SIZE = 16, 264
MASK = 256


@functools.cache
def batch(seed: int) -> dict[str, np.ndarray]:
    """Random tokens of two documents in every row, of which a different number is hidden in each."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (NUM_ROWS, SEQ_LEN)).astype(np.int32)
    mask = rng.random((NUM_ROWS, SEQ_LEN)) < rng.uniform(0.1, 0.5, (NUM_ROWS, 1))
    cuts = rng.integers(1, SEQ_LEN, (NUM_ROWS, 1))
    return {
        "inputs": np.where(mask, MASK, tokens).astype(np.int32),
        "targets": tokens,
        "mask": mask.astype(np.float32),
        "segments": (1 + (np.arange(SEQ_LEN) >= cuts)).astype(np.int32),
    }


SIZES = {"d_model": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "d_ff": 48}
BERT = Family.of(bert_config.get_config("tiny"), {**SIZES, "seq_len": SEQ_LEN, "dropout": 0.1}, batch)
SMALL = BERT.config.model


@pytest.mark.parametrize(("y", "x"), MESHES, ids=lambda v: str(v))
def test_same_losses_on_every_mesh_overlapped_or_not(y, x):  # C25
    # A GPT's layers, which test_gpt.py takes through every mesh in stripes; they double what is compiled.
    BERT.assert_same_on(y, x, row_stripes=2 if y == 4 else 1)


def test_a_token_sees_both_ways_within_its_document():
    run = BERT.run(2, 2)
    host = {name: array.copy() for name, array in batch(3).items()}
    host["segments"][:] = 1 + (np.arange(SEQ_LEN) >= 8)
    host["mask"][:] = np.arange(SEQ_LEN) == 11

    def nll(inputs):
        return float(run.eval_step(run.state.params, run.place({**host, "inputs": inputs}))["loss"][0])

    before = nll(host["inputs"])
    for places, same in ((slice(0, 8), True), (slice(8, 9), False), (slice(15, 16), False)):
        changed = host["inputs"].copy()
        changed[:, places] = (changed[:, places] + 1) % 256
        assert (nll(changed) == before) == same


def test_accuracy_is_the_share_of_hidden_tokens_guessed():
    run = BERT.run(2, 4)
    host = batch(0)
    found = jax.tree.map(float, run.eval_step(run.state.params, run.place(host)))
    assert found["loss"][1] == found["accuracy"][1] == host["mask"].sum()
    logits = jax.jit(
        jax.shard_map(
            lambda params, tokens, segments: run.model.bind(params)(tokens, segments, jnp.arange(len(tokens))),
            mesh=run.mesh,
            in_specs=(run.model.layouts, P("y"), P("y")),
            out_specs=P("y", None, "x"),
        )
    )(run.state.params, host["inputs"], host["segments"])
    guessed = np.asarray(logits).argmax(-1)
    # A batch whose targets are the guesses at every other place.
    host = {**host, "targets": np.where(np.arange(SEQ_LEN) % 2, guessed, (guessed + 1) % 256).astype(np.int32)}
    right = (host["mask"] * (np.arange(SEQ_LEN) % 2)).sum()
    assert 0 < right < host["mask"].sum()
    assert float(run.eval_step(run.state.params, run.place(host))["accuracy"][0]) == right


@pytest.mark.parametrize("remat", ["none", "all"])
def test_flops_by_formula_and_in_the_program(remat):  # C23
    model = dataclasses.replace(SMALL, remat=remat, gated=remat == "none", num_kv_heads=2, dropout=0.0)
    run = BERT.run(2, 2, model=model)
    in_program = count(jax.make_jaxpr(run.train_step)(run.abstract_state, batch(0)).jaxpr)
    assert in_program == encoder_step(model, NUM_ROWS).hardware


def test_flops_by_hand():
    # 1 layer, 2 sequences of 4 tokens, D 8, F 16, 2 heads of 3 with 1 key head, vocabulary 10.
    model = dataclasses.replace(
        SMALL, num_layers=1, d_model=8, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=3, seq_len=4, vocab_size=10
    )
    per_token = 2 * 8 * (6 + 3 + 3) + 2 * 6 * 8 + 2 * 4 * 6 * 2 + 2 * 8 * 16 * 2  # qkv, out, scores + context, mlp
    assert encoder_step(model, 2).model == 3 * 8 * (per_token + 2 * 8 * 10)


def test_published_size():
    """66 layers of 4 M^2 + 2 M F, vocabulary and positions, from the real module, to three digits."""
    config = from_config_dict(bert_config.get_config("200B"))
    model = config.model
    described = state.describe(BERT.module.build(model, config.overlap))
    assert described.num_params() / 1e9 == pytest.approx(199.7, abs=0.05)
    assert (model.num_layers, model.d_model, model.d_ff, model.num_heads, model.head_dim) == (66, 12288, 98304, 128, 96)
    assert (model.activation, model.gated, model.seq_len, config.data.global_batch) == ("relu", False, 512, 4096)
    assert (config.mesh.y, config.mesh.x) == (64, 16)
