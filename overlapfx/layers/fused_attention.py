"""Softmax attention as one kernel for each direction, whose scores never leave the chip (Dao et al., 2022)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from overlapfx import compat
from overlapfx.layers import fused_kernels
from overlapfx.layers.fused_kernels import LANES, Blocks, Operands

# What a rematerialisation policy saves so that the backward pass does not run the forward kernel again.
CONTEXT = "attention_context"
SCOPE = "attention.fused"
_BLOCK_SIZES = (512, 256, 128)
# What the compiler gives one kernel unless asked otherwise; on TPU v4 it is all that a core has.
_VMEM_BYTES = 16 * 2**20
# Arrays of a block of scores, float32, that the backward kernel holds at a time.
_LIVE_SCORES = 6


def fused_attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    query_segments_BT: Int[Array, "B T"],
    key_segments_BS: Int[Array, "B S"],
    bias_NTS: Float[Array, "N T S"] | None = None,
    *,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """What `attention.attend` computes, without a mask in memory: a query sees the keys of its segment and, if
    `causal`, none later. Every query must see some key.

    Products of what is given, with float32 sums and softmax; query head n uses key head n // (N / K). The backward pass
    is a kernel too, which computes the scores again, and another one for the gradient of a bias. Features are filled up
    with zeros to whole registers. On CPU the kernels are interpreted. Raises ValueError where `obstacle` finds one.
    """
    _, num_tokens, num_heads, _ = q_BTNH.shape
    _, num_keys, kv_heads, head_dim = k_BSKH.shape
    biased = bias_NTS is not None
    why = obstacle(num_tokens, num_keys, head_dim, q_BTNH.dtype, causal=causal, biased=biased)
    if why is not None:
        raise ValueError(f"attention cannot be one kernel because {why}; use fused='auto' or 'off'.")
    group = num_heads // kv_heads
    blocks = _blocks(num_tokens, num_keys, head_dim, group, q_BTNH.dtype.itemsize, causal, biased)
    assert blocks is not None
    # Kernels see the last two dimensions: a row of segments for each sequence.
    segments = query_segments_BT[:, None], key_segments_BS[:, None]
    q, k, v = (_pad_features(jnp.swapaxes(x, 1, 2), blocks.features) for x in (q_BTNH, k_BSKH, v_BSKH))
    x = Operands(*segments, q, k, v, None if bias_NTS is None else jnp.swapaxes(bias_NTS, 1, 2))
    axes = frozenset().union(*(compat.varying_axes(leaf) for leaf in jax.tree.leaves(x)))
    context_BNTH = _attend(blocks, jax.tree.map(lambda leaf: compat.vary(leaf, axes), x))
    return jnp.swapaxes(context_BNTH, 1, 2)[..., :head_dim]


def obstacle(
    num_queries: int, num_keys: int, head_dim: int, dtype: Any, *, causal: bool, biased: bool = False
) -> str | None:
    """Why `fused_attend` cannot take operands of these sizes, None if it can. biased: whether scores get a bias."""
    if causal and num_queries != num_keys:
        return f"causal attention of {num_queries} queries to {num_keys} keys has no diagonal"
    for size, name in ((num_queries, "queries"), (num_keys, "keys")):
        if size % LANES:
            return f"{size} {name} are no multiple of {LANES}"
    if _blocks(num_queries, num_keys, head_dim, 1, jnp.dtype(dtype).itemsize, causal, biased) is None:
        what = f"{num_keys} keys of {head_dim} features" + (" with a bias" if biased else "")
        return f"{what} do not fit into a core's memory of {_VMEM_BYTES >> 20} MiB"
    return None


def _pad_features(x: Float[Array, "B N T H"], features: int) -> Float[Array, "B N T F"]:
    missing = features - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else x


def _blocks(
    num_queries: int, num_keys: int, head_dim: int, group: int, itemsize: int, causal: bool, biased: bool
) -> Blocks | None:
    """The largest blocks with which every kernel fits into the memory of a core, None if there are none."""
    for largest in _BLOCK_SIZES:
        block_q, block_k = (_divisor(length, largest) for length in (num_queries, num_keys))
        blocks = Blocks(num_queries, num_keys, head_dim, block_q, block_k, group, causal)
        # Two of each operand and result, for the next is fetched and the last is stored meanwhile.
        of_query, of_keys = 2 * block_q * blocks.features * itemsize, 2 * num_keys * blocks.features * itemsize
        bias = 2 * num_keys * block_q * 4 if biased else 0
        sums = 2 * num_keys * blocks.features * 4
        backward = 4 * (of_query + of_keys) + sums + bias
        bias_gradient = 3 * of_query + 2 * of_keys + 2 * bias
        if max(backward, bias_gradient) + _LIVE_SCORES * block_q * block_k * 4 <= _VMEM_BYTES:
            return blocks
    return None


def _divisor(length: int, largest: int) -> int:
    return next(size for size in _BLOCK_SIZES if size <= largest and length % size == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, x: Operands) -> Array:
    return _forward(blocks, x)[0]


def _attend_forward(blocks: Blocks, x: Operands) -> tuple[Array, Any]:
    out, lse = (checkpoint_name(result, CONTEXT) for result in _forward(blocks, x))
    return out, (x, out, lse)


def _forward(blocks: Blocks, x: Operands) -> tuple[Float[Array, "B N T H"], Float[Array, "B N 1 T"]]:
    """Context, with the logarithm of the sum of exponentials of every query's scores."""
    batch, num_heads, num_queries, _ = x.q.shape
    lse = _like(x.q, (batch, num_heads, 1, num_queries), jnp.float32)
    moved = [*jax.tree.leaves(x), x.q, lse]
    if x.bias is None:
        dim, grid = 2, (batch, num_heads, blocks.num_q)
        specs, rows = _specs(blocks, x, lambda b, n, i: (b, n, i))
    else:
        # A block of the bias stays for all sequences, while every block of queries fetches the keys again.
        dim, grid = 1, (num_heads, blocks.num_q, batch)
        specs, rows = _specs(blocks, x, lambda n, i, b: (b, n, i))
        moved += [x.k, x.v] * (blocks.num_q * blocks.group - 1)
    call = pl.pallas_call(
        functools.partial(fused_kernels.forward, blocks, dim),
        grid=grid,
        in_specs=[specs],
        out_specs=[specs.q, rows],
        out_shape=[_like(x.q, x.q.shape, x.q.dtype), lse],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=_cost(blocks, 2, moved, batch * num_heads),
        interpret=compat.target_platform() != "tpu",
        name="attention_forward",
    )
    with jax.named_scope(SCOPE):
        out, lse = call(x)
    return out, lse


