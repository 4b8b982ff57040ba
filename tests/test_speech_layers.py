"""The layers of the speech encoder do what plain loops do, forward and backward, on shards as on whole arrays."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from overlapfx.config import Overlap
from overlapfx.layers import ctc, param
from overlapfx.layers.attention import Attention
from overlapfx.layers.conv import Convolution, Subsampling, depthwise
from overlapfx.layers.logmel import FLOOR, log_mel, mel_bands, normalize
from overlapfx.layers.quantizer import nearest_codes, random_codes
from overlapfx.layers.relative import RelativeBias, bucket

ACTIVATION = jax.nn.silu


def mesh(y: int, x: int):
    return jax.make_mesh((y, x), ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: y * x])


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def value_and_gradients(module: nnx.Module, call, y: int, x: int, inputs: np.ndarray, weight: np.ndarray, out_spec: P):
    """call(module, inputs) on shards, and gradients of its sum with `weight` in the parameters and the inputs."""
    graph, state = nnx.split(module)
    layouts = param.layouts(module)
    in_spec = P("y", None, "x") if inputs.shape[-1] % x == 0 and out_spec == P("y", None, "x") else P("y")

    def local(params, inputs, weight):
        def total(params, inputs):
            filled = jax.tree.map(lambda leaf: leaf, state)
            nnx.replace_by_pure_dict(filled, params)
            out = call(nnx.merge(graph, filled), inputs)
            return jax.lax.psum(jnp.sum(out * weight), ("y", "x")), out

        (_, out), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, inputs)
        return out, *grads

    specs = (layouts, in_spec, out_spec)
    fn = jax.shard_map(local, mesh=mesh(y, x), in_specs=specs, out_specs=(out_spec, layouts, in_spec))
    return jax.jit(fn)(nnx.to_pure_dict(state), inputs, weight)


def check(module: nnx.Module, call, plain, inputs: np.ndarray, out_shape: tuple[int, ...], meshes, in_features: bool):
    """The module against plain(params, inputs) of whole arrays, with all gradients."""
    weight = normal(99, *out_shape)
    params = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    want, pullback = jax.vjp(plain, params, jnp.asarray(inputs))
    want_grads = pullback(jnp.asarray(weight))
    for y, x in meshes:
        got, *got_grads = value_and_gradients(module, call, y, x, inputs, weight, P("y", None, "x"))
        assert_close(got, want, where=f"({y}, {x})")
        if not in_features:
            got_grads, want_grads = got_grads[:1], want_grads[:1]
        jax.tree.map(functools.partial(assert_close, where=f"gradient ({y}, {x})"), tuple(got_grads), tuple(want_grads))


# Features.


def samples(seed: int, batch: int, length: int) -> np.ndarray:
    return np.round(normal(seed, batch, length) * 3000).astype(np.int16)


@pytest.mark.parametrize(("window", "hop"), [(256, 64), (200, 80), (50, 64)])
def test_log_mel_is_that_of_an_fft(window, hop):
    wave = samples(1, 2, 10 * hop)
    got = jax.jit(functools.partial(log_mel, sample_rate=8000, window=window, hop=hop, num_mels=12))(wave)
    size = {256: 256, 200: 256, 50: 64}[window]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)
    bands = mel_bands(8000, size, 12).astype(np.float64)
    assert got.shape == (2, 10, 12)
    for b in range(2):
        padded = np.concatenate([wave[b] / 32768, np.zeros(window)])
        for f in range(10):
            spectrum = np.fft.rfft(padded[f * hop : f * hop + window] * hann, size)
            np.testing.assert_allclose(got[b, f], np.log(np.abs(spectrum) ** 2 @ bands + FLOOR), rtol=1e-4, atol=1e-4)


def test_mel_bands_by_hand():
    # 8 kHz: 4000 Hz are 2146.06 mel, so 3 bands have edges at 0, 536.5, 1073.0, 1609.5 and 2146.06 mel.
    bands = mel_bands(8000, 4000, 3)  # a frequency every 2 Hz
    edges = [0.0, 426.9, 1114.2, 2220.6, 4001.6]
    for m in range(3):
        assert 2 * bands[:, m].argmax() == pytest.approx(edges[m + 1], rel=3e-3)
        heard = 2 * np.flatnonzero(bands[:, m])
        assert heard[[0, -1]] == pytest.approx([edges[m], edges[m + 2]], rel=3e-3, abs=4)
    middle = bands[250:1100].sum(axis=1)  # between the first centre and the last one triangles add up to 1
    np.testing.assert_allclose(middle, 1, atol=1e-6)


def test_normalized_features_have_mean_0_and_variance_1_where_counted():
    features = normal(2, 3, 20, 5) * 4 + 7
    counted = np.arange(20) < np.array([[20], [7], [0]])
    got = np.asarray(normalize(jnp.asarray(features), jnp.asarray(counted)))
    for b, length in enumerate((20, 7)):
        np.testing.assert_allclose(got[b, :length].mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(got[b, :length].std(axis=0), 1, atol=1e-4)
        assert not got[b, length:].any()
    assert not got[2].any()


# Convolutions.


def test_depthwise_by_loops():
    x, taps = normal(3, 2, 6, 4), normal(4, 5, 4)
    want = np.zeros((2, 6, 4))
    for t in range(6):
        for k in range(5):
            if 0 <= t + k - 2 < 6:
                want[:, t] += x[:, t + k - 2] * taps[k]
    np.testing.assert_allclose(depthwise(jnp.asarray(x), jnp.asarray(taps)), want, rtol=1e-5, atol=1e-6)
    assert depthwise(jnp.asarray(x, jnp.bfloat16), jnp.asarray(taps)).dtype == jnp.bfloat16


def test_depthwise_gradients_by_loops():
    x, taps, dy = normal(3, 2, 6, 4), normal(4, 5, 4), normal(5, 2, 6, 4)
    dx, dtaps = np.zeros((2, 6, 4)), np.zeros((5, 4))
    for t in range(6):
        for k in range(5):
            if 0 <= t + k - 2 < 6:
                dx[:, t + k - 2] += dy[:, t] * taps[k]
                dtaps[k] += (dy[:, t] * x[:, t + k - 2]).sum(axis=0)
    got = jax.vjp(depthwise, jnp.asarray(x), jnp.asarray(taps))[1](jnp.asarray(dy))
    np.testing.assert_allclose(got[0], dx, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], dtaps, rtol=1e-5, atol=1e-5)


def plain_convolution(is_speech):
    def run(params, x):
        gated = (x @ params["value_DC"]) * jax.nn.sigmoid(x @ params["gate_DC"]) * is_speech[..., None]
        taps = params["taps_KC"]
        rows = []
        for t in range(x.shape[1]):
            near = [k for k in range(len(taps)) if 0 <= t + k - len(taps) // 2 < x.shape[1]]
            rows.append(sum(gated[:, t + k - len(taps) // 2] * taps[k] for k in near))
        h = jnp.stack(rows, axis=1)
        h = h / jnp.sqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6) * params["norm"]["scale_D"]
        return ACTIVATION(h) @ params["out_CD"]

    return run


def test_convolution_of_a_layer_by_loops():
    settings = {"activation": "silu", "out_std": 0.5, "compute_dtype": jnp.float32, "overlap": Overlap("on")}
    module = Convolution(d_model=16, kernel_size=3, rngs=nnx.Rngs(0), **settings)
    is_speech = np.arange(6) < np.array([[6], [4], [5], [1]])

    def call(module, x):
        first = jax.lax.axis_index("y") * x.shape[0]
        here = jax.lax.dynamic_slice_in_dim(jnp.asarray(is_speech), first, x.shape[0])
        return module.stripes([x], [here])[0]

    check(module, call, plain_convolution(is_speech), normal(6, 4, 6, 16), (4, 6, 16), [(1, 1), (2, 4)], True)


def plain_subsampling(params, frames):
    def convolve(x, taps):
        padded = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))
        places = [sum(padded[:, 2 * s + k] @ taps[k] for k in range(3)) for s in range(x.shape[1] // 2)]
        return ACTIVATION(jnp.stack(places, axis=1))

    return convolve(convolve(frames, params["first_KMC"]), params["second_KCD"])


def test_subsampling_by_loops():
    settings = {"activation": "silu", "compute_dtype": jnp.float32, "overlap": Overlap("on")}
    module = Subsampling(num_mels=5, channels=8, d_model=16, rngs=nnx.Rngs(0), **settings)

    def call(module, frames):
        return module(frames)

    check(module, call, plain_subsampling, normal(7, 4, 12, 5), (4, 3, 16), [(1, 1), (2, 4)], False)


# Attention with a bias by distance.


class Relative(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        sizes = {"d_model": 16, "num_heads": 4, "num_kv_heads": 4, "head_dim": 4, "rotary": False, "causal": False}
        settings = {"out_std": 1.0, "compute_dtype": jnp.float32, "overlap": Overlap("on")}
        self.attention = Attention(**sizes, **settings, rngs=rngs)
        self.bias = RelativeBias(num_heads=4, num_buckets=8, max_distance=12, causal=False, rngs=rngs)


def plain_attention(segments):
    def run(params, x):
        own, table = params["attention"], params["bias"]["table_RN"]
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, own[name]) for name in ("query_DNH", "key_DKH", "value_DKH"))
        outs = []
        for b in range(x.shape[0]):
            for t in range(x.shape[1]):
                seen = [s for s in range(x.shape[1]) if segments[b, s] == segments[b, t]]
                row = 0.0
                for n in range(4):
                    scores = jnp.stack(
                        [
                            q[b, t, n] @ k[b, s, n] / 2 + table[int(bucket(np.array([s - t]), 8, 12, False)[0]), n]
                            for s in seen
                        ]
                    )
                    weights = jnp.exp(scores - scores.max())
                    row = row + (weights @ v[b, jnp.array(seen), n] / weights.sum()) @ own["out_NHD"][n]
                outs.append(row)
        return jnp.stack(outs).reshape(x.shape)

    return run


def test_relative_attention_by_loops():
    segments = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)

    def call(module, x):
        first = jax.lax.axis_index("y") * x.shape[0]
        here = jax.lax.dynamic_slice_in_dim(jnp.asarray(segments), first, x.shape[0])
        return module.attention(x, here, module.bias(5, 5))

    check(Relative(), call, plain_attention(segments), normal(8, 2, 5, 16), (2, 5, 16), [(1, 1), (2, 4)], True)


# Targets without transcripts.


@pytest.mark.parametrize("x", [1, 4])
def test_nearest_code_by_brute_force(x):
    features = normal(9, 2, 50, 12)
    fn = jax.shard_map(
        lambda f: nearest_codes(f, num_codes=32, code_dim=4), mesh=mesh(2, x), in_specs=P("y"), out_specs=P("y")
    )
    got = np.asarray(jax.jit(fn)(features))
    projection, codes = random_codes(12, 32, 4)
    for b in range(2):
        for t in range(50):
            projected = features[b, t].astype(np.float64) @ projection
            away = [np.linalg.norm(projected / np.linalg.norm(projected) - code) for code in codes]
            assert got[b, t] == np.argmin(away)
    assert len(set(got.ravel().tolist())) > 16, "most codes are used"


def test_equally_near_codes_give_the_lowest():
    fn = jax.shard_map(
        lambda f: nearest_codes(f, num_codes=32, code_dim=4), mesh=mesh(1, 4), in_specs=P("y"), out_specs=P("y")
    )
    assert np.asarray(jax.jit(fn)(np.zeros((1, 3, 12), np.float32))).tolist() == [[0, 0, 0]]


# Transcription.


@pytest.mark.parametrize(("y", "x"), [(1, 1), (2, 4)])
def test_transcription_loss_is_optaxs_on_shards(y, x):
    logits, labels = normal(10, 4, 9, 8) * 2, np.random.default_rng(11).integers(1, 8, (4, 3)).astype(np.int32)
    is_speech = np.arange(9) < np.array([[9], [5], [8], [9]])
    mask = (np.arange(3) < np.array([[3], [2], [1], [0]])).astype(np.float32)

    def local(logits, is_speech, labels, mask):
        def total(logits):
            nll = ctc.negative_log_likelihood(ctc.whole_vocabulary(logits), is_speech, labels, mask)
            return jax.lax.psum(jnp.sum(nll), "y"), nll

        (_, nll), grads = jax.value_and_grad(total, has_aux=True)(logits)
        return nll, grads

    rows, shards = P("y"), P("y", None, "x")
    fn = jax.shard_map(local, mesh=mesh(y, x), in_specs=(shards, rows, rows, rows), out_specs=(rows, shards))
    nll, grads = jax.jit(fn)(logits, is_speech, labels, mask)

    def plain(logits):
        return optax.ctc_loss(logits, 1.0 - is_speech, labels, 1 - mask) * (mask[:, 0] > 0)

    np.testing.assert_allclose(nll, plain(jnp.asarray(logits)), rtol=1e-5, atol=1e-6)
    assert float(nll[3]) == 0.0
    assert_close(grads, jax.grad(lambda z: plain(z).sum())(jnp.asarray(logits)))


def test_transcription_loss_sums_over_all_alignments():
    logits = normal(12, 1, 4, 3)
    probability = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    total = 0.0
    for path in np.ndindex(3, 3, 3, 3):
        kept = [a for i, a in enumerate(path) if a != 0 and (i == 0 or path[i - 1] != a)]
        if kept == [1, 2]:
            total += math.prod(probability[t, a] for t, a in enumerate(path))
    labels, mask = jnp.array([[1, 2]]), jnp.ones((1, 2))
    got = ctc.negative_log_likelihood(jnp.asarray(logits), jnp.ones((1, 4), bool), labels, mask)
    assert float(got[0]) == pytest.approx(-math.log(total), rel=1e-5)


def test_greedy_transcript_by_hand():
    best = np.array([[0, 1, 1, 0, 1, 2, 2, 3, 0, 2]])
    logits = np.eye(4, dtype=np.float32)[best]
    labels, kept = ctc.greedy_labels(jnp.asarray(logits), jnp.arange(10)[None] < 9)  # the last token is no speech
    assert np.asarray(labels)[np.asarray(kept)].tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize(
    ("heard", "right", "edits"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("abc", "", 3),
        ("abc", "abc", 0),
        ("abc", "abd", 1),
        ("bc", "abc", 1),
        ("abcd", "abc", 1),
        ("kitten", "sitting", 3),
        ("sunday", "saturday", 3),
        ("aaaa", "bb", 4),
        ("acb", "abc", 2),
    ],
)
def test_edit_distance_by_hand(heard, right, edits):
    def numbers(text, length, scattered):
        places = (
            np.sort(np.random.default_rng(0).choice(length, len(text), replace=False))
            if scattered
            else range(len(text))
        )
        values, there = np.full((1, length), 7, np.int32), np.zeros((1, length), bool)
        for place, character in zip(places, text, strict=True):
            values[0, place], there[0, place] = ord(character), True
        return values, there

    labels, mask = numbers(right, 10, False)
    got = ctc.edit_distance(
        *map(jnp.asarray, numbers(heard, 12, True)), jnp.asarray(labels), jnp.asarray(mask, jnp.float32)
    )
    assert got.tolist() == [edits]
