"""Softmax attention as one kernel for each direction, whose scores never leave the chip (Dao et al., 2022)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from overlapfx import compat
from overlapfx.layers import fused_kernels
from overlapfx.layers.fused_kernels import LANES, Blocks

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
    *,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """What `attention.attend` computes, without a mask in memory: a query sees the keys of its segment and, if
    `causal`, none later. Every query must see some key.

    Products of what is given, with float32 sums and softmax; query head n uses key head n // (N / K). The backward pass
    is a kernel too, which computes the scores again. On CPU the kernels are interpreted. Raises ValueError where
    `obstacle` finds one.
    """
    _, num_tokens, num_heads, _ = q_BTNH.shape
    _, num_keys, kv_heads, head_dim = k_BSKH.shape
    why = obstacle(num_tokens, num_keys, head_dim, q_BTNH.dtype, causal=causal)
    if why is not None:
        raise ValueError(f"attention cannot be one kernel because {why}; use fused='auto' or 'off'.")
    blocks = _blocks(num_tokens, num_keys, head_dim, num_heads // kv_heads, q_BTNH.dtype.itemsize, causal)
    assert blocks is not None
    operands = (q_BTNH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS)
    axes = frozenset().union(*(compat.varying_axes(x) for x in operands))
    q_BTNH, k_BSKH, v_BSKH, query_segments_BT, key_segments_BS = (compat.vary(x, axes) for x in operands)
    q_BNTH, k_BKSH, v_BKSH = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    # A row of segments for each sequence: the last two dimensions are what a kernel sees.
    context_BNTH = _attend(blocks, q_BNTH, k_BKSH, v_BKSH, query_segments_BT[:, None], key_segments_BS[:, None])
    return jnp.swapaxes(context_BNTH, 1, 2)


def obstacle(num_queries: int, num_keys: int, head_dim: int, dtype: Any, *, causal: bool) -> str | None:
    """Why `fused_attend` cannot take operands of these sizes, None if it can."""
    if causal and num_queries != num_keys:
        return f"causal attention of {num_queries} queries to {num_keys} keys has no diagonal"
    for size, name in ((num_queries, "queries"), (num_keys, "keys"), (head_dim, "features of a head")):
        if size % LANES:
            return f"{size} {name} are no multiple of {LANES}"
    if _blocks(num_queries, num_keys, head_dim, 1, jnp.dtype(dtype).itemsize, causal) is None:
        return f"{num_keys} keys of {head_dim} features do not fit into a core's memory of {_VMEM_BYTES >> 20} MiB"
    return None


def _blocks(num_queries: int, num_keys: int, head_dim: int, group: int, itemsize: int, causal: bool) -> Blocks | None:
    """The largest blocks with which the backward kernel fits into the memory of a core, None if there are none."""
    for largest in _BLOCK_SIZES:
        block_q, block_k = (_divisor(length, largest) for length in (num_queries, num_keys))
        # Two of each operand and result, for the next is fetched and the last is stored meanwhile.
        operands = 2 * 4 * (num_keys + block_q) * head_dim * itemsize
        sums = 2 * num_keys * head_dim * 4
        if operands + sums + _LIVE_SCORES * block_q * block_k * 4 <= _VMEM_BYTES:
            return Blocks(num_queries, num_keys, head_dim, block_q, block_k, group, causal)
    return None


def _divisor(length: int, largest: int) -> int:
    return next(size for size in _BLOCK_SIZES if size <= largest and length % size == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, q: Array, k: Array, v: Array, q_seg: Array, k_seg: Array) -> Array:
    return _forward(blocks, q, k, v, q_seg, k_seg)[0]


def _attend_forward(blocks: Blocks, q: Array, k: Array, v: Array, q_seg: Array, k_seg: Array) -> tuple[Array, Any]:
    out, lse = (checkpoint_name(x, CONTEXT) for x in _forward(blocks, q, k, v, q_seg, k_seg))
    return out, (q, k, v, q_seg, k_seg, out, lse)


def _forward(
    blocks: Blocks,
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    q_seg: Int[Array, "B 1 T"],
    k_seg: Int[Array, "B 1 S"],
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N 1 T"]]:
    """Context, with the logarithm of the sum of exponentials of every query's scores."""
    batch, num_heads, num_queries, _ = q.shape
    lse = _like(q, (batch, num_heads, 1, num_queries), jnp.float32)
    queries, keys, rows, *segments = _specs(blocks, lambda b, n, i: n, lambda b, n, i: i)
    call = pl.pallas_call(
        functools.partial(fused_kernels.forward, blocks),
        grid=(batch, num_heads, blocks.num_q),
        in_specs=[*segments, queries, keys, keys],
        out_specs=[queries, rows],
        out_shape=[_like(q, q.shape, q.dtype), lse],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel")),
        cost_estimate=_cost(blocks, 2, [q_seg, k_seg, q, k, v, q, lse], batch * num_heads),
        interpret=compat.target_platform() != "tpu",
        name="attention_forward",
    )
    with jax.named_scope(SCOPE):
        out, lse = call(q_seg, k_seg, q, k, v)
    return out, lse


