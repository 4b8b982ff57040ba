"""Multi-head and grouped-query self-attention with heads sharded over the model axis."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.layers import param
from overlapfx.layers.cudnn_attention import cudnn_attend, cudnn_obstacle
from overlapfx.layers.fused_attention import CONTEXT, fused_attend, obstacle
from overlapfx.ops import layout
from overlapfx.ops.collective_einsum import (
    collective_einsum,
    collective_einsum_grid,
    collective_einsum_multi,
)

_log = logging.getLogger(__name__)
# For rematerialisation: what a policy may save of this layer, besides CONTEXT.
OUTPUT = "attention_output"
# By platform: attention as one kernel, and what tells why it cannot be.
_KERNELS: dict[str, tuple[Callable[..., Array], Callable[..., str | None]]] = {
    "tpu": (fused_attend, obstacle),
    "gpu": (cudnn_attend, cudnn_obstacle),
}


class Attention(nnx.Module):
    """Self-attention, causal or not, and attention to another sequence. Query, key and value share one gather of the
    features (key and value, if they come from elsewhere); each device attends with its own heads.

    num_kv_heads: num_heads for multi-head attention, a divisor of it for grouped-query attention.
    rotary: rotate queries and keys by their position.
    fused: attention as one kernel: "on", "off", or "auto", on TPU and GPU where it can be; where not, the log says why.
    name: what the names of its sites begin with.
    """

    def __init__(
        self,
        *,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary: bool,
        causal: bool = True,
        out_std: float,
        compute_dtype: Any,
        overlap: Overlap,
        fused: str = "auto",
        name: str = "attention",
        rngs: nnx.Rngs,
    ) -> None:
        std = 1 / math.sqrt(d_model)
        heads, kv_heads = (d_model, num_heads, head_dim), (d_model, num_kv_heads, head_dim)
        self.query_DNH = param.normal(rngs.params(), heads, std, param.W_DNH)
        self.key_DKH = param.normal(rngs.params(), kv_heads, std, param.W_DNH)
        self.value_DKH = param.normal(rngs.params(), kv_heads, std, param.W_DNH)
        out_std /= math.sqrt(num_heads * head_dim)
        self.out_NHD = param.normal(rngs.params(), (num_heads, head_dim, d_model), out_std, param.W_NHD)
        self.rotary, self.causal, self.fused = rotary, causal, fused
        self.compute_dtype, self.overlap, self.name = compute_dtype, overlap, name

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments_BT: Int[Array, "B T"],
        bias_NTS: Float[Array, "N T S"] | None = None,
        source: tuple[Float[Array, "B S D"], Int[Array, "B S"]] | None = None,
    ) -> Float[Array, "B T D"]:
        """Shards [y, -, x] in and out. A token attends to its own segment (if causal, to no later token).

        bias_NTS: added to the scores of this device's heads, float32. source: another sequence, with its segments, to
        attend to; every segment of a query must have a key there.
        """
        return self.stripes([x_BTD], [segments_BT], bias_NTS, source)[0]

    def stripes(
        self,
        xs_BTD: Sequence[Array],
        segments_BT: Sequence[Array],
        bias_NTS: Float[Array, "N T S"] | None = None,
        source: tuple[Float[Array, "B S D"], Int[Array, "B S"]] | None = None,
    ) -> list[Array]:
        """The same for several row stripes of a batch, each computing while the others communicate.

        With a `source` there is one stripe.
        """
        contexts_BTNH = []
        for (q_BTNH, k_BSKH, v_BSKH), own_BT in zip(self._project(xs_BTD, source), segments_BT, strict=True):
            source_BS = own_BT if source is None else source[1]
            contexts_BTNH.append(self._attend(q_BTNH, k_BSKH, v_BSKH, own_BT, source_BS, bias_NTS))
        outs = collective_einsum_grid(
            "btnh,nhd->btd",
            contexts_BTNH,
            [self.out_NHD[...]],
            rhs_gather={"d": "y"},
            out_scatter={"d": "x"},
            compute_dtype=self.compute_dtype,
            overlap=self.overlap,
            name=f"{self.name}.out",
        )
        return [checkpoint_name(out_BTD, OUTPUT) for (out_BTD,) in outs]

    def _attend(
        self, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array, segments_BT: Array, source_BS: Array, bias_NTS: Array | None
    ) -> Array:
        if self.rotary:
            q_BTNH, k_BSKH = rotate(q_BTNH), rotate(k_BSKH)
        fused = self._kernel(q_BTNH, k_BSKH, bias_NTS)
        if fused is not None:
            operands, labels = [q_BTNH, k_BSKH, v_BSKH, segments_BT, source_BS], ["btnh", "bsnh", "bsnh", "bt", "bs"]
            if bias_NTS is not None:
                operands, labels = [*operands, bias_NTS], [*labels, "nts"]
            return layout.on_each_device(functools.partial(fused, causal=self.causal), labels, "btnh")(*operands)
        mask_BTS = segment_mask(segments_BT, source_BS, self.causal)
        return checkpoint_name(attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS, bias_NTS), CONTEXT)

    def _kernel(self, q_BTNH: Array, k_BSKH: Array, bias_NTS: Array | None) -> Callable[..., Array] | None:
        """The platform's kernel, None if it is not to be fused; raises ValueError where it must be and cannot be."""
        platform = compat.target_platform()
        if self.fused == "off" or (self.fused == "auto" and platform not in _KERNELS):
            return None
        kernel, obstacle_to = _KERNELS.get(platform, _KERNELS["tpu"])  # which is interpreted anywhere else
        num_tokens, head_dim = q_BTNH.shape[1], q_BTNH.shape[-1]
        what = {"causal": self.causal, "biased": bias_NTS is not None}
        why = obstacle_to(num_tokens, k_BSKH.shape[1], head_dim, q_BTNH.dtype, **what)
        if why is not None and self.fused == "on":
            raise ValueError(f"{self.name} cannot be one kernel because {why}; use fused='auto' or 'off'.")
        if why is not None:
            _say_once(f"{self.name} is not one kernel because {why}.")
        return kernel if why is None else None

    def _project(
        self, xs_BTD: Sequence[Array], source: tuple[Float[Array, "B S D"], Int[Array, "B S"]] | None
    ) -> list[list[Array]]:
        """Queries, keys and values of each stripe; one gather for all three without a source."""
        gathers: dict[str, Any] = {
            "lhs_gather": {"d": "x"},
            "rhs_gather": {"d": "y"},
            "compute_dtype": self.compute_dtype,
            "overlap": self.overlap,
        }
        query, key, value = self.query_DNH[...], self.key_DKH[...], self.value_DKH[...]
        if source is None:
            name = f"{self.name}.qkv"
            return collective_einsum_grid("btd,dnh->btnh", xs_BTD, [query, key, value], name=name, **gathers)
        (x_BTD,) = xs_BTD
        q = collective_einsum("btd,dnh->btnh", x_BTD, query, name=f"{self.name}.q", **gathers)
        kv = collective_einsum_multi("btd,dnh->btnh", source[0], [key, value], name=f"{self.name}.kv", **gathers)
        return [[q, *kv]]


