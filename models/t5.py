"""An encoder-decoder that writes what was cut out of a text; it reads from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from overlapfx.config import Overlap
from overlapfx.families import T5Config
from overlapfx.layers import stack
from overlapfx.layers.attention import Attention
from overlapfx.layers.dropout import dropout
from overlapfx.layers.embed import Embedding, cross_entropy, token_scores
from overlapfx.layers.mlp import MLP
from overlapfx.layers.norm import RMSNorm
from overlapfx.layers.relative import RelativeBias, vary_like
from overlapfx.plan.flops import encoder_decoder_step
from overlapfx.train.objectives import SpanCorruption
from overlapfx.types import Evaluation, PRNGKey, Scalar, SpanBatch


def build(model: T5Config, overlap: Overlap) -> Callable[[PRNGKey], T5]:
    """A function that makes the module, its parameters global and float32, from a key."""
    return lambda key: T5(model, overlap, rngs=nnx.Rngs(params=key))


def objective(model: T5Config) -> SpanCorruption:
    """Spans that were cut out of the inputs are the targets."""
    return SpanCorruption(model.seq_len, model.target_len, model.vocab_size)


step_flops = encoder_decoder_step


class Block(nnx.Module):
    """x + attention(norm(x)), in the decoder x + cross-attention(norm(x)) to the encoded text, x + mlp(norm(x))."""

    def __init__(self, model: T5Config, overlap: Overlap, *, decoder: bool, rngs: nnx.Rngs) -> None:
        where = "decoder" if decoder else "encoder"
        # Residual branches start small, so that the sum over all layers keeps the scale of one.
        branches = 3 * model.num_decoder_layers if decoder else 2 * model.num_layers
        shared: dict[str, Any] = {
            "d_model": model.d_model,
            "out_std": 1 / math.sqrt(branches),
            "compute_dtype": jnp.dtype(model.compute_dtype),
            "overlap": overlap,
            "rngs": rngs,
        }

        def attention(name: str, causal: bool) -> Attention:
            return Attention(
                num_heads=model.num_heads,
                num_kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                rotary=False,
                causal=causal,
                name=f"{where}.{name}",
                **shared,
            )

        self.attention_norm = RMSNorm(d_model=model.d_model)
        self.attention = attention("attention", causal=decoder)
        self.cross_norm = RMSNorm(d_model=model.d_model) if decoder else None
        self.cross = attention("cross", causal=False) if decoder else None
        self.mlp_norm = RMSNorm(d_model=model.d_model)
        self.mlp = MLP(d_ff=model.d_ff, activation=model.activation, gated=model.gated, name=f"{where}.mlp", **shared)
        self.dropout_rate = model.dropout

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        segments_BT: Int[Array, "B T"],
        bias_NTT: Float[Array, "N T T"],
        row_B: Int[Array, "B"],
        key: PRNGKey | None,
        source: tuple[Float[Array, "B S D"], Int[Array, "B S"]] | None = None,
    ) -> Float[Array, "B T D"]:
        """Shards [y, -, x]; `source`: the encoded text with its segments, for a decoder; `key` draws the dropout."""
        keys = (None,) * 3 if key is None else jax.random.split(key, 3)
        attended_BTD = self.attention(self.attention_norm(x_BTD), segments_BT, bias_NTT)
        x_BTD = x_BTD + dropout(attended_BTD, self.dropout_rate, keys[0], row_B)
        if self.cross is not None and self.cross_norm is not None:
            read_BTD = self.cross(self.cross_norm(x_BTD), segments_BT, source=source)
            x_BTD = x_BTD + dropout(read_BTD, self.dropout_rate, keys[1], row_B)
        return x_BTD + dropout(self.mlp(self.mlp_norm(x_BTD)), self.dropout_rate, keys[2], row_B)


class T5(nnx.Module):
    """An encoder and a decoder, each a stack of blocks with a bias by distance, that share a table of embeddings, from
    which the logits come too. Called inside shard_map.
    """

    def __init__(self, model: T5Config, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        self.embed = Embedding(
            vocab_size=model.vocab_size,
            d_model=model.d_model,
            compute_dtype=jnp.dtype(model.compute_dtype),
            overlap=overlap,
            rngs=rngs,
        )

        def blocks(num_layers: int, decoder: bool) -> Any:
            def make(key: PRNGKey) -> Block:
                return Block(model, overlap, decoder=decoder, rngs=nnx.Rngs(params=key))

            return stack.make(make, num_layers, rngs.params())

        distances = {"num_buckets": model.num_buckets, "max_distance": model.max_distance}
        self.encoder_bias = RelativeBias(num_heads=model.num_heads, causal=False, rngs=rngs, **distances)
        self.encoder = blocks(model.num_layers, decoder=False)
        self.encoder_norm = RMSNorm(d_model=model.d_model)
        self.decoder_bias = RelativeBias(num_heads=model.num_heads, causal=True, rngs=rngs, **distances)
        self.decoder = blocks(model.num_decoder_layers, decoder=True)
        self.decoder_norm = RMSNorm(d_model=model.d_model)
        self.num_layers, self.num_decoder_layers, self.remat = model.num_layers, model.num_decoder_layers, model.remat

    def __call__(
        self,
        source_BS: Int[Array, "B S"],
        segments_BS: Int[Array, "B S"],
        tokens_BT: Int[Array, "B T"],
        row_B: Int[Array, "B"],
        key: PRNGKey | None = None,
    ) -> Float[Array, "B T V"]:
        """float32 logits [y, -, x] of what follows each of `tokens` [y, -], given the source [y, -]."""
        keys = (None, None) if key is None else jax.random.split(key)
        encoded_BSD = self._encode(source_BS, segments_BS, row_B, keys[0])
        # A row is text or all padding; what pads its targets sees the text too, and counts in no loss.
        target_segments_BT = jnp.broadcast_to(segments_BS[:, :1], tokens_BT.shape)
        x_BTD = self.embed.encode(tokens_BT)
        bias_NTT = vary_like(x_BTD, self.decoder_bias(x_BTD.shape[1], x_BTD.shape[1]))
        x_BTD = stack.run(
            self.decoder,
            x_BTD,
            lambda block, x, layer_key: block(
                x, target_segments_BT, bias_NTT, row_B, layer_key, (encoded_BSD, segments_BS)
            ),
            num_layers=self.num_decoder_layers,
            remat=self.remat,
            key=keys[1],
        )
        return self.embed.logits(self.decoder_norm(x_BTD))

    def _encode(
        self, source_BS: Int[Array, "B S"], segments_BS: Int[Array, "B S"], row_B: Int[Array, "B"], key: PRNGKey | None
    ) -> Float[Array, "B S D"]:
        x_BSD = self.embed.encode(source_BS)
        bias_NSS = vary_like(x_BSD, self.encoder_bias(x_BSD.shape[1], x_BSD.shape[1]))
        x_BSD = stack.run(
            self.encoder,
            x_BSD,
            lambda block, x, layer_key: block(x, segments_BS, bias_NSS, row_B, layer_key),
            num_layers=self.num_layers,
            remat=self.remat,
            key=key,
        )
        # float32, since its gradient is the sum over the layers of the decoder. It is gathered in the compute dtype.
        return self.encoder_norm(x_BSD.astype(jnp.float32))

    def loss(self, batch: SpanBatch, row_B: Int[Array, "B"], key: PRNGKey | None = None) -> tuple[Scalar, Scalar]:
        """Sum of the negative log likelihood over this device's counted targets, in nats, and their number."""
        nll_BT = cross_entropy(self._logits(batch, row_B, key), batch["targets"])
        return jnp.sum(nll_BT * batch["mask"]), jnp.sum(batch["mask"])

    def evaluate(self, batch: SpanBatch, row_B: Int[Array, "B"]) -> Evaluation:
        """The loss, and accuracy: the share of targets that are the likeliest after the right ones before them."""
        return token_scores(self._logits(batch, row_B, None), batch["targets"], batch["mask"])

    def _logits(self, batch: SpanBatch, row_B: Int[Array, "B"], key: PRNGKey | None) -> Float[Array, "B T V"]:
        shifted_BT = jnp.pad(batch["targets"][:, :-1], ((0, 0), (1, 0)))  # the decoder starts from a separator
        return self(batch["inputs"], batch["segments"], shifted_BT, row_B, key)
