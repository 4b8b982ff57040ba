"""What the fused attention kernels compute in the memory of one core.

Scores stand with keys along rows and queries along columns, so that what belongs to a query (maximum, sum, segment) is
one row, reduced and spread without crossing lanes. References hold one head: q, out and their gradients [T, H] of a
block of queries, k, v and theirs [S, H] of all keys, segments and lse [1, T] or [1, S].
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
# Of a score whose key is not to be seen: its weight is exactly 0 beside any other, without the NaN of infinities.
_UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel cuts the scores of one head into blocks of `block_q` queries by `block_k` keys.

    group: query heads that share a key head. If `causal`, queries are as many as keys, and the blocks square.
    """

    num_queries: int
    num_keys: int
    head_dim: int
    block_q: int
    block_k: int
    group: int
    causal: bool

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def num_q(self) -> int:
        """Blocks of queries."""
        return self.num_queries // self.block_q

    @property
    def num_k(self) -> int:
        """Blocks of keys."""
        return self.num_keys // self.block_k

    @property
    def num_scores(self) -> int:
        """Scores of one head that are computed: without the blocks above the diagonal if `causal`."""
        num_blocks = self.num_q * (self.num_q + 1) // 2 if self.causal else self.num_q * self.num_k
        return num_blocks * self.block_q * self.block_k

    def keys_of(self, i: Any) -> Any:
        """Number of blocks of keys that query block i sees."""
        return i + 1 if self.causal else self.num_k

    def at(self, j: Any) -> Any:
        """Where key block j lies among the keys."""
        return pl.ds(pl.multiple_of(j * self.block_k, self.block_k), self.block_k)


def forward(blocks: Blocks, q_seg: Any, k_seg: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    """Context of one block of queries, block of keys by block of keys, with the logarithm of the sum of exponentials.

    Softmax is built up: whenever a larger score is met, sum and context so far shrink accordingly.
    """
    i = pl.program_id(2)
    query, query_segments = q[...], q_seg[...]

    def step(j: Any, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, context = before
        at = blocks.at(j)
        scores = _scores(blocks, query, k[at, :], query_segments, k_seg[:, at], i, j)
        new_top = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
        total = total * shrink + jnp.sum(weights, axis=0, keepdims=True)
        return new_top, total, context * shrink + _dot(v[at, :], weights.astype(v.dtype), 0, 0)

    row, columns = (1, blocks.block_q), (blocks.head_dim, blocks.block_q)
    start = jnp.full(row, _UNSEEN, jnp.float32), jnp.zeros(row, jnp.float32), jnp.zeros(columns, jnp.float32)
    top, total, context = lax.fori_loop(0, blocks.keys_of(i), step, start)
    out[...] = jnp.transpose(context / total).astype(out.dtype)
    lse[...] = top + jnp.log(total)


def backward(
    blocks: Blocks,
    q_seg: Any,
    k_seg: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    d_q: Any,
    d_k: Any,
    d_v: Any,
    k_sum: Any,
    v_sum: Any,
) -> None:
    """Gradients of one block of queries, and of all keys and values once the last block of the last query head is done.

    Weights p are computed again, as exp(scores - lse). With g = d_out: d_v = p g, d_scores = p (v g - sum(out g)),
    d_q and d_k = d_scores times k and q. `k_sum` and `v_sum` gather in float32 what all query blocks give.
    """
    head, i = pl.program_id(2), pl.program_id(3)

    @pl.when((head == 0) & (i == 0))
    def _() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    query, query_segments, gradient, log_sum = q[...], q_seg[...], d_out[...], lse[...]
    products = gradient.astype(jnp.float32) * out[...].astype(jnp.float32)
    shift = jnp.sum(jnp.transpose(products), axis=0, keepdims=True)

    def step(j: Any, query_sum: Array) -> Array:
        at = blocks.at(j)
        key, value = k[at, :], v[at, :]
        weights = jnp.exp(_scores(blocks, query, key, query_segments, k_seg[:, at], i, j) - log_sum)
        v_sum[at, :] += _dot(weights.astype(gradient.dtype), gradient, 1, 0)
        d_scores = (weights * (_dot(value, gradient, 1, 1) - shift)).astype(query.dtype)
        k_sum[at, :] += _dot(d_scores, query, 1, 0)
        return query_sum + _dot(key, d_scores, 0, 0)

    start = jnp.zeros((blocks.head_dim, blocks.block_q), jnp.float32)
    query_sum = lax.fori_loop(0, blocks.keys_of(i), step, start)
    d_q[...] = jnp.transpose(query_sum * blocks.scale).astype(d_q.dtype)

    @pl.when((head == blocks.group - 1) & (i == blocks.num_q - 1))
    def _() -> None:
        d_k[...] = (k_sum[...] * blocks.scale).astype(d_k.dtype)
        d_v[...] = v_sum[...].astype(d_v.dtype)


def scratch(blocks: Blocks) -> list[Any]:
    """The sums that `backward` keeps from block to block."""
    return [pltpu.VMEM((blocks.num_keys, blocks.head_dim), jnp.float32)] * 2


def _scores(
    blocks: Blocks, query: Array, key: Array, query_segments: Array, key_segments: Array, i: Any, j: Any
) -> Array:
    """Scores of query block i against key block j, [keys, queries] in float32."""
    scores = _dot(key, query, 1, 1) * blocks.scale
    # A row becomes a column by way of a square that can be transposed.
    column = jnp.transpose(jnp.broadcast_to(key_segments, (LANES, blocks.block_k)))[:, :1]
    seen = column == query_segments
    if blocks.causal:
        place = lax.broadcasted_iota(jnp.int32, scores.shape, 1) - lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        seen &= place >= (j - i) * blocks.block_k
    return jnp.where(seen, scores, _UNSEEN)


def _dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    return lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32)
