"""Token embedding and logits over a vocabulary that is sharded over the model axis."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from overlapfx.config import Overlap
from overlapfx.layers import param
from overlapfx.ops import ring
from overlapfx.ops.collective_einsum import collective_einsum
from overlapfx.types import Evaluation


class Embedding(nnx.Module):
    """One table for tokens on the way in and for logits on the way out, rows over x, features over y."""

    def __init__(self, *, vocab_size: int, d_model: int, compute_dtype: Any, overlap: Overlap, rngs: nnx.Rngs) -> None:
        self.table_VD = param.normal(rngs.params(), (vocab_size, d_model), 1 / math.sqrt(d_model), param.W_VD)
        self.compute_dtype, self.overlap = compute_dtype, overlap

    def encode(self, tokens_BT: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the table, scaled to unit variance: shard [y, -, x] of the features.

        Each device looks up the ids whose rows it has, zeros elsewhere, and the sum over x puts them together while it
        scatters the features. The table stays float32 until then, and so does the gradient's sum over tokens.
        """
        table_VD = ring.all_gather(self.table_VD[...], ("y",), dim=1)
        num_rows, d_model = table_VD.shape
        local_BT = tokens_BT - ring.index(("x",)) * num_rows
        mine_BT = (local_BT >= 0) & (local_BT < num_rows)
        rows_BTD = jnp.take(table_VD, jnp.where(mine_BT, local_BT, 0), axis=0)
        rows_BTD = jnp.where(mine_BT[..., None], rows_BTD, 0).astype(self.compute_dtype)
        return ring.psum_scatter(rows_BTD, ("x",), dim=2) * jnp.asarray(math.sqrt(d_model), self.compute_dtype)

    def logits(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """float32 logits of this device's shard of the vocabulary."""
        return collective_einsum(
            "btd,vd->btv",
            x_BTD,
            self.table_VD[...],
            lhs_gather={"d": "x"},
            rhs_gather={"d": "y"},
            compute_dtype=self.compute_dtype,
            out_dtype=jnp.float32,
            overlap=self.overlap,
            name="logits",
        )


def cross_entropy(logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Negative log likelihood of each target in nats, from logits whose vocabulary is sharded over x.

    Only two numbers per token cross the network, never a logit vector.
    """
    shifted_BTV = _below_largest(logits_BTV)
    log_sum_BT = jnp.log(lax.psum(jnp.sum(jnp.exp(shifted_BTV), axis=-1), "x"))
    return log_sum_BT - _at_targets(shifted_BTV, targets_BT)


def token_scores(
    logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"], mask_BT: Float[Array, "B T"]
) -> Evaluation:
    """How well this device's counted targets are predicted: loss in nats, accuracy (the likeliest token is right)."""
    count = jnp.sum(mask_BT)
    nll_BT, right_BT = cross_entropy(logits_BTV, targets_BT), is_likeliest(logits_BTV, targets_BT)
    return {"loss": (jnp.sum(nll_BT * mask_BT), count), "accuracy": (jnp.sum(right_BT * mask_BT), count)}


def is_likeliest(logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Whether no token has a larger logit than the target, from logits whose vocabulary is sharded over x."""
    return _at_targets(_below_largest(logits_BTV), targets_BT) == 0


def _below_largest(logits_BTV: Float[Array, "B T V"]) -> Float[Array, "B T V"]:
    """Logits less the largest one of their token, which is no part of any gradient."""
    largest_BT = lax.pmax(lax.stop_gradient(jnp.max(logits_BTV, axis=-1)), "x")
    return logits_BTV - largest_BT[..., None]


def _at_targets(logits_BTV: Float[Array, "B T V"], targets_BT: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """The targets' logits, wherever in the vocabulary they are."""
    num_rows = logits_BTV.shape[-1]
    local_BT = targets_BT - ring.index(("x",)) * num_rows
    mine_BT = (local_BT >= 0) & (local_BT < num_rows)
    picked_BT = jnp.take_along_axis(logits_BTV, jnp.where(mine_BT, local_BT, 0)[..., None], axis=-1)[..., 0]
    return lax.psum(jnp.where(mine_BT, picked_BT, 0), "x")