def _attend_backward(blocks: Blocks, saved: Any, d_out: Array) -> tuple[Operands]:
    x, out, lse = saved
    batch, kv_heads = x.k.shape[:2]
    specs, rows = _specs(blocks, x, lambda b, kv, g, i: (b, kv * blocks.group + g, i))
    # A block of the bias is fetched anew for every sequence.
    moved = [*jax.tree.leaves(x), out, lse, d_out, x.q, x.k, x.v, *jax.tree.leaves(x.bias) * (batch - 1)]
    call = pl.pallas_call(
        functools.partial(fused_kernels.backward, blocks),
        grid=(batch, kv_heads, blocks.group, blocks.num_q),
        in_specs=[specs, specs.q, rows, specs.q],
        out_specs=[specs.q, specs.k, specs.v],
        out_shape=[_like(x.q, operand.shape, operand.dtype) for operand in (x.q, x.k, x.v)],
        scratch_shapes=fused_kernels.scratch(blocks),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(blocks, 5, moved, batch * x.q.shape[1]),
        interpret=compat.target_platform() != "tpu",
        name="attention_backward",
    )
    with jax.named_scope(SCOPE):
        d_q, d_k, d_v = call(x, out, lse, d_out)
    d_bias = None if x.bias is None else _bias_gradient(blocks, x, out, lse, d_out)
    return (Operands(None, None, d_q, d_k, d_v, d_bias),)


_attend.defvjp(_attend_forward, _attend_backward)


def _bias_gradient(blocks: Blocks, x: Operands, out: Array, lse: Array, d_out: Array) -> Float[Array, "N S T"]:
    batch, num_heads = x.q.shape[:2]
    specs, rows = _specs(blocks, x, lambda n, i, b: (b, n, i))
    moved = [*jax.tree.leaves(x), out, lse, d_out, x.bias, *[x.k, x.v] * (blocks.num_q * blocks.group - 1)]
    call = pl.pallas_call(
        functools.partial(fused_kernels.bias_gradient, blocks),
        grid=(num_heads, blocks.num_q, batch),
        in_specs=[specs, specs.q, rows, specs.q],
        out_specs=specs.bias,
        out_shape=_like(x.q, x.bias.shape, x.bias.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=_cost(blocks, 2, moved, batch * num_heads),
        interpret=compat.target_platform() != "tpu",
        name="attention_bias_gradient",
    )
    with jax.named_scope(SCOPE):
        return call(x, out, lse, d_out)


def _specs(blocks: Blocks, x: Operands, place: Callable[..., tuple[Any, Any, Any]]) -> tuple[Operands, pl.BlockSpec]:
    """What a program of the grid holds: a block of queries, all keys, both rows of segments; a row for the queries.

    `place` tells a program's sequence, query head and block of queries from its place in the grid. What a program needs
    stays where it is while those that follow need the same.
    """

    def spec(shape: tuple[int | None, ...], block: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *at: block(*place(*at)))

    one = None
    keys = spec((one, one, blocks.num_keys, blocks.features), lambda b, n, i: (b, n // blocks.group, 0, 0))
    specs = Operands(
        spec((one, 1, blocks.block_q), lambda b, n, i: (b, 0, i)),
        spec((one, 1, blocks.num_keys), lambda b, n, i: (b, 0, 0)),
        spec((one, one, blocks.block_q, blocks.features), lambda b, n, i: (b, n, i, 0)),
        keys,
        keys,
        None if x.bias is None else spec((one, blocks.num_keys, blocks.block_q), lambda b, n, i: (n, 0, i)),
    )
    return specs, spec((one, one, 1, blocks.block_q), lambda b, n, i: (b, n, 0, i))


def _cost(blocks: Blocks, num_products: int, arrays: list[Any], num_heads: int) -> pl.CostEstimate:
    """What the planner charges: products of the blocks that are computed, with the features that fill registers; what
    is moved, listed as often as it is.

    num_heads: heads of all sequences.
    """
    num_scores = num_heads * blocks.num_scores
    return pl.CostEstimate(
        flops=num_products * 2 * num_scores * blocks.features,
        transcendentals=num_scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )


def _like(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that varies over the mesh axes that `x` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
