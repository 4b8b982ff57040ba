"""Attention by cuDNN: the same numbers from JAX's plain form of it, cuDNN's kernels in what is lowered for a GPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.layers.attention import Attention, attend, segment_mask
from overlapfx.layers.cudnn_attention import cudnn_attend, cudnn_obstacle

GPU = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
CALL = re.compile(r"custom_call @(__cudnn\$\w+)")


@pytest.fixture
def hopper(monkeypatch):
    """This process's device claims to be a Hopper; JAX finds the cuDNN that it asks for when it traces."""
    kernels = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(compat, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(kernels, "check_compute_capability", lambda capability: True)


def lowered(head_dim=128, num_tokens=128, dtype=jnp.bfloat16, fused="auto", bias=False):
    """The program that a layer, with its gradients, is lowered to for a GPU."""
    given = {"d_model": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": head_dim, "rotary": False, "out_std": 1.0}
    layer = Attention(**given, compute_dtype=dtype, overlap=Overlap("off"), fused=fused, rngs=nnx.Rngs(0))
    x, segments = jnp.zeros((2, num_tokens, 128)), jnp.ones((2, num_tokens), jnp.int32)
    scores_bias = jnp.zeros((4, num_tokens, num_tokens) if bias else ())
    mesh = AbstractMesh((1, 1), ("y", "x"), axis_types=(AxisType.Auto,) * 2, abstract_device=GPU)

    def local(x, segments, scores_bias):
        return jax.grad(lambda *x: jnp.sum(layer(x[0], segments, x[1] if bias else None)), (0, 1))(x, scores_bias)

    specs = (P("y", None, "x"), P("y"), P())
    fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(specs[0], P()))
    return jax.jit(fn).trace(x, segments, scores_bias).lower(lowering_platforms=("cuda",)).as_text()


def cudnn_calls(**what):
    """cuDNN's kernels in it."""
    return CALL.findall(lowered(**what))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_computes_what_plain_attention_computes(causal, biased):
    rng = np.random.default_rng(0)
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=(2, 24, n, 8)), "float32") for n in (4, 2, 2, 4))
    bias = [jnp.asarray(rng.normal(size=(4, 24, 24)), "float32")] * biased
    segments = jnp.asarray([[1] * 9 + [2] * 15, [1] * 20 + [2] * 4], jnp.int32)
    cudnn = functools.partial(cudnn_attend, causal=causal, implementation="xla")

    def plain(q, k, v, query_segments, key_segments, *bias):
        return attend(q, k, v, segment_mask(query_segments, key_segments, causal), *bias)

    def run(fn):
        out, backward = jax.vjp(lambda q, k, v, *bias: fn(q, k, v, segments, segments, *bias), q, k, v, *bias)
        return out, *backward(cotangent)

    for got, wanted in zip(run(cudnn), run(plain), strict=True):
        assert_close(got, wanted)


def test_a_layer_on_gpu_is_cudnns(hopper):
    assert cudnn_calls() == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert cudnn_calls(fused="off") == []


def test_a_bias_has_a_gradient_from_cudnn(hopper):
    (backward,) = (line for line in lowered(bias=True, num_tokens=64).splitlines() if "SoftmaxBackward" in line)
    results = backward.split(" -> ")[-1]
    assert results.count("tensor<2x4x64x64xbf16>") == 1, results  # for every sequence and head
    assert cudnn_calls(bias=True) == cudnn_calls()


def test_plain_where_cudnn_has_none(hopper, caplog):
    assert cudnn_calls(dtype=jnp.float32) == []
    assert "attention is not one kernel because cuDNN has it in bfloat16 and float16, not float32." in caplog.text
    with pytest.raises(ValueError, match="because 136 features of a head are no multiple of 8 up to 128; use fused="):
        cudnn_calls(head_dim=136, fused="on")


@pytest.mark.parametrize(
    ("sizes", "dtype", "why"),
    [
        ((128, 128, 128), "bfloat16", None),
        ((100, 64, 72), "float16", None),
        ((128, 128, 136), "bfloat16", "136 features"),
        ((128, 128, 100), "bfloat16", "100 features"),
        ((127, 128, 64), "bfloat16", "127 queries"),
        ((128, 127, 64), "bfloat16", "127 keys"),
        ((128, 128, 64), "float32", "not float32"),
    ],
)
def test_what_cudnn_cannot_do(hopper, sizes, dtype, why):
    found = cudnn_obstacle(*sizes, dtype, causal=False)
    assert (found is None) if why is None else (why in found)


def test_causal_needs_a_diagonal(hopper):
    assert "no diagonal" in cudnn_obstacle(64, 128, 64, "bfloat16", causal=True)


@pytest.mark.parametrize(("version", "found"), [("9.0", (9, 0)), ("12.0", (12, 0)), ("gfx90a", None), ("", None)])
def test_capability(monkeypatch, version, found):
    device = type("Device", (), {"compute_capability": version} if version else {})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert compat.cuda_capability() == found
    assert (cudnn_obstacle(128, 128, 128, "bfloat16", causal=True) is None) == (found is not None)


def test_older_than_ampere_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "cuda_capability", lambda: (7, 5))
    assert "from Ampere on only" in cudnn_obstacle(128, 128, 128, "bfloat16", causal=True)
