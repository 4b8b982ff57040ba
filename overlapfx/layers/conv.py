"""Convolutions along time for speech, their channels sharded over the model axis; time is on every device whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from overlapfx.config import Overlap
from overlapfx.layers import param
from overlapfx.layers.mlp import ACTIVATIONS
from overlapfx.layers.norm import RMSNorm
from overlapfx.ops.collective_einsum import collective_einsum, collective_einsum_grid

_TAPS, _STRIDE = 3, 2
FRAMES_PER_TOKEN = _STRIDE**2


class Subsampling(nnx.Module):
    """Two convolutions along time of 3 taps and stride 2, each activated: a token for every four frames.

    The first one reads features that every device along x has whole, so nothing is gathered for it.
    """

    def __init__(
        self,
        *,
        num_mels: int,
        channels: int,
        d_model: int,
        activation: str,
        compute_dtype: Any,
        overlap: Overlap,
        rngs: nnx.Rngs,
    ) -> None:
        first, second = (_TAPS, num_mels, channels), (_TAPS, channels, d_model)
        self.first_KMC = param.normal(rngs.params(), first, 1 / math.sqrt(_TAPS * num_mels), param.TAPS_KMC)
        self.second_KCD = param.normal(rngs.params(), second, 1 / math.sqrt(_TAPS * channels), param.TAPS_KCD)
        self.activation, self.compute_dtype, self.overlap = ACTIVATIONS[activation], compute_dtype, overlap

    def __call__(self, frames_BFM: Float[Array, "B F M"]) -> Float[Array, "B T D"]:
        """Tokens [y, -, x] of frames [y, -, -], F = 4 T; token t sees frames 4 t - 3 to 4 t + 3."""
        taps_BTKM = strided_taps(frames_BFM.astype(self.compute_dtype))
        first_KMC = self.first_KMC[...].astype(self.compute_dtype)
        h_BTC = jnp.einsum("btkm,kmc->btc", taps_BTKM, first_KMC, preferred_element_type=jnp.float32)
        return collective_einsum(
            "btkc,kcd->btd",
            strided_taps(self.activation(h_BTC).astype(self.compute_dtype)),
            self.second_KCD[...],
            lhs_gather={"c": "x"},
            rhs_gather={"c": "y"},
            compute_dtype=self.compute_dtype,
            activation=self.activation,
            overlap=self.overlap,
            name="subsampling",
        )


def strided_taps(x_BTC: Float[Array, "B T C"]) -> Float[Array, "B S K C"]:
    """What a convolution of 3 taps and stride 2 sees: place s has x[2 s - 1], x[2 s], x[2 s + 1], zero before x[0].

    T is even, S = T / 2.
    """
    num_places = x_BTC.shape[1] // _STRIDE
    padded_BTC = jnp.pad(x_BTC, ((0, 0), (1, 0), (0, 0)))
    return jnp.stack([padded_BTC[:, k::_STRIDE][:, :num_places] for k in range(_TAPS)], axis=2)


class Convolution(nnx.Module):
    """The conformer's convolution (Gulati et al., 2020): widen by two, gate, convolve each channel along time, norm,
    activate, project back.

    The norm is over the channels of a token, not over the batch as in the publication: that way what a clip becomes
    depends neither on the other clips nor on how the mesh cuts the batch. Padding is read as zeros.

    kernel_size: taps of the convolution along time, odd, the middle one at the token itself.
    out_std: standard deviation of the last projection, before division by the square root of its fan-in.
    """

    def __init__(
        self,
        *,
        d_model: int,
        kernel_size: int,
        activation: str,
        out_std: float,
        compute_dtype: Any,
        overlap: Overlap,
        rngs: nnx.Rngs,
    ) -> None:
        std = 1 / math.sqrt(d_model)
        self.value_DC = param.normal(rngs.params(), (d_model, d_model), std, param.W_DF)
        self.gate_DC = param.normal(rngs.params(), (d_model, d_model), std, param.W_DF)
        taps = (kernel_size, d_model)
        self.taps_KC = param.normal(rngs.params(), taps, 1 / math.sqrt(kernel_size), param.TAPS_KC)
        self.norm = RMSNorm(d_model=d_model)
        self.out_CD = param.normal(rngs.params(), (d_model, d_model), out_std * std, param.W_FD)
        self.activation, self.compute_dtype, self.overlap = ACTIVATIONS[activation], compute_dtype, overlap

    def stripes(self, xs_BTD: Sequence[Array], is_speech_BT: Sequence[Bool[Array, "B T"]]) -> list[Array]:
        """Row stripes [y, -, x] of a batch in and out, each computing while the others communicate."""
        shared: dict[str, Any] = {
            "rhs_gather": {"d": "y"},
            "compute_dtype": self.compute_dtype,
            "overlap": self.overlap,
        }
        widened = collective_einsum_grid(
            "btd,dc->btc",
            xs_BTD,
            [self.value_DC[...], self.gate_DC[...]],
            lhs_gather={"d": "x"},
            name="conv.in",
            **shared,
        )
        hs_BTC = []
        for (value_BTC, gate_BTC), speech_BT in zip(widened, is_speech_BT, strict=True):
            gated_BTC = jnp.where(speech_BT[..., None], value_BTC * jax.nn.sigmoid(gate_BTC), 0)
            hs_BTC.append(self.activation(self.norm(depthwise(gated_BTC, self.taps_KC[...]))))
        outs = collective_einsum_grid(
            "btc,cd->btd", hs_BTC, [self.out_CD[...]], out_scatter={"d": "x"}, name="conv.out", **shared
        )
        return [out_BTD for (out_BTD,) in outs]


def depthwise(x_BTC: Float[Array, "B T C"], taps_KC: Float[Array, "K C"]) -> Float[Array, "B T C"]:
    """y[t] = sum over k of x[t + k - K // 2] * taps[k] for each channel by itself, zeros beyond the ends.

    Products and sums in float32, result in the dtype of x. Written as shifted products, which compilers fuse into one
    pass over x: nothing here is for a matrix unit.
    """
    num_tokens, num_taps = x_BTC.shape[1], taps_KC.shape[0]
    before = num_taps // 2
    padded_BTC = jnp.pad(x_BTC, ((0, 0), (before, num_taps - 1 - before), (0, 0))).astype(jnp.float32)
    shifted = [padded_BTC[:, k : k + num_tokens] * taps_KC[k] for k in range(num_taps)]
    return sum(shifted[1:], start=shifted[0]).astype(x_BTC.dtype)
