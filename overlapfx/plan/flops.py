"""Floating-point operations of a training step, counted by hand-checkable formulas."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from overlapfx.families import ConformerConfig, ModelConfig, MoEConfig, T5Config


@dataclasses.dataclass(frozen=True)
class StepFlops:
    """FLOPs of one step over the whole mesh: `model` for MFU, `hardware` (model plus recomputation) for HFU.

    Recomputation is what rematerialisation asks for; that a fused attention kernel computes scores again by itself, to
    find its gradients, does not count.
    """

    model: float
    hardware: float


@dataclasses.dataclass(frozen=True)
class _Layer:
    """Forward FLOPs of a layer over one sequence, by what becomes of the product in the backward pass.

    A product of the sort `last` ends the layer, so that no gradient needs its value; `saved` ones (attention's context
    and output) are kept by remat "attention".
    """

    other: float = 0.0
    saved: float = 0.0
    last: float = 0.0

    def __add__(self, more: _Layer) -> _Layer:
        return _Layer(self.other + more.other, self.saved + more.saved, self.last + more.last)

    @property
    def forward(self) -> float:
        return self.other + self.saved + self.last

    def recomputed(self, remat: str) -> float:
        return {"none": 0.0, "all": self.other + self.saved, "attention": self.other}[remat]


def decoder_step(model: ModelConfig, num_sequences: int) -> StepFlops:
    """A decoder-only transformer trained on `num_sequences` sequences of model.seq_len tokens.

    Recomputed with remat "all": every product of a layer but its last, whose value no gradient needs. With "attention":
    the projections to query, key and value, the scores, and the widening product.
    """
    return _one_stack(model, num_sequences, causal=True)


def encoder_step(model: ModelConfig, num_sequences: int) -> StepFlops:
    """The same for a bidirectional encoder, whose queries see all keys; every token has logits, counted or not."""
    return _one_stack(model, num_sequences, causal=False)


def encoder_decoder_step(model: T5Config, num_sequences: int) -> StepFlops:
    """The same for an encoder over model.seq_len tokens and a decoder over model.target_len with cross-attention."""
    source, target = model.seq_len, model.target_len
    encoder = _attention(model, source, source, causal=False) + _mlp(model, source)
    decoder = _attention(model, target, target, causal=True) + _attention(model, target, source, causal=False)
    stacks = [(model.num_layers, encoder), (model.num_decoder_layers, decoder + _mlp(model, target))]
    return _step(model, num_sequences, stacks, num_logits=target)


def mixture_step(model: MoEConfig, num_sequences: int) -> StepFlops:
    """The same for a decoder in which every second layer is a mixture of experts.

    Counted is what the tokens need: the router, and the experts that a token chooses, whether they have room for it or
    not. That the program computes an expert's empty places too counts as little as the masked half of attention.
    """
    length = model.seq_len
    attention = _attention(model, length, length, causal=True)
    router = _Layer(other=2 * length * model.d_model * model.num_experts)
    expert = _mlp(dataclasses.replace(model, gated=model.gated_experts), length * model.experts_per_token)
    layers = (attention + _mlp(model, length), attention + router + expert)
    return _step(model, num_sequences, [(model.num_layers // 2, layer) for layer in layers], num_logits=length)


def speech_step(model: ConformerConfig, num_sequences: int) -> StepFlops:
    """A conformer: two perceptrons, attention that sees all of a clip, and a convolution in every layer.

    Of a layer's convolution the projections count, 3 M^2 multiply-adds a token. What is no product of matrices does not
    count here either: the convolution of each channel along time, kernel_size * M multiply-adds a token (0.007 % of
    those of the 10B config). Nor do the features and the targets, which have no parameters and no gradient. The first
    of the convolutions that make tokens of frames has no gradient of its input. Recomputed with remat "all": every
    product of a layer, since the norm that ends it needs the value of the last one too; with "attention": all but
    context and output of the attention.
    """
    length = model.seq_len
    perceptron = _mlp(model, length).forward
    convolution = 3 * 2 * length * model.d_model**2
    layer = _attention(model, length, length, causal=False) + _Layer(other=2 * perceptron + convolution)
    first = 2 * 2 * length * 3 * model.num_mels * model.conv_channels  # at twice as many places as there are tokens
    second = 2 * length * 3 * model.conv_channels * model.d_model
    step = _step(model, num_sequences, [(model.num_layers, layer)], num_logits=length)
    outside = num_sequences * (2 * first + 3 * second)
    return StepFlops(model=step.model + outside, hardware=step.hardware + outside)


def _one_stack(model: ModelConfig, num_sequences: int, causal: bool) -> StepFlops:
    length = model.seq_len
    layer = _attention(model, length, length, causal) + _mlp(model, length)
    return _step(model, num_sequences, [(model.num_layers, layer)], num_logits=length)


def _step(model: ModelConfig, num_sequences: int, stacks: Sequence[tuple[int, _Layer]], num_logits: int) -> StepFlops:
    logits = 2 * num_logits * model.d_model * model.vocab_size
    forward = sum(num_layers * layer.forward for num_layers, layer in stacks) + logits
    recomputed = sum(num_layers * layer.recomputed(model.remat) for num_layers, layer in stacks)
    return StepFlops(model=3 * num_sequences * forward, hardware=num_sequences * (3 * forward + recomputed))


def _attention(model: ModelConfig, num_queries: int, num_keys: int, causal: bool) -> _Layer:
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    project = 2 * model.d_model * (num_queries * heads + 2 * num_keys * kv_heads)
    scores = context = 2 * num_queries * num_keys * heads / (2 if causal else 1)  # a causal query sees half of the keys
    return _Layer(other=project + scores, saved=context + 2 * num_queries * heads * model.d_model)


def _mlp(model: ModelConfig, num_tokens: int) -> _Layer:
    product = 2 * num_tokens * model.d_model * model.d_ff
    return _Layer(other=product * (2 if model.gated else 1), last=product)
