"""Multi-head and grouped-query self-attention with heads sharded over the model axis."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from overlapfx.config import Overlap
from overlapfx.layers import param
from overlapfx.ops.collective_einsum import collective_einsum, collective_einsum_multi

# Names for rematerialisation: what a policy may save of this layer.
CONTEXT, OUTPUT = "attention_context", "attention_output"


class Attention(nnx.Module):
    """Causal self-attention. Query, key and value share one gather of the features; each device attends with its own
    heads.

    num_kv_heads: num_heads for multi-head attention, a divisor of it for grouped-query attention.
    rotary: rotate queries and keys by their position.
    """

    def __init__(
        self,
        *,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: bool,
        out_std: float,
        compute_dtype: Any,
        overlap: Overlap,
        rngs: nnx.Rngs,
    ) -> None:
        std = 1 / math.sqrt(d_model)
        heads, kv_heads = (d_model, num_heads, head_dim), (d_model, num_kv_heads, head_dim)
        self.query_DNH = param.normal(rngs.params(), heads, std, param.W_DNH)
        self.key_DKH = param.normal(rngs.params(), kv_heads, std, param.W_DNH)
        self.value_DKH = param.normal(rngs.params(), kv_heads, std, param.W_DNH)
        out_std /= math.sqrt(num_heads * head_dim)
        self.out_NHD = param.normal(rngs.params(), (num_heads, head_dim, d_model), out_std, param.W_NHD)
        self.rotary, self.compute_dtype, self.overlap = rotary, compute_dtype, overlap

    def __call__(self, x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Shards [y, -, x] in and out. A token attends to earlier tokens of its own segment and to itself."""
        q_BTNH, k_BTKH, v_BTKH = collective_einsum_multi(
            "btd,dnh->btnh",
            x_BTD,
            [self.query_DNH[...], self.key_DKH[...], self.value_DKH[...]],
            lhs_gather={"d": "x"},
            rhs_gather={"d": "y"},
            compute_dtype=self.compute_dtype,
            overlap=self.overlap,
            name="attention.qkv",
        )
        if self.rotary:
            q_BTNH, k_BTKH = rotate(q_BTNH), rotate(k_BTKH)
        context_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, causal_mask(segments_BT))
        out_BTD = collective_einsum(
            "btnh,nhd->btd",
            checkpoint_name(context_BTNH, CONTEXT),
            self.out_NHD[...],
            rhs_gather={"d": "y"},
            out_scatter={"d": "x"},
            compute_dtype=self.compute_dtype,
            overlap=self.overlap,
            name="attention.out",
        )
        return checkpoint_name(out_BTD, OUTPUT)


def causal_mask(segments_BT: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """True where the query (first T) may see the key (second T): not later, and of the same segment."""
    num_tokens = segments_BT.shape[1]
    causal_TT = jnp.tril(jnp.ones((num_tokens, num_tokens), bool))
    return causal_TT & (segments_BT[:, :, None] == segments_BT[:, None, :])


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BTKH: Float[Array, "B T K H"],
    v_BTKH: Float[Array, "B T K H"],
    mask_BTS: Bool[Array, "B T T"],
) -> Float[Array, "B T N H"]:
    """Softmax attention, scores in float32; query head n uses key head n // (N / K). Every query must see some key."""
    batch, num_tokens, num_heads, head_dim = q_BTNH.shape
    kv_heads = k_BTKH.shape[2]
    q_BTKGH = q_BTNH.reshape(batch, num_tokens, kv_heads, num_heads // kv_heads, head_dim)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32)
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS / math.sqrt(head_dim), -jnp.inf)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BTKH.dtype)
    context_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BTKH, preferred_element_type=jnp.float32)
    return context_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def rotate(x_BTNH: Float[Array, "B T N H"], base: float = 10_000.0) -> Float[Array, "B T N H"]:
    """Rotary position embedding (Su et al., 2021): pairs (h, h + H/2) turn by position * base^(-2h/H). H is even."""
    half = x_BTNH.shape[-1] // 2
    position_T = jnp.arange(x_BTNH.shape[1], dtype=jnp.float32)
    angle_TH = position_T[:, None] * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    sin, cos = jnp.sin(angle_TH)[:, None, :], jnp.cos(angle_TH)[:, None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
