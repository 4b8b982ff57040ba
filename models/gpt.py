"""A decoder-only transformer, partitioned in one or two dimensions; it reads from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from overlapfx import compat
from overlapfx.config import ModelConfig, Overlap
from overlapfx.layers import param
from overlapfx.layers.attention import CONTEXT, OUTPUT, Attention
from overlapfx.layers.dropout import dropout
from overlapfx.layers.embed import Embedding, cross_entropy
from overlapfx.layers.mlp import MLP
from overlapfx.layers.norm import RMSNorm
from overlapfx.plan.flops import decoder_step
from overlapfx.types import Batch, PRNGKey

# What the backward pass finds saved of each layer, besides its input.
REMAT_POLICIES = {
    "all": jax.checkpoint_policies.nothing_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(CONTEXT, OUTPUT),
}


def build(model: ModelConfig, overlap: Overlap) -> Callable[[PRNGKey], GPT]:
    """A function that makes the module, its parameters global and float32, from a key."""
    return lambda key: GPT(model, overlap, rngs=nnx.Rngs(params=key))


step_flops = decoder_step


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        # Residual branches start small, so that the sum over all layers keeps the scale of one.
        shared: dict[str, Any] = {
            "d_model": model.d_model,
            "out_std": 1 / math.sqrt(2 * model.num_layers),
            "compute_dtype": jnp.dtype(model.compute_dtype),
            "overlap": overlap,
            "rngs": rngs,
        }
        self.attention_norm = RMSNorm(d_model=model.d_model)
        self.attention = Attention(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rotary=model.positions == "rotary",
            **shared,
        )
        self.mlp_norm = RMSNorm(d_model=model.d_model)
        self.mlp = MLP(d_ff=model.d_ff, activation=model.activation, gated=model.gated, **shared)
        self.dropout_rate = model.dropout

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments_BT: Int[Array, "B T"],
        row_B: Int[Array, "B"],
        key: PRNGKey | None,
    ) -> Float[Array, "B T D"]:
        """Shards [y, -, x]; `key` draws this layer's dropout, None switches it off."""
        keys = (None, None) if key is None else jax.random.split(key)
        attended_BTD = self.attention(self.attention_norm(x_BTD), segments_BT)
        x_BTD = x_BTD + dropout(attended_BTD, self.dropout_rate, keys[0], row_B)
        return x_BTD + dropout(self.mlp(self.mlp_norm(x_BTD)), self.dropout_rate, keys[1], row_B)


class GPT(nnx.Module):
    """Embedding, a stack of blocks under scan, norm, logits from the embedding table. Called inside shard_map."""

    def __init__(self, model: ModelConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        self.embed = Embedding(
            vocab_size=model.vocab_size,
            d_model=model.d_model,
            compute_dtype=jnp.dtype(model.compute_dtype),
            overlap=overlap,
            rngs=rngs,
        )
        learned = model.positions == "learned"
        table = (model.seq_len, model.d_model)
        self.position_TD = param.normal(rngs.params(), table, 0.02, param.TABLE_TD) if learned else None
        layer_keys = jax.random.split(rngs.params(), model.num_layers)
        # One block whose parameters carry a leading layer dimension: compiled once, however deep the model.
        self.blocks = nnx.vmap(lambda key: Block(model, overlap, rngs=nnx.Rngs(params=key)))(layer_keys)
        self.final_norm = RMSNorm(d_model=model.d_model)
        self.num_layers, self.remat, self.dropout_rate = model.num_layers, model.remat, model.dropout

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        segments_BT: Int[Array, "B T"],
        row_B: Int[Array, "B"],
        key: PRNGKey | None = None,
    ) -> Float[Array, "B T V"]:
        """float32 logits [y, -, x] for tokens [y, -]."""
        x_BTD = self.embed.encode(tokens_BT)
        if self.position_TD is not None:
            x_BTD = x_BTD + self.position_TD[: x_BTD.shape[1]].astype(x_BTD.dtype)
        # Between layers activations differ on every device; scan wants that said before the first one.
        x_BTD = compat.vary(x_BTD, compat.varying_axes(tokens_BT) | {"y", "x"})
        template, stacked = nnx.split(self.blocks)

        def layer(x: Array, params_and_index: tuple[Any, Array]) -> tuple[Array, None]:
            params, index = params_and_index
            layer_key = None if key is None else jax.random.fold_in(key, index)
            return nnx.merge(template, params)(x, segments_BT, row_B, layer_key), None

        if self.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.remat], prevent_cse=False)
        x_BTD, _ = lax.scan(layer, x_BTD, (stacked, jnp.arange(self.num_layers)))
        return self.embed.logits(self.final_norm(x_BTD))

    def loss(
        self, batch: Batch, row_B: Int[Array, "B"], key: PRNGKey | None = None
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Sum of the negative log likelihood over this device's counted tokens, in nats, and their number."""
        logits_BTV = self(batch["inputs"], batch["segments"], row_B, key)
        nll_BT = cross_entropy(logits_BTV, batch["targets"])
        return jnp.sum(nll_BT * batch["mask"]), jnp.sum(batch["mask"])