def _attend_backward(blocks: Blocks, saved: Any, d_out: Array) -> tuple[Array, Array, Array, None, None]:
    q, k, v, q_seg, k_seg, out, lse = saved
    batch, kv_heads = k.shape[:2]
    queries, keys, rows, *segments = _specs(blocks, lambda b, kv, g, i: kv * blocks.group + g, lambda b, kv, g, i: i)
    call = pl.pallas_call(
        functools.partial(fused_kernels.backward, blocks),
        grid=(batch, kv_heads, blocks.group, blocks.num_q),
        in_specs=[*segments, queries, keys, keys, queries, rows, queries],
        out_specs=[queries, keys, keys],
        out_shape=[_like(q, x.shape, x.dtype) for x in (q, k, v)],
        scratch_shapes=fused_kernels.scratch(blocks),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(blocks, 5, [q_seg, k_seg, q, k, v, out, lse, d_out, q, k, v], batch * q.shape[1]),
        interpret=compat.target_platform() != "tpu",
        name="attention_backward",
    )
    with jax.named_scope(SCOPE):
        d_q, d_k, d_v = call(q_seg, k_seg, q, k, v, out, lse, d_out)
    return d_q, d_k, d_v, None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _specs(blocks: Blocks, head: Any, block: Any) -> tuple[pl.BlockSpec, ...]:
    """What a program of the grid holds: a block of queries, all keys, a row for the queries, both rows of segments.

    `head` and `block` tell a program's query head and block of queries from its place in the grid, whose first
    dimension is the sequence. Keys stay where they are while the programs that follow need the same.
    """
    one, features = None, blocks.head_dim
    return (
        pl.BlockSpec((one, one, blocks.block_q, features), lambda *at: (at[0], head(*at), block(*at), 0)),
        pl.BlockSpec((one, one, blocks.num_keys, features), lambda *at: (at[0], head(*at) // blocks.group, 0, 0)),
        pl.BlockSpec((one, one, 1, blocks.block_q), lambda *at: (at[0], head(*at), 0, block(*at))),
        pl.BlockSpec((one, 1, blocks.block_q), lambda *at: (at[0], 0, block(*at))),
        pl.BlockSpec((one, 1, blocks.num_keys), lambda *at: (at[0], 0, 0)),
    )


def _cost(blocks: Blocks, num_products: int, arrays: list[Any], num_heads: int) -> pl.CostEstimate:
    """What the planner charges: products of the blocks that are computed, every operand and result moved once.

    num_heads: heads of all sequences.
    """
    num_scores = num_heads * blocks.num_scores
    return pl.CostEstimate(
        flops=num_products * 2 * num_scores * blocks.head_dim,
        transcendentals=num_scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
    )


def _like(x: Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array that varies over the mesh axes that `x` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
