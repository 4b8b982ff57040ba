"""A bidirectional encoder that tells hidden tokens from the others; it reads from top to bottom."""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Int

from models.gpt import GPT
from overlapfx.config import Overlap
from overlapfx.families import BertConfig
from overlapfx.layers.embed import token_scores
from overlapfx.plan.flops import encoder_step
from overlapfx.train.objectives import MaskedTokens
from overlapfx.types import Evaluation, PRNGKey, TextBatch


def build(model: BertConfig, overlap: Overlap) -> Callable[[PRNGKey], BERT]:
    """A function that makes the module, its parameters global and float32, from a key."""
    return lambda key: BERT(model, overlap, rngs=nnx.Rngs(params=key))


def objective(model: BertConfig) -> MaskedTokens:
    """The hidden tokens are predicted, all others are only read."""
    return MaskedTokens(model.seq_len, model.vocab_size)


step_flops = encoder_step


class BERT(GPT):
    """A GPT whose blocks look both ways; what its loss counts are the hidden tokens.

    Several documents may share a row: a token attends to those of its own segment only.
    """

    def __init__(self, model: BertConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        super().__init__(model, overlap, causal=False, rngs=rngs)

    def evaluate(self, batch: TextBatch, row_B: Int[Array, "B"]) -> Evaluation:
        """The loss, and accuracy: the share of hidden tokens whose likeliest guess is right."""
        logits_BTV = self(batch["inputs"], batch["segments"], row_B)
        return token_scores(logits_BTV, batch["targets"], batch["mask"])
