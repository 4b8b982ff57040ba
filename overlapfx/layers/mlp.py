"""The two-layer perceptron of the paper's figures 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from overlapfx.config import Overlap
from overlapfx.layers import param
from overlapfx.ops.collective_einsum import collective_einsum, collective_einsum_multi

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu": jax.nn.gelu, "relu": jax.nn.relu, "silu": jax.nn.silu}


class MLP(nnx.Module):
    """Gather the features, widen, activate, narrow, scatter the features: activations stay fully sharded between
    layers.

    gated: the activation multiplies a second projection, which shares the gather of the first.
    out_std: standard deviation of the narrowing weights, before division by the square root of their fan-in.
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        activation: str,
        gated: bool,
        out_std: float,
        compute_dtype: Any,
        overlap: Overlap,
        rngs: nnx.Rngs,
    ) -> None:
        std = 1 / math.sqrt(d_model)
        self.up_DF = param.normal(rngs.params(), (d_model, d_ff), std, param.W_DF)
        self.gate_DF = param.normal(rngs.params(), (d_model, d_ff), std, param.W_DF) if gated else None
        self.down_FD = param.normal(rngs.params(), (d_ff, d_model), out_std / math.sqrt(d_ff), param.W_FD)
        self.activation = activation
        self.compute_dtype, self.overlap = compute_dtype, overlap

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Shards [y, -, x] in and out."""
        up: dict[str, Any] = {
            "lhs_gather": {"d": "x"},
            "rhs_gather": {"d": "y"},
            "compute_dtype": self.compute_dtype,
            "overlap": self.overlap,
            "name": "mlp.up",
        }
        activation = ACTIVATIONS[self.activation]
        if self.gate_DF is None:
            h_BTF = collective_einsum("btd,df->btf", x_BTD, self.up_DF[...], activation=activation, **up)
        else:
            weights = [self.up_DF[...], self.gate_DF[...]]
            up_BTF, gate_BTF = collective_einsum_multi("btd,df->btf", x_BTD, weights, **up)
            h_BTF = up_BTF * activation(gate_BTF)
        return collective_einsum(
            "btf,fd->btd",
            h_BTF,
            self.down_FD[...],
            rhs_gather={"d": "y"},
            out_scatter={"d": "x"},
            compute_dtype=self.compute_dtype,
            overlap=self.overlap,
            name="mlp.down",
        )
