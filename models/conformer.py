"""An encoder of speech that transcribes it, or learns from it alone; it reads from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from overlapfx.config import Overlap
from overlapfx.families import ConformerConfig
from overlapfx.layers import ctc, stack
from overlapfx.layers.attention import Attention
from overlapfx.layers.conv import FRAMES_PER_TOKEN, Convolution, Subsampling
from overlapfx.layers.dropout import add_stripes
from overlapfx.layers.embed import Embedding, cross_entropy, token_scores
from overlapfx.layers.logmel import log_mel, normalize
from overlapfx.layers.mlp import MLP
from overlapfx.layers.norm import RMSNorm
from overlapfx.layers.quantizer import nearest_codes
from overlapfx.layers.relative import RelativeBias, vary_like
from overlapfx.plan.flops import speech_step
from overlapfx.train.speech import HiddenSpeech, Transcription
from overlapfx.types import Evaluation, HiddenSpeechBatch, PRNGKey, Scalar, TranscribedBatch


def build(model: ConformerConfig, overlap: Overlap) -> Callable[[PRNGKey], Conformer]:
    """A function that makes the module, its parameters global and float32, from a key."""
    encoder = {"ctc": Transcriber, "masked": Pretrainer}[model.objective]
    return lambda key: encoder(model, overlap, rngs=nnx.Rngs(params=key))


def objective(model: ConformerConfig) -> Transcription | HiddenSpeech:
    """Transcripts, or the codes of what is hidden."""
    if model.objective == "ctc":
        return Transcription(model.sample_rate, model.clip_len, model.seq_len, model.alphabet, model.target_len)
    return HiddenSpeech(model.sample_rate, model.clip_len, model.seq_len)


step_flops = speech_step


class Block(nnx.Module):
    """Half of an MLP, attention, convolution, the other half, each on the norm of x and added to it; then a norm."""

    def __init__(self, model: ConformerConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        # Residual branches start small. The norm that ends a layer keeps their sum from growing over layers.
        shared: dict[str, Any] = {
            "d_model": model.d_model,
            "out_std": 1 / math.sqrt(4),
            "compute_dtype": jnp.dtype(model.compute_dtype),
            "overlap": overlap,
            "rngs": rngs,
        }

        def mlp(name: str) -> MLP:
            return MLP(d_ff=model.d_ff, activation=model.activation, gated=model.gated, name=name, **shared)

        self.first_norm, self.first_mlp = RMSNorm(d_model=model.d_model), mlp("first_mlp")
        self.attention_norm = RMSNorm(d_model=model.d_model)
        self.attention = Attention(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            rotary=False,
            causal=False,
            **shared,
        )
        self.conv_norm = RMSNorm(d_model=model.d_model)
        self.conv = Convolution(kernel_size=model.kernel_size, activation=model.activation, **shared)
        self.last_norm, self.last_mlp = RMSNorm(d_model=model.d_model), mlp("last_mlp")
        self.norm = RMSNorm(d_model=model.d_model)
        self.dropout_rate = model.dropout

    def __call__(
        self,
        xs_BTD: Sequence[Array],
        segments_BT: Sequence[Array],
        bias_NTT: Float[Array, "N T T"],
        rows_B: Sequence[Array],
        key: PRNGKey | None,
    ) -> tuple[Array, ...]:
        """Row stripes [y, -, x] of a batch; `key` draws this layer's dropout, None switches it off."""
        keys = (None,) * 4 if key is None else jax.random.split(key, 4)

        def add(xs_BTD: Sequence[Array], ys_BTD: Sequence[Array], part: int, scale: float = 1.0) -> Sequence[Array]:
            scaled_BTD = [scale * y_BTD for y_BTD in ys_BTD]
            return add_stripes(xs_BTD, scaled_BTD, self.dropout_rate, keys[part], rows_B)

        x = add(xs_BTD, self.first_mlp.stripes([self.first_norm(x) for x in xs_BTD]), 0, scale=0.5)
        x = add(x, self.attention.stripes([self.attention_norm(x) for x in x], segments_BT, bias_NTT), 1)
        is_speech_BT = [segments > 0 for segments in segments_BT]
        x = add(x, self.conv.stripes([self.conv_norm(x) for x in x], is_speech_BT), 2)
        x = add(x, self.last_mlp.stripes([self.last_norm(x) for x in x]), 3, scale=0.5)
        return tuple(self.norm(x) for x in x)


