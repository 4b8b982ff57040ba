"""Attention as one kernel, interpreted on CPU: it computes what plain attention computes, with all gradients."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from family_harness import NUM_ROWS
from flax import nnx
from gpt_harness import GPT, SMALL
from gpt_harness import batch as gpt_batch
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tolerances import assert_close

from overlapfx.aot.hlo import parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.products import count
from overlapfx.aot.program import Compute
from overlapfx.config import Overlap
from overlapfx.layers import fused_attention, fused_kernels
from overlapfx.layers.attention import Attention, attend, segment_mask
from overlapfx.layers.fused_attention import fused_attend, obstacle
from overlapfx.layers.stack import REMAT_POLICIES
from overlapfx.ops import layout
from overlapfx.plan.flops import decoder_step

PROJECT = pathlib.Path(__file__).resolve().parent.parent
HEAD_DIM = 128


def plain_attend(q, k, v, query_segments, key_segments, bias=None, *, causal):
    return attend(q, k, v, segment_mask(query_segments, key_segments, causal), bias)


@functools.cache
def operands(num_queries, num_keys, num_heads=2, kv_heads=1, batch=1, head_dim=HEAD_DIM, dtype="float32"):
    """q, k, v, a cotangent, segments of queries and of keys: two or three documents, each with keys for its queries."""
    rng = np.random.default_rng(num_queries + num_keys)
    shapes = [(num_queries, num_heads), (num_keys, kv_heads), (num_keys, kv_heads), (num_queries, num_heads)]
    arrays = [jnp.asarray(rng.normal(size=(batch, *shape, head_dim)), dtype) for shape in shapes]
    place = np.arange(max(num_queries, num_keys))
    cut = min(num_queries, num_keys)
    segments = 1 + (place >= cut // 3).astype(np.int32) + (place >= cut - 5)
    segments = np.stack([np.roll(segments, -row) for row in range(batch)]).astype(np.int32)
    return *arrays, jnp.asarray(segments[:, :num_queries]), jnp.asarray(segments[:, :num_keys])


def scores_bias(num_heads, num_queries, num_keys):
    rng = np.random.default_rng(num_heads)
    return jnp.asarray(3 * rng.normal(size=(num_heads, num_queries, num_keys)), jnp.float32)


def both(causal, bias, q, k, v, cotangent, *segments):
    """(context, gradients of q, k, v and the bias) of the kernel and of plain attention."""

    @jax.jit
    def compute(q, k, v, bias, cotangent):
        def one(form):
            context, backward = jax.vjp(
                lambda q, k, v, bias: form(q, k, v, *segments, bias, causal=causal), q, k, v, bias
            )
            return [context, *jax.tree.leaves(backward(cotangent))]

        return one(fused_attend), one(plain_attend)

    return compute(q, k, v, bias, cotangent)


def check(num_queries, num_keys, causal=True, biased=False, num_heads=2, **options):
    bias = scores_bias(num_heads, num_queries, num_keys) if biased else None
    fused, plain = both(causal, bias, *operands(num_queries, num_keys, num_heads, **options))
    for name, got, want in zip(("context", "q", "k", "v", "bias")[: 5 if biased else 4], fused, plain, strict=True):
        # Sums of a few hundred rounded terms, in another order.
        assert_close(np.asarray(got, np.float64) / 2, np.asarray(want, np.float64) / 2, fused[0].dtype, name)


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal", "options"),
    [
        (128, 128, True, {"batch": 2}),
        (384, 384, True, {}),  # three blocks of queries and of keys
        (256, 256, False, {"num_heads": 2, "kv_heads": 2}),
        (384, 128, False, {"dtype": "bfloat16"}),  # attention to another sequence
        (128, 384, False, {}),
        (384, 384, True, {"biased": True, "batch": 2}),
        (128, 256, False, {"biased": True, "kv_heads": 2, "head_dim": 96, "dtype": "bfloat16"}),
        (128, 128, True, {"head_dim": 24}),
    ],
)
def test_same_as_plain_attention(num_queries, num_keys, causal, options):
    check(num_queries, num_keys, causal=causal, **options)


def backward_without_bias(blocks, x, *rest, right=fused_kernels._gradient):
    return right(blocks, dataclasses.replace(x, bias=None), *rest)


def bias_of_the_last_sequence(*references, right=fused_kernels.bias_gradient):
    references[-1][...] = jnp.zeros_like(references[-1])
    right(*references)


Blocks = fused_kernels.Blocks
FAULTS = {
    "a block of keys is left out": (Blocks, "keys_of", lambda blocks, i: blocks.num_k - 1, "context"),
    "scores are scaled by what is padded": (Blocks, "scale", property(lambda x: x.features**-0.5), "context"),
    "segments are not told apart": (fused_kernels, "_UNSEEN", 0.0, "context"),
    "the backward pass forgets the bias": (fused_kernels, "_gradient", backward_without_bias, "q"),
    "the bias has the last sequence's gradient": (fused_kernels, "bias_gradient", bias_of_the_last_sequence, "bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_caught(monkeypatch, fault):
    *where, wrong = FAULTS[fault]
    monkeypatch.setattr(*where)
    with pytest.raises(AssertionError, match=f"{wrong}: error"):
        check(128, 384, causal=False, num_heads=1, biased=True, batch=2, head_dim=96)


def two_by_two():
    return jax.make_mesh((2, 2), ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])


def layers(form, remat, scale=0.5):
    """Two layers of attention under scan, as inside a model's shard_map: local arrays -> sum over all devices."""

    def local(q, k, v, segments, factors, bias):
        def layer(x, factor):
            return x + scale * form(x * factor, k, v, segments, segments, bias, causal=True), None

        layer = jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=False)
        x = jax.lax.scan(layer, q, factors)[0]
        return jax.lax.psum(jnp.sum(x.astype(jnp.float32) ** 2), ("y", "x"))

    return local


