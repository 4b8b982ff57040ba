"""What the fused attention kernels compute in the memory of one core.

Scores stand with keys along rows and queries along columns, so that what belongs to a query (maximum, sum, segment) is
one row, reduced and spread without crossing lanes. References hold one head: q, out and their gradients [T, H] of a
block of queries, k, v and theirs [S, H] of all keys, bias and its gradient [S, T], segments and lse [1, T] or [1, S].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
# Of a score whose key is not to be seen: its weight is exactly 0 beside any other, without the NaN of infinities.
_UNSEEN = -0.7 * float(jnp.finfo(jnp.float32).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operands:
    """What attention is computed from: arrays, their gradients, their blocks, or references to those of one head."""

    query_segments: Any
    key_segments: Any
    q: Any
    k: Any
    v: Any
    bias: Any = None  # float32, added to the scores, with keys along rows


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a kernel cuts the scores of one head into blocks of `block_q` queries by `block_k` keys.

    head_dim: features that count; zeros fill them up to `features`. group: query heads that share a key head. If
    `causal`, queries are as many as keys, and the blocks square.
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
    def features(self) -> int:
        """Features of a head in memory: whole registers."""
        return -(-self.head_dim // LANES) * LANES

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


def forward(blocks: Blocks, dim: int, x: Operands, out: Any, lse: Any) -> None:
    """Context of one block of queries, block of keys by block of keys, with the logarithm of the sum of exponentials.

    Softmax is built up: whenever a larger score is met, sum and context so far shrink accordingly. dim: the dimension
    of the grid that counts blocks of queries.
    """
    i = pl.program_id(dim)
    query, query_segments = x.q[...], x.query_segments[...]

    def step(j: Any, before: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, context = before
        scores, value = _scores(blocks, x, query, query_segments, i, j), x.v[blocks.at(j), :]
        new_top = jnp.maximum(top, jnp.max(scores, axis=0, keepdims=True))
        shrink, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top)
        total = total * shrink + jnp.sum(weights, axis=0, keepdims=True)
        return new_top, total, context * shrink + _dot(value, weights.astype(value.dtype), 0, 0)

    row, columns = (1, blocks.block_q), (blocks.features, blocks.block_q)
    start = jnp.full(row, _UNSEEN, jnp.float32), jnp.zeros(row, jnp.float32), jnp.zeros(columns, jnp.float32)
    top, total, context = lax.fori_loop(0, blocks.keys_of(i), step, start)
    out[...] = jnp.transpose(context / total).astype(out.dtype)
    lse[...] = top + jnp.log(total)


def backward(
    blocks: Blocks,
    x: Operands,
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

    With g = d_out and the weights p: d_v = p g, d_q and d_k = d_scores times k and q. `k_sum` and `v_sum` gather in
    float32 what all query blocks give.
    """
    head, i = pl.program_id(2), pl.program_id(3)

    @pl.when((head == 0) & (i == 0))
    def _() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    query, gradient, weigh = x.q[...], d_out[...], _gradient(blocks, x, out, lse, d_out, i)

    def step(j: Any, query_sum: Array) -> Array:
        at = blocks.at(j)
        weights, d_scores = weigh(j)
        v_sum[at, :] += _dot(weights.astype(gradient.dtype), gradient, 1, 0)
        d_scores = d_scores.astype(query.dtype)
        k_sum[at, :] += _dot(d_scores, query, 1, 0)
        return query_sum + _dot(x.k[at, :], d_scores, 0, 0)

    start = jnp.zeros((blocks.features, blocks.block_q), jnp.float32)
    query_sum = lax.fori_loop(0, blocks.keys_of(i), step, start)
    d_q[...] = jnp.transpose(query_sum * blocks.scale).astype(d_q.dtype)

    @pl.when((head == blocks.group - 1) & (i == blocks.num_q - 1))
    def _() -> None:
        d_k[...] = (k_sum[...] * blocks.scale).astype(d_k.dtype)
        d_v[...] = v_sum[...].astype(d_v.dtype)


def bias_gradient(blocks: Blocks, x: Operands, out: Any, lse: Any, d_out: Any, d_bias: Any) -> None:
    """The gradient of the scores, summed over the sequences, which are the last dimension of the grid.

    A kernel of its own, since sums over sequences and sums over queries cannot both stay in a core's memory.
    """
    i, sequence = pl.program_id(1), pl.program_id(2)

    @pl.when(sequence == 0)
    def _() -> None:
        d_bias[...] = jnp.zeros_like(d_bias)

    weigh = _gradient(blocks, x, out, lse, d_out, i)

    def step(j: Any, nothing: None) -> None:
        d_bias[blocks.at(j), :] += weigh(j)[1]

    lax.fori_loop(0, blocks.keys_of(i), step, None)


def scratch(blocks: Blocks) -> list[Any]:
    """The sums that `backward` keeps from block to block."""
    return [pltpu.VMEM((blocks.num_keys, blocks.features), jnp.float32)] * 2


def _gradient(
    blocks: Blocks, x: Operands, out: Any, lse: Any, d_out: Any, i: Any
) -> Callable[[Any], tuple[Array, Array]]:
    """A function that gives the weights of query block i at key block j, and the gradient of its scores, in float32.

    Weights p are computed again, as exp(scores - lse). With g = d_out: d_scores = p (v g - sum(out g)).
    """
    query, query_segments, gradient, log_sum = x.q[...], x.query_segments[...], d_out[...], lse[...]
    products = gradient.astype(jnp.float32) * out[...].astype(jnp.float32)
    shift = jnp.sum(jnp.transpose(products), axis=0, keepdims=True)

    def weigh(j: Any) -> tuple[Array, Array]:
        weights = jnp.exp(_scores(blocks, x, query, query_segments, i, j) - log_sum)
        return weights, weights * (_dot(x.v[blocks.at(j), :], gradient, 1, 1) - shift)

    return weigh


def _scores(blocks: Blocks, x: Operands, query: Array, query_segments: Array, i: Any, j: Any) -> Array:
    """Scores of query block i against key block j, [keys, queries] in float32."""
    at = blocks.at(j)
    scores = _dot(x.k[at, :], query, 1, 1) * blocks.scale
    if x.bias is not None:
        scores += x.bias[at, :]
    # A row becomes a column by way of a square that can be transposed.
    column = jnp.transpose(jnp.broadcast_to(x.key_segments[:, at], (LANES, blocks.block_k)))[:, :1]
    seen = column == query_segments
    if blocks.causal:
        place = lax.broadcasted_iota(jnp.int32, scores.shape, 1) - lax.broadcasted_iota(jnp.int32, scores.shape, 0)
        seen &= place >= (j - i) * blocks.block_k
    return jnp.where(seen, scores, _UNSEEN)


def _dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    return lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((), ())), preferred_element_type=jnp.float32)
