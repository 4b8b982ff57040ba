"""A bidirectional encoder that tells hidden tokens from the others; it reads from top to bottom."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.gpt import Block
from overlapfx.config import Overlap
from overlapfx.families import BertConfig
from overlapfx.layers import param, stack
from overlapfx.layers.embed import Embedding, cross_entropy, token_scores
from overlapfx.layers.norm import RMSNorm
from overlapfx.plan.flops import encoder_step
from overlapfx.train.objectives import MaskedTokens
from overlapfx.types import Evaluation, PRNGKey, Scalar, TextBatch


def build(model: BertConfig, overlap: Overlap) -> Callable[[PRNGKey], BERT]:
    """A function that makes the module, its parameters global and float32, from a key."""
    return lambda key: BERT(model, overlap, rngs=nnx.Rngs(params=key))


def objective(model: BertConfig) -> MaskedTokens:
    """The hidden tokens are predicted, all others are only read."""
    return MaskedTokens(model.seq_len, model.vocab_size)


step_flops = encoder_step


class BERT(nnx.Module):
    """Embedding, a stack of blocks that look both ways, norm, logits from the embedding table. Called inside shard_map.

    Several documents may share a row: a token attends to those of its own segment only.
    """

    def __init__(self, model: BertConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
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
            lambda key: Block(model, overlap, causal=False, rngs=nnx.Rngs(params=key)), model.num_layers, rngs.params()
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
        """float32 logits [y, -, x] of every token, hidden or not, for tokens [y, -]."""
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
        """Sum of the negative log likelihood over this device's hidden tokens, in nats, and their number."""
        logits_BTV = self(batch["inputs"], batch["segments"], row_B, key)
        nll_BT = cross_entropy(logits_BTV, batch["targets"])
        return jnp.sum(nll_BT * batch["mask"]), jnp.sum(batch["mask"])

    def evaluate(self, batch: TextBatch, row_B: Int[Array, "B"]) -> Evaluation:
        """The loss, and accuracy: the share of hidden tokens whose likeliest guess is right."""
        logits_BTV = self(batch["inputs"], batch["segments"], row_B)
        return token_scores(logits_BTV, batch["targets"], batch["mask"])
