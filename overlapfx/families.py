"""The shape of the network of every model family, one frozen dataclass for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from overlapfx.fields import Choices, Fraction, Positive, Section, check_field


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
        if self.num_buckets % 4:
            raise ValueError(
                f"model.num_buckets is {self.num_buckets}; it must be a multiple of 4, for two directions with near "
                "and far distances each."
            )
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"model.max_distance is {self.max_distance}, but the nearest {self.num_buckets // 2} distances (half "
                f"of model.num_buckets) have buckets of their own; use at least {self.num_buckets // 2 + 1}."
            )


FAMILIES: Mapping[str, type[ModelConfig]] = {"gpt": GPTConfig, "bert": BertConfig, "t5": T5Config}


def config_class(values: Mapping[str, Any]) -> type[ModelConfig]:
    """The dataclass for the family that `values` name; raises a one-sentence ValueError if they name none."""
    if "family" not in values:
        raise ValueError("model.family is missing; every field of the config must be given.")
    check_field("model.family", values["family"], Annotated[str, Choices(tuple(FAMILIES))])
    return FAMILIES[values["family"]]