def sharded(form, remat, mesh):
    heads = P("y", None, "x")
    specs = (heads, heads, heads, P("y"), P(), P("x"))  # the bias differs between fewer devices than its scores
    return jax.shard_map(
        jax.value_and_grad(layers(form, remat), argnums=(0, 1, 2, 4, 5)),
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(), (heads, heads, heads, P(), P("x"))),
    )


def scanned_operands():
    q, k, v, _, segments, _ = operands(128, 128, num_heads=2, kv_heads=2, batch=2)
    return q, k, v, segments, jnp.array([0.5, 1.5]), scores_bias(2, 128, 128)


def partitioned_by_xla(form, mesh):
    """The same as whole arrays, for XLA's partitioner; the kernel runs where its part of batch and heads lies."""

    def on_each_device(*args, causal):
        fn = functools.partial(form, causal=causal)
        return layout.on_each_device(fn, ("btnh", "bsnh", "bsnh", "bt", "bs", "nts"), "btnh")(*args)

    local = jax.value_and_grad(layers(on_each_device, "all"), argnums=(0, 1, 2, 4, 5))
    return layout.partitioned_by_xla(local, mesh, {"b": ("y",), "n": ("x",)})


@pytest.mark.parametrize("partitioning", ["shard_map", "xla"])
def test_inside_the_layers_of_a_partitioned_program(partitioning):
    mesh = two_by_two()
    fn = sharded(fused_attend, "all", mesh) if partitioning == "shard_map" else partitioned_by_xla(fused_attend, mesh)
    given = jax.device_put(scanned_operands(), NamedSharding(mesh, P()))
    got, want = jax.jit(fn)(*given), jax.jit(sharded(plain_attend, "all", mesh))(*given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(np.asarray(a, np.float64) / 2, np.asarray(b, np.float64) / 2, np.float32)


def kernels(jaxpr):
    """Name and cost of every kernel call inside whose result is used; compilers leave the others out."""
    used = {id(var) for eqn in jaxpr.eqns for var in eqn.invars} | {id(var) for var in jaxpr.outvars}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call" and used.isdisjoint(map(id, eqn.outvars)):
            continue
        if eqn.primitive.name == "pallas_call":
            yield eqn.params["name"], eqn.params["cost_estimate"]
            continue
        for inner in jaxprs_in_params(eqn.params):
            yield from kernels(inner)


@pytest.mark.parametrize(("remat", "forward_calls"), [("all", 2), ("attention", 1)])
def test_saved_context_is_not_computed_again(remat, forward_calls):
    mesh = two_by_two()
    jaxpr = jax.make_jaxpr(sharded(fused_attend, remat, mesh))(*scanned_operands()).jaxpr
    names = [name for name, _ in kernels(jaxpr)]
    once = ["attention_backward", "attention_bias_gradient"]
    assert sorted(names) == once + ["attention_forward"] * forward_calls


def test_cost_by_hand():
    q, k, v, cotangent, segments, _ = operands(384, 384, num_heads=4, kv_heads=2, batch=1)
    jaxpr = jax.make_jaxpr(lambda *x: both(True, None, *x, segments, segments))(q, k, v, cotangent).jaxpr
    forward, backward = dict(kernels(jaxpr)).values()
    # 4 heads; 3 x 3 blocks of 128 x 128 scores less the 3 above the diagonal; a score costs 2 FLOP per feature.
    scores = 4 * 6 * 128 * 128
    assert (forward.flops, forward.transcendentals) == (2 * scores * 2 * 128, scores)
    assert backward.flops == 5 * scores * 2 * 128
    # 384 x 128 float32 each: 4 heads of q and context, 2 of k and v. A row: lse of each head, two of segments.
    unit, row = 384 * 128 * 4, 384 * 4
    assert forward.bytes_accessed == (4 + 4 + 2 + 2) * unit + (4 + 2) * row
    assert backward.bytes_accessed == (4 * 4 + 2 * 4) * unit + (4 + 2) * row


def test_cost_of_a_bias_by_hand():
    q, k, v, cotangent, *segments = operands(128, 1024, num_heads=4, kv_heads=2, batch=3, head_dim=96)
    bias = scores_bias(4, 128, 1024)
    jaxpr = jax.make_jaxpr(lambda q, k, v, bias, g: both(False, bias, q, k, v, g, *segments))(q, k, v, bias, cotangent)
    cost = dict(kernels(jaxpr.jaxpr))
    forward, backward, gradient = (cost[f"attention_{name}"] for name in ("forward", "backward", "bias_gradient"))
    scores = 3 * 4 * 128 * 1024
    assert [x.flops for x in (forward, backward, gradient)] == [x * scores * 2 * 128 for x in (2, 5, 2)]
    # Float32 for 3 sequences: 4 heads of a query, 2 of a key. Rows: lse of each head, segments of queries and of keys.
    query, key, rows, bias_bytes = 3 * 4 * 128 * 128 * 4, 3 * 2 * 1024 * 128 * 4, 3 * (5 * 128 + 1024) * 4, bias.nbytes
    # Where the bias stays for all sequences, each of the two heads that share keys fetches them.
    assert forward.bytes_accessed == 2 * query + 2 * 2 * key + rows + bias_bytes
    assert gradient.bytes_accessed == 3 * query + 2 * 2 * key + rows + 2 * bias_bytes
    assert backward.bytes_accessed == 4 * query + 4 * key + rows + 3 * bias_bytes


@pytest.mark.parametrize("remat", ["none", "all", "attention"])
def test_flops_by_formula_and_in_the_program(monkeypatch, remat):  # C23
    monkeypatch.setattr(Attention, "_kernel", lambda *operands: fused_attend)
    sizes = {"head_dim": HEAD_DIM, "seq_len": 128, "num_heads": 4, "num_kv_heads": 2, "num_layers": 3}
    model = dataclasses.replace(SMALL, remat=remat, **sizes)
    run = GPT.run(2, 2, model=model)
    in_program = count(jax.make_jaxpr(run.train_step)(run.abstract_state, gpt_batch(0, 128)).jaxpr)
    # As in the plain program the masked half of the products is computed too: twice forward, four times backward, and
    # again where it is recomputed. The backward kernel computes the scores again, which the formula knows of only where
    # rematerialisation does so.
    half = NUM_ROWS * model.seq_len * model.num_layers * model.seq_len * model.num_heads * model.head_dim
    recomputed, scores_again = {"none": (0, 2), "all": (2, 2), "attention": (1, 0)}[remat]
    assert in_program == decoder_step(model, NUM_ROWS).hardware + half * (6 + recomputed + scores_again)


@pytest.mark.parametrize(
    ("sizes", "causal", "why"),
    [
        ((100, 128, 128), False, "100 queries are no multiple of 128"),
        ((128, 100, 128), False, "100 keys are no multiple of 128"),
        ((128, 128, 96), True, None),
        ((128, 256, 128), True, "no diagonal"),
        ((16384, 16384, 128), True, "16384 keys of 128 features do not fit into a core's memory of 16 MiB"),
        ((1024, 1024, 128), True, None),
        ((4096, 4096, 128), True, None),
    ],
)
def test_what_the_kernel_cannot_do(sizes, causal, why):
    found = obstacle(*sizes, jnp.bfloat16, causal=causal)
    assert (found is None) if why is None else (why in found)


def test_a_bias_needs_memory():
    assert obstacle(2048, 2048, 128, jnp.bfloat16, causal=True, biased=True) is None
    found = obstacle(4096, 4096, 128, jnp.bfloat16, causal=True, biased=True)
    assert found == "4096 keys of 128 features with a bias do not fit into a core's memory of 16 MiB"


class TestLayer:
    """Attention chooses its form when it is traced."""

    @staticmethod
    def make(head_dim=128, fused="auto", dtype=jnp.bfloat16, **options):
        sizes = {"d_model": 128, "num_heads": 1, "num_kv_heads": 1, "head_dim": head_dim}
        how = {"rotary": False, "out_std": 1.0, "overlap": Overlap("off"), "rngs": nnx.Rngs(0)}
        return Attention(**sizes, **how, compute_dtype=dtype, fused=fused, **options)

    def trace(self, num_tokens=128, bias=False, device=None, **options):
        layer = self.make(**options)
        x, segments = jnp.zeros((1, num_tokens, 128)), jnp.ones((1, num_tokens), jnp.int32)
        bias = jnp.zeros((1, num_tokens, num_tokens)) if bias else None
        mesh = AbstractMesh((1, 1), ("y", "x"), axis_types=(AxisType.Auto,) * 2, abstract_device=device)
        fn = jax.shard_map(lambda x: layer(x, segments, bias), mesh=mesh, in_specs=P(), out_specs=P("y", None, "x"))
        return [name for name, _ in kernels(jax.make_jaxpr(fn)(x).jaxpr)]

    def test_its_bias_reaches_the_kernel(self):
        x, segments, bias = operands(128, 128)[0][:, :, 0], jnp.ones((1, 128), jnp.int32), scores_bias(1, 128, 128)
        forms = [self.make(fused=fused, dtype=jnp.float32) for fused in ("on", "off")]
        mesh = jax.make_mesh((1, 1), ("y", "x"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:1])

        def local(x, bias):
            def one(form):
                out, backward = jax.vjp(lambda bias: form(x, segments, bias), bias)
                return out, *backward(x)

            return [one(form) for form in forms]

        specs = (P("y", None, "x"), P("x"))
        fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=[specs] * 2)
        for got, want in zip(*jax.jit(fn)(x, bias), strict=True):
            assert_close(got, want)

    def test_plain_on_cpu_unless_asked(self):
        assert self.trace() == self.trace(fused="off") == []
        assert self.trace(fused="on") == ["attention_forward"]

    def test_kernel_on_tpu_where_it_can_be(self, caplog):
        tpu = AbstractDevice(device_kind="TPU v4", num_cores=2, platform="tpu")
        assert self.trace(device=tpu) == ["attention_forward"]
        assert self.trace(device=tpu, bias=True) == self.trace(device=tpu, head_dim=96) == ["attention_forward"]
        assert self.trace(device=tpu, fused="off") == []
        assert caplog.text == ""
        assert self.trace(device=tpu, num_tokens=96, name="here") == []
        assert "here is not one kernel because 96 queries are no multiple of 128." in caplog.text

    def test_refuses_what_cannot_be(self):
        with pytest.raises(ValueError, match="because 96 queries are no multiple of 128; use fused='auto' or 'off'"):
            self.trace(fused="on", num_tokens=96)