@functools.cache
def _say_once(what: str) -> None:
    """A model has many layers alike, each traced several times."""
    _log.warning(what)


def segment_mask(
    query_segments_BT: Int[Array, "B T"], key_segments_BS: Int[Array, "B S"], causal: bool
) -> Bool[Array, "B T S"]:
    """True where the query may see the key: of the same segment and, if `causal`, not later."""
    same_BTS = query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    return same_BTS & jnp.tril(jnp.ones(same_BTS.shape[1:], bool)) if causal else same_BTS


def attend(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask_BTS: Bool[Array, "B T S"],
    bias_NTS: Float[Array, "N T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Softmax attention, scores in float32; query head n uses key head n // (N / K). Every query must see some key."""
    batch, num_tokens, num_heads, head_dim = q_BTNH.shape
    kv_heads = k_BSKH.shape[2]
    grouped = (kv_heads, num_heads // kv_heads)
    q_BTKGH = q_BTNH.reshape(batch, num_tokens, *grouped, head_dim)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores_BKGTS = scores_BKGTS / math.sqrt(head_dim)
    if bias_NTS is not None:
        scores_BKGTS = scores_BKGTS + bias_NTS.reshape(*grouped, *bias_NTS.shape[1:])
    scores_BKGTS = jnp.where(mask_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1).astype(v_BSKH.dtype)
    context_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BSKH, preferred_element_type=jnp.float32)
    return context_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def rotate(x_BTNH: Float[Array, "B T N H"], base: float = 10_000.0) -> Float[Array, "B T N H"]:
    """Rotary position embedding (Su et al., 2021): pairs (h, h + H/2) turn by position * base^(-2h/H). H is even."""
    half = x_BTNH.shape[-1] // 2
    position_T = jnp.arange(x_BTNH.shape[1], dtype=jnp.float32)
    angle_TH = position_T[:, None] * base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    sin, cos = jnp.sin(angle_TH)[:, None, :], jnp.cos(angle_TH)[:, None, :]
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