class Conformer(nnx.Module):
    """Log-mel features, convolutions that make tokens of them, a stack of blocks, logits. Called inside shard_map.

    What a clip becomes depends neither on the other clips of its batch nor on what follows its end.
    """

    def __init__(self, model: ConformerConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        self.subsampling = Subsampling(
            num_mels=model.num_mels,
            channels=model.conv_channels,
            d_model=model.d_model,
            activation=model.activation,
            compute_dtype=jnp.dtype(model.compute_dtype),
            overlap=overlap,
            rngs=rngs,
        )
        self.bias = RelativeBias(
            num_heads=model.num_heads,
            num_buckets=model.num_buckets,
            max_distance=model.max_distance,
            causal=False,
            rngs=rngs,
        )
        self.blocks = stack.make(
            lambda key: Block(model, overlap, rngs=nnx.Rngs(params=key)), model.num_layers, rngs.params()
        )
        # Nothing is looked up in this table: what comes in is speech.
        self.head = Embedding(
            vocab_size=model.vocab_size,
            d_model=model.d_model,
            compute_dtype=jnp.dtype(model.compute_dtype),
            overlap=overlap,
            rngs=rngs,
        )
        self.frames = {"sample_rate": model.sample_rate, "window": model.window, "hop": model.hop}
        self.num_mels, self.compute_dtype = model.num_mels, jnp.dtype(model.compute_dtype)
        self.num_layers, self.remat, self.row_stripes = model.num_layers, model.remat, overlap.row_stripes

    def hear(
        self, samples_BS: Int[Array, "B S"], length_B: Int[Array, "B"]
    ) -> tuple[Float[Array, "B F M"], Int[Array, "B T"]]:
        """Normalised log-mel features, zeros where a clip has ended, whole on every device along x; and segments, 1
        for the tokens that begin before the end of their clip, 0 for those after it.
        """
        features_BFM = log_mel(samples_BS, num_mels=self.num_mels, **self.frames)
        is_speech_BF = jnp.arange(features_BFM.shape[1]) * self.frames["hop"] < length_B[:, None]
        return normalize(features_BFM, is_speech_BF), is_speech_BF[:, ::FRAMES_PER_TOKEN].astype(jnp.int32)

    def __call__(
        self,
        features_BFM: Float[Array, "B F M"],
        segments_BT: Int[Array, "B T"],
        row_B: Int[Array, "B"],
        key: PRNGKey | None = None,
    ) -> Float[Array, "B T V"]:
        """float32 logits [y, -, x] for features [y, -, -], F = 4 T."""
        x_BTD = self.subsampling(features_BFM).astype(self.compute_dtype)
        bias_NTT = vary_like(x_BTD, self.bias(x_BTD.shape[1], x_BTD.shape[1]))
        segments, rows = stack.cut(segments_BT, self.row_stripes), stack.cut(row_B, self.row_stripes)
        xs_BTD = stack.run(
            self.blocks,
            stack.cut(x_BTD, self.row_stripes),
            lambda block, xs, layer_key: block(xs, segments, bias_NTT, rows, layer_key),
            num_layers=self.num_layers,
            remat=self.remat,
            key=key,
        )
        return self.head.logits(stack.join(xs_BTD))


class Transcriber(Conformer):
    """Tells the labels of a clip, without being told where in time each is."""

    def loss(
        self, batch: TranscribedBatch, row_B: Int[Array, "B"], key: PRNGKey | None = None
    ) -> tuple[Scalar, Scalar]:
        """Sum of the negative log likelihood over this device's clips, in nats, and the number of their labels."""
        logits_BTW, is_speech_BT = self._transcribe(batch, row_B, key)
        nll_B = ctc.negative_log_likelihood(logits_BTW, is_speech_BT, batch["labels"], batch["mask"])
        return jnp.sum(nll_B), jnp.sum(batch["mask"])

    def evaluate(self, batch: TranscribedBatch, row_B: Int[Array, "B"]) -> Evaluation:
        """The loss, and label_error: edits that mend the likeliest transcript, for each label of the right one."""
        logits_BTW, is_speech_BT = self._transcribe(batch, row_B, None)
        nll_B = ctc.negative_log_likelihood(logits_BTW, is_speech_BT, batch["labels"], batch["mask"])
        heard = ctc.greedy_labels(logits_BTW, is_speech_BT)
        edits_B = ctc.edit_distance(*heard, batch["labels"], batch["mask"]) * (batch["mask"][:, 0] > 0)
        count = jnp.sum(batch["mask"])
        return {"loss": (jnp.sum(nll_B), count), "label_error": (jnp.sum(edits_B).astype(jnp.float32), count)}

    def _transcribe(
        self, batch: TranscribedBatch, row_B: Int[Array, "B"], key: PRNGKey | None
    ) -> tuple[Float[Array, "B T W"], Bool[Array, "B T"]]:
        """Logits of all labels, and which tokens are speech."""
        features_BFM, segments_BT = self.hear(batch["samples"], batch["length"])
        logits_BTV = self(features_BFM, segments_BT, row_B, key)
        return ctc.whole_vocabulary(logits_BTV), segments_BT > 0


class Pretrainer(Conformer):
    """Tells the codes of tokens whose features are hidden, from those around them (BEST-RQ, Chiu et al., 2022)."""

    def __init__(self, model: ConformerConfig, overlap: Overlap, *, rngs: nnx.Rngs) -> None:
        super().__init__(model, overlap, rngs=rngs)
        self.codes = {"num_codes": model.vocab_size, "code_dim": model.code_dim}

    def loss(
        self, batch: HiddenSpeechBatch, row_B: Int[Array, "B"], key: PRNGKey | None = None
    ) -> tuple[Scalar, Scalar]:
        """Sum of the negative log likelihood over this device's hidden tokens, in nats, and their number."""
        logits_BTV, codes_BT = self._tell(batch, row_B, key)
        return jnp.sum(cross_entropy(logits_BTV, codes_BT) * batch["mask"]), jnp.sum(batch["mask"])

    def evaluate(self, batch: HiddenSpeechBatch, row_B: Int[Array, "B"]) -> Evaluation:
        """The loss, and accuracy: the share of hidden tokens whose likeliest code is the right one."""
        return token_scores(*self._tell(batch, row_B, None), batch["mask"])

    def _tell(
        self, batch: HiddenSpeechBatch, row_B: Int[Array, "B"], key: PRNGKey | None
    ) -> tuple[Float[Array, "B T V"], Int[Array, "B T"]]:
        """Logits, and the codes of what is there before anything is hidden."""
        features_BFM, segments_BT = self.hear(batch["samples"], batch["length"])
        codes_BT = nearest_codes(features_BFM.reshape(*segments_BT.shape, -1), **self.codes)
        # Hidden frames are the mean of their clip: zero.
        hidden_BF1 = jnp.repeat(batch["mask"], FRAMES_PER_TOKEN, axis=1)[..., None]
        return self(features_BFM * (1 - hidden_BF1), segments_BT, row_B, key), codes_BT
