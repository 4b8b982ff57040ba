"""The speech encoder trains alike on every mesh, overlapped or not, and hears its own clip only."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_harness import MESHES, NUM_ROWS, Family
from jax.sharding import PartitionSpec as P

from configs import conformer as conformer_config
from models.conformer import objective
from overlapfx.aot.products import count
from overlapfx.config import Overlap, from_config_dict
from overlapfx.layers import ctc
from overlapfx.layers.logmel import log_mel
from overlapfx.layers.quantizer import nearest_codes
from overlapfx.plan.flops import speech_step
from overlapfx.train import synthesis
from overlapfx.train.speech import HiddenSpeech, Transcription

SEQ_LEN, TARGET_LEN, HOP = 16, 4, 32
CLIP_LEN = 4 * SEQ_LEN * HOP


@functools.cache
def clips(seed: int) -> dict[str, np.ndarray]:
    """Noises of different lengths, one row empty."""
    rng = np.random.default_rng(seed)
    length = rng.integers(CLIP_LEN // 2, CLIP_LEN + 1, NUM_ROWS).astype(np.int32)
    length[5] = 0
    loudness = 1 + np.sin(np.arange(CLIP_LEN) * rng.uniform(0.002, 0.02, (NUM_ROWS, 1)))
    samples = rng.normal(size=(NUM_ROWS, CLIP_LEN)) * 2000 * loudness * (np.arange(CLIP_LEN) < length[:, None])
    return {"samples": np.round(samples).astype(np.int16), "length": length}


@functools.cache
def transcribed(seed: int) -> dict[str, np.ndarray]:
    """Labels of different numbers, none for the empty row."""
    rng = np.random.default_rng(seed)
    mask = np.arange(TARGET_LEN) < rng.integers(1, TARGET_LEN + 1, (NUM_ROWS, 1))
    mask[5] = False
    labels = rng.integers(1, 12, mask.shape) * mask
    return {**clips(seed), "labels": labels.astype(np.int32), "mask": mask.astype(np.float32)}


@functools.cache
def hidden(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    speech = np.arange(SEQ_LEN) * 4 * HOP < clips(seed)["length"][:, None]
    mask = speech & (rng.random((NUM_ROWS, SEQ_LEN)) < rng.uniform(0.1, 0.6, (NUM_ROWS, 1)))
    return {**clips(seed), "mask": mask.astype(np.float32)}


SIZES = {"d_model": 32, "num_layers": 2, "num_heads": 8, "num_kv_heads": 8, "head_dim": 4, "d_ff": 48}
SPEECH = {"window": 80, "hop": HOP, "num_mels": 8, "conv_channels": 16, "kernel_size": 3}
LENGTHS = {"seq_len": SEQ_LEN, "target_len": TARGET_LEN, "num_buckets": 8, "max_distance": 12}
SMALL_SIZES = {**SIZES, **SPEECH, **LENGTHS, "dropout": 0.1}
CTC = Family.of(conformer_config.get_config("tiny"), SMALL_SIZES, transcribed)
MASKED = Family.of(
    conformer_config.get_config("tiny"), {**SMALL_SIZES, "objective": "masked", "vocab_size": 32}, hidden
)
SMALL = CTC.config.model


@pytest.mark.slow
@pytest.mark.parametrize(("y", "x"), MESHES, ids=lambda v: str(v))
def test_same_losses_on_every_mesh_overlapped_or_not(y, x):  # C25
    CTC.assert_same_on(y, x, row_stripes=2 if y == 4 else 1)  # stripes double what is compiled


@functools.cache
def hidden_reference():
    """The first state, and its loss on one device."""
    run = MASKED.run(1, 1)
    return run.state, run.eval_loss()


@pytest.mark.parametrize(("y", "x"), MESHES, ids=lambda v: str(v))
def test_same_loss_of_hidden_speech_on_every_mesh(y, x):
    """The layers are the same ones, so a forward pass will do, overlapped or not in turn."""
    run = MASKED.run(y, x, overlap=Overlap("on" if x % 4 else "off"))
    first, want = hidden_reference()
    run.start_from(first)
    np.testing.assert_allclose(run.eval_loss(), want, rtol=3e-6)


def test_xlas_partitioner_computes_the_same():  # the baseline of plans
    run = CTC.run(2, 2, partitioning="xla")
    run.start_from(CTC.reference.first)
    np.testing.assert_allclose(run.steps(1), CTC.reference.losses[:1], rtol=3e-6)


def test_a_clip_hears_itself_only_and_nothing_after_its_end():
    run = CTC.run(2, 2)
    host = {name: array.copy() for name, array in transcribed(3).items()}
    host["length"][0] = length = 1000
    host["mask"][1:] = 0

    def nll(samples):
        return float(run.eval_step(run.state.params, run.place({**host, "samples": samples}))["loss"][0])

    before = nll(host["samples"])
    token_end = -(-length // (4 * HOP)) * 4 * HOP
    for rows, places, same in (
        (0, slice(0, 100), False),
        (0, slice(length - 50, length), False),
        # A frame that begins in the clip sees a window's rest beyond its end, which real clips fill with zeros.
        (0, slice(token_end + SMALL.window, CLIP_LEN), True),
        (slice(1, NUM_ROWS), slice(0, CLIP_LEN), True),
    ):
        changed = host["samples"].copy()
        changed[rows, places] = changed[rows, places] // 2 + 400
        assert (nll(changed) == before) == same, (rows, places)


def test_label_error_is_edits_by_labels():
    run = CTC.run(2, 4)
    host = transcribed(0)
    found = jax.tree.map(float, run.eval_step(run.state.params, run.place(host)))
    assert found["loss"][1] == found["label_error"][1] == host["mask"].sum()

    def logits(params, batch):
        model = run.model.bind(params)
        return model(*model.hear(batch["samples"], batch["length"]), jnp.arange(len(batch["length"])))

    fn = jax.shard_map(logits, mesh=run.mesh, in_specs=(run.model.layouts, P("y")), out_specs=P("y", None, "x"))
    best = np.asarray(jax.jit(fn)(run.state.params, host)).argmax(-1)
    edits, transcripts = 0, []
    for b in range(NUM_ROWS):
        best_T = best[b, : -(-host["length"][b] // (4 * HOP))]
        heard = [int(a) for t, a in enumerate(best_T) if a != 0 and (t == 0 or best_T[t - 1] != a)]
        right = host["labels"][b][host["mask"][b] > 0].tolist()
        transcripts.append(heard)
        edits += plain_distance(heard, right) if right else 0
    assert edits > 0 and any(transcripts)
    assert found["label_error"][0] == edits


def plain_distance(a: list[int], b: list[int]) -> int:
    if not a or not b:
        return len(a) + len(b)
    return min(
        plain_distance(a[1:], b) + 1, plain_distance(a, b[1:]) + 1, plain_distance(a[1:], b[1:]) + (a[0] != b[0])
    )


def test_hidden_features_are_not_seen():
    """What is under the mask changes the targets, never the logits."""
    run = MASKED.run(2, 2)
    host = {name: array.copy() for name, array in hidden(1).items()}
    host["length"][:] = CLIP_LEN
    host["mask"][:] = np.arange(SEQ_LEN) >= 8

    def tell(params, batch, features):
        model = run.model.bind(params)
        model.hear = lambda samples, length: (features, jnp.ones((len(length), SEQ_LEN), jnp.int32))
        return model._tell(batch, jnp.arange(len(features)), None)

    specs = (run.model.layouts, P("y"), P("y"))
    fn = jax.jit(jax.shard_map(tell, mesh=run.mesh, in_specs=specs, out_specs=(P("y", None, "x"), P("y"))))
    features = np.random.default_rng(0).normal(size=(NUM_ROWS, 4 * SEQ_LEN, SMALL.num_mels)).astype(np.float32)
    changed = features.copy()
    changed[:, 32:] += 3 * np.random.default_rng(1).normal(size=changed[:, 32:].shape)
    (logits, codes), (logits_again, codes_again) = (fn(run.state.params, host, f) for f in (features, changed))
    np.testing.assert_array_equal(logits, logits_again)
    np.testing.assert_array_equal(codes[:, :8], codes_again[:, :8])
    assert (np.asarray(codes)[:, 8:] != np.asarray(codes_again)[:, 8:]).mean() > 0.5


@pytest.mark.slow
def test_hidden_speech_is_learned():
    """On synthetic speech the loss falls below that of guessing, ln 32 = 3.47."""
    hides = HiddenSpeech(synthesis.SAMPLE_RATE, synthesis.MAX_SAMPLES, 32)
    spoken = [synthesis.clip("train", n).samples for n in range(64)]

    def batch(seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        rows = [{"samples": spoken[i], "text": np.zeros(0, np.uint8)} for i in rng.choice(64, NUM_ROWS, replace=False)]
        examples = [hides.example(row, rng) for row in rows]
        return {name: np.stack([example[name] for example in examples]) for name in hides.fields}

    sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    settings = {"objective": "masked", "vocab_size": 32, "conv_channels": 32}
    family = Family.of(conformer_config.get_config("tiny"), {**sizes, **settings}, batch)
    losses = family.run(1, 1).steps(80)
    assert losses[0] > 3.4
    assert np.mean(losses[-10:]) < 3.15  # measured: 3.0


def uncounted(model, x: int) -> int:
    """FLOPs of dots that no formula counts, on every device along x: features, targets, the loss of transcripts."""
    settings = {name: getattr(model, name) for name in ("sample_rate", "window", "hop", "num_mels")}
    samples = jnp.zeros((NUM_ROWS, model.clip_len), jnp.int16)
    dots = x * count(jax.make_jaxpr(functools.partial(log_mel, **settings))(samples).jaxpr)
    if model.objective == "masked":
        stacked = jnp.zeros((NUM_ROWS, model.seq_len, 4 * model.num_mels))
        codes = functools.partial(nearest_codes, num_codes=model.vocab_size // x, code_dim=model.code_dim)
        alone = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
        fn = jax.shard_map(codes, mesh=alone, in_specs=P(), out_specs=P())
        return dots + x * count(jax.make_jaxpr(fn)(stacked).jaxpr)
    speech, mask = jnp.ones((NUM_ROWS, model.seq_len), bool), jnp.ones((NUM_ROWS, model.target_len))

    def loss(logits):
        return jnp.sum(ctc.negative_log_likelihood(logits, speech, mask.astype(jnp.int32), mask))

    logits = jnp.zeros((NUM_ROWS, model.seq_len, model.vocab_size))
    return dots + x * count(jax.make_jaxpr(jax.grad(loss))(logits).jaxpr)


@pytest.mark.parametrize("remat", ["none", "all", "attention"])
@pytest.mark.parametrize("family", [CTC, MASKED], ids=["ctc", "masked"])
def test_flops_by_formula_and_in_the_program(family, remat):  # C23
    changes = {"remat": remat, "gated": remat == "none", "num_kv_heads": 2, "dropout": 0.0}
    model = dataclasses.replace(family.config.model, **changes)
    run = family.run(2, 2, model=model)
    in_program = count(jax.make_jaxpr(run.train_step)(run.abstract_state, family.batch(0)).jaxpr)
    assert in_program == speech_step(model, NUM_ROWS).hardware + uncounted(model, x=2)


def test_flops_by_hand():
    # 1 layer, 1 clip of 4 tokens (16 frames of 3 bands), D 8, F 16, 2 heads of 3 with 1 key head, vocabulary 10.
    sizes = {"num_layers": 1, "d_model": 8, "d_ff": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 3}
    model = dataclasses.replace(SMALL, **sizes, seq_len=4, num_mels=3, conv_channels=6, vocab_size=12)
    attention = 2 * 8 * (6 + 3 + 3) + 2 * 6 * 8 + 2 * 4 * 6 * 2
    convolution = 2 * 8 * 16 + 2 * 8 * 8  # value and gate, then back
    layer = 2 * (2 * 2 * 8 * 16) + attention + convolution
    first, second = 8 * 2 * 9 * 6, 4 * 2 * 18 * 8  # 8 places of 3 x 3 numbers, 4 of 3 x 6
    assert speech_step(model, 1).model == 3 * 4 * (layer + 2 * 8 * 12) + 2 * first + 3 * second


def test_size():
    """48 x (4 M F + 4 M^2 + 3 M^2) and little else, from the real module, to three digits."""
    from overlapfx.train import state

    config = from_config_dict(conformer_config.get_config("10B"))
    model = config.model
    described = state.describe(MASKED.module.build(model, config.overlap))
    assert described.num_params() / 1e9 == pytest.approx(10.4, abs=0.05)
    assert (model.num_layers, model.d_model, model.d_ff) == (48, 3072, 12288)
    assert config.mesh.y * config.mesh.x == 128
    assert model.clip_len / model.sample_rate == pytest.approx(20.48)


def test_config_chooses_the_objective():
    tiny, large = (from_config_dict(conformer_config.get_config(name)).model for name in ("tiny", "10B"))
    assert objective(tiny) == Transcription(8000, 8192, 32, synthesis.ALPHABET, 8)
    assert tiny.sample_rate == synthesis.SAMPLE_RATE and tiny.clip_len == synthesis.MAX_SAMPLES
    assert objective(large) == HiddenSpeech(16000, 327680, 512)
    from_config_dict({**conformer_config.get_config("10B").to_dict(), "model": {**vars(large), "objective": "ctc"}})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"objective": "words"}, "model.objective is 'words'; it must be one of ctc, masked."),
        ({"kernel_size": 4}, "model.kernel_size is 4; it must be odd, so that a convolution has a middle."),
        ({"alphabet": "aba"}, "model.alphabet is 'aba'; give every character of the transcripts once."),
        ({"alphabet": ""}, "model.alphabet is ''; give every character of the transcripts once."),
        ({"vocab_size": 8}, "model.vocab_size is 8, but there are 11 characters in model.alphabet and a blank; use at"),
        ({"target_len": 33}, "model.target_len is 33, but a token says one label at most and model.seq_len is 32; use"),
        ({"num_buckets": 30}, "model.num_buckets is 30; it must be a multiple of 4, for two directions"),
        ({"conv_channels": 62}, "model.conv_channels is 62, which does not divide over mesh axis y of size 4; the"),
        ({"positions": "rotary"}, "model.positions is 'rotary'; it must be one of relative."),
    ],
)
def test_config_refuses(change, sentence):
    values = conformer_config.get_config("tiny").to_dict()
    values["model"].update(change)
    with pytest.raises(ValueError, match=rf"^{re.escape(sentence)}[^\n]*$"):
        from_config_dict(values)
