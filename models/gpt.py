"""A decoder-only transformer, partitioned in one or two dimensions; it reads from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from overlapfx.config import Overlap
from overlapfx.families import GPTConfig, ModelConfig
from overlapfx.layers import param, stack
from overlapfx.layers.attention import Attention
from overlapfx.layers.dropout import add_stripes
from overlapfx.layers.embed import Embedding, cross_entropy
from overlapfx.layers.mlp import MLP
from overlapfx.layers.norm import RMSNorm
from overlapfx.plan.flops import decoder_step
from overlapfx.train.objectives import NextToken
from overlapfx.types import Evaluation, PRNGKey, Scalar, TextBatch


def build(model: GPTConfig, overlap: Overlap) -> Callable[[PRNGKey], GPT]:
    """A function that makes the module, its parameters global and float32, from a key."""
    return lambda key: GPT(model, overlap, rngs=nnx.Rngs(params=key))


def objective(model: GPTConfig) -> NextToken:
    """Every token predicts the next one."""
    return NextToken(model.seq_len)


step_flops = decoder_step


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, model: ModelConfig, overlap: Overlap, *, causal: bool = True, rngs: nnx.Rngs) -> None:
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
            causal=causal,
            **shared,
        )
        self.mlp_norm = RMSNorm(d_model=model.d_model)
        self.mlp = MLP(d_ff=model.d_ff, activation=model.activation, gated=model.gated, **shared)
        self.dropout_rate = model.dropout

    def __call__(
        self,
        xs_BTD: Sequence[Array],
        segments_BT: Sequence[Array],
        rows_B: Sequence[Array],
        key: PRNGKey | None,
    ) -> tuple[Array, ...]:
        """Row stripes [y, -, x] of a batch; `key` draws this layer's dropout, None switches it off."""
        keys = (None, None) if key is None else jax.random.split(key)
        added = self.attention.stripes([self.attention_norm(x_BTD) for x_BTD in xs_BTD], segments_BT)
        xs_BTD = add_stripes(xs_BTD, added, self.dropout_rate, keys[0], rows_B)
        added = self.mlp.stripes([self.mlp_norm(x_BTD) for x_BTD in xs_BTD])
        return add_stripes(xs_BTD, added, self.dropout_rate, keys[1], rows_B)


class GPT(nnx.Module):
    """Embedding, a stack of blocks under scan, norm, logits from the embedding table. Called inside shard_map."""

    def __init__(self, model: ModelConfig, overlap: Overlap, *, causal: bool = True, rngs: nnx.Rngs) -> None:
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
        self.blocks = stack.make(
            lambda key: Block(model, overlap, causal=causal, rngs=nnx.Rngs(params=key)),
            model.num_layers,
            rngs.params(),
        )
        self.final_norm = RMSNorm(d_model=model.d_model)
        self.num_layers, self.remat, self.row_stripes = model.num_layers, model.remat, overlap.row_stripes

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
        segments, rows = stack.cut(segments_BT, self.row_stripes), stack.cut(row_B, self.row_stripes)
        xs_BTD = stack.run(
            self.blocks,
            stack.cut(x_BTD, self.row_stripes),
            lambda block, xs, layer_key: block(xs, segments, rows, layer_key),
            num_layers=self.num_layers,
            remat=self.remat,
            key=key,
        )
        return self.embed.logits(self.final_norm(stack.join(xs_BTD)))

    def loss(self, batch: TextBatch, row_B: Int[Array, "B"], key: PRNGKey | None = None) -> tuple[Scalar, Scalar]:
        """Sum of the negative log likelihood over this device's counted tokens, in nats, and their number."""
        logits_BTV = self(batch["inputs"], batch["segments"], row_B, key)
        nll_BT = cross_entropy(logits_BTV, batch["targets"])
        return jnp.sum(nll_BT * batch["mask"]), jnp.sum(batch["mask"])

    def evaluate(self, batch: TextBatch, row_B: Int[Array, "B"]) -> Evaluation:
        """The loss, without dropout."""
        return {"loss": self.loss(batch, row_B)}
