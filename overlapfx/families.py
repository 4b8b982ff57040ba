"""The shape of the network of every model family, one frozen dataclass for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from overlapfx.fields import Choices, Fraction, NonNegativeFloat, Positive, PositiveFloat, Section, check_field


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
    """What all families have; sizes are global, in elements.

    family: the file in models/. seq_len: tokens that go into the network per sequence.
    num_kv_heads: equal to num_heads for multi-head attention, a divisor of it for grouped-query attention.
    remat: what the backward pass recomputes: "none", "all", or "attention" (all but the attention context and the
        output projection, which are saved).
    """

    _where: ClassVar[str] = "model."
    continues_text: ClassVar[bool] = False  # whether it can write what follows a prompt
    reads_text: ClassVar[bool] = True  # as bytes, so that its vocabulary has at least these
    takes_row_stripes: ClassVar[bool] = True  # whether overlap.row_stripes may be above 1
    family: str
    vocab_size: Positive
    num_layers: Positive
    d_model: Positive
    d_ff: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: Positive
    seq_len: Positive
    positions: Annotated[str, Choices(("rotary", "learned"))]
    activation: Annotated[str, Choices(("gelu", "relu", "silu"))]
    gated: bool
    dropout: Fraction
    remat: Annotated[str, Choices(("none", "all", "attention"))]
    compute_dtype: Annotated[str, Choices(("bfloat16", "float32"))]


@dataclasses.dataclass(frozen=True)
class GPTConfig(ModelConfig):
    """A decoder-only transformer."""

    continues_text: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class BertConfig(ModelConfig):
    """A bidirectional encoder."""


@dataclasses.dataclass(frozen=True)
class T5Config(ModelConfig):
    """An encoder of num_layers over seq_len tokens, a decoder of num_decoder_layers over target_len.

    Distances between tokens fall into num_buckets for each stack, one for all beyond max_distance; see
    layers/relative.py.
    """

    takes_row_stripes: ClassVar[bool] = False
    positions: Annotated[str, Choices(("relative",))]
    num_decoder_layers: Positive
    target_len: Positive
    num_buckets: Positive
    max_distance: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_distances(self.num_buckets, self.max_distance)


@dataclasses.dataclass(frozen=True)
class MoEConfig(ModelConfig):
    """A decoder in which every second layer has num_experts perceptrons, of which a token uses experts_per_token.

    gated: of the other layers; gated_experts: of the experts. capacity_factor: places that a sequence has with each
    expert, over the even share. balance_weight, router_z_weight: what the two auxiliary losses of a mixture layer count
    beside the loss per token, in the gradient only; see layers/moe_routing.py for what they are.
    """

    continues_text: ClassVar[bool] = True
    gated_experts: bool
    num_experts: Positive
    experts_per_token: Positive
    capacity_factor: PositiveFloat
    balance_weight: NonNegativeFloat
    router_z_weight: NonNegativeFloat

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers % 2:
            raise ValueError(
                f"model.num_layers is {self.num_layers}; it must be even, since dense and mixture layers take turns."
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"model.experts_per_token is {self.experts_per_token}, more than model.num_experts = "
                f"{self.num_experts}; use at most that."
            )


@dataclasses.dataclass(frozen=True)
class ConformerConfig(ModelConfig):
    """An encoder of speech. A token is four frames of log-mel features, so a clip has 4 * seq_len * hop samples.

    objective: "ctc" transcribes: target_len labels at most, the characters of `alphabet`, whose numbers start at 1.
        "masked" finds the codes of hidden frames, vocab_size codes of code_dim numbers; see layers/quantizer.py.
    sample_rate: samples per second. window, hop: samples that a frame sees, and from one frame to the next.
    conv_channels: between the two convolutions that make tokens of frames. kernel_size: tokens that the convolution of
        a layer sees.
    num_buckets, max_distance: of the bias by distance, as for T5.
    """

    reads_text: ClassVar[bool] = False
    positions: Annotated[str, Choices(("relative",))]
    objective: Annotated[str, Choices(("ctc", "masked"))]
    alphabet: str
    target_len: Positive
    code_dim: Positive
    sample_rate: Positive
    window: Positive
    hop: Positive
    num_mels: Positive
    conv_channels: Positive
    kernel_size: Positive
    num_buckets: Positive
    max_distance: Positive

    @property
    def clip_len(self) -> int:
        """Samples of a clip."""
        return 4 * self.seq_len * self.hop

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_distances(self.num_buckets, self.max_distance)
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"model.kernel_size is {self.kernel_size}; it must be odd, so that a convolution has a middle."
            )
        if self.objective == "ctc":
            self._check_labels()

    def _check_labels(self) -> None:
        if not self.alphabet or len(set(self.alphabet)) < len(self.alphabet):
            raise ValueError(f"model.alphabet is {self.alphabet!r}; give every character of the transcripts once.")
        if self.vocab_size <= len(self.alphabet):
            raise ValueError(
                f"model.vocab_size is {self.vocab_size}, but there are {len(self.alphabet)} characters in "
                f"model.alphabet and a blank; use at least {len(self.alphabet) + 1}."
            )
        if self.target_len > self.seq_len:
            raise ValueError(
                f"model.target_len is {self.target_len}, but a token says one label at most and model.seq_len is "
                f"{self.seq_len}; use at most that."
            )


FAMILIES: Mapping[str, type[ModelConfig]] = {
    "gpt": GPTConfig,
    "bert": BertConfig,
    "t5": T5Config,
    "moe": MoEConfig,
    "conformer": ConformerConfig,
}


def _check_distances(num_buckets: int, max_distance: int) -> None:
    if num_buckets % 4:
        raise ValueError(
            f"model.num_buckets is {num_buckets}; it must be a multiple of 4, for two directions with near "
            "and far distances each."
        )
    if max_distance <= num_buckets // 2:
        raise ValueError(
            f"model.max_distance is {max_distance}, but the nearest {num_buckets // 2} distances (half "
            f"of model.num_buckets) have buckets of their own; use at least {num_buckets // 2 + 1}."
        )


def config_class(values: Mapping[str, Any]) -> type[ModelConfig]:
    """The dataclass for the family that `values` name; raises a one-sentence ValueError if they name none."""
    if "family" not in values:
        raise ValueError("model.family is missing; every field of the config must be given.")
    check_field("model.family", values["family"], Annotated[str, Choices(tuple(FAMILIES))])
    return FAMILIES[values["family"]]