def test_lowers_for_tpu():
    tpu = AbstractDevice(device_kind="TPU v4", num_cores=2, platform="tpu")
    mesh = AbstractMesh((1,), ("y",), axis_types=(AxisType.Auto,), abstract_device=tpu)
    q, k, v, cotangent, *segments = operands(384, 384, head_dim=96, dtype="bfloat16")

    def attend(q, k, v, bias):
        return fused_attend(q, k, v, *segments, bias, causal=True)

    with jax.sharding.use_abstract_mesh(mesh):
        fn = jax.jit(lambda *x: jax.vjp(attend, *x)[1](cotangent))
        text = fn.trace(q, k, v, scores_bias(2, 384, 384)).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3


COMPILED = """
from overlapfx.aot import slices
slices.prepare_environment()
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from overlapfx.aot.compile import compile_for
from overlapfx.layers.fused_attention import fused_attend
topology = slices.parse_slice("v4:2x2x2")
mesh, _ = slices.make_slice_mesh(topology, {"y": 4, "x": 2})
heads = P("y", None, "x")
def local(q, k, v, bias, segments):
    attend = lambda q, k, v, bias: fused_attend(q, k, v, segments, segments, bias, causal=True)
    context, backward = jax.vjp(attend, q, k, v, bias)
    return backward(context)
parts = (heads, heads, heads, P("x"))
fn = jax.shard_map(local, mesh=mesh, in_specs=(*parts, P("y")), out_specs=parts)
def arg(shape, spec=heads, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
q, k = (arg((4, 1024, num_heads, 96)) for num_heads in (4, 2))
bias, segments = arg((4, 1024, 1024), P("x"), jnp.float32), arg((4, 1024), P("y"), jnp.int32)
print(compile_for(topology, fn, (q, k, k, bias, segments)).text)
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_compiles_for_a_slice_with_its_cost():
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        cwd=PROJECT,
        env=environment,
        check=False,
        timeout=600,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    program = lower(parse_module(done.stdout))
    kernel_flops = [step.num_flops for step in program.steps if isinstance(step, Compute) and step.kind == "kernel"]
    # 2 heads on every device; 3 of 4 blocks of 512 x 512 scores; 2, 2 and 5 products of 2 * 128 FLOP per score, where
    # zeros fill up the 96 features.
    product = 2 * 3 * 512 * 512 * 2 * 128
    assert sorted(kernel_flops) == [2 * product, 2 * product, 5 * product]
    assert fused_attention.SCOPE in done.stdout
    assert not program.unknown
    assert not any("kernel" in note for note in program.notes)
