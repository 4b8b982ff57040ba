"""The two-layer perceptron of the paper's figures 2 and 3."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from overlapfx.config import Overlap
from overlapfx.layers import param
from overlapfx.ops.collective_einsum import collective_einsum_grid

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"gelu": jax.nn.gelu, "relu": jax.nn.relu, "silu": jax.nn.silu}


class MLP(nnx.Module):
    """Gather the features, widen, activate, narrow, scatter the features: activations stay fully sharded between
    layers.

    gated: the activation multiplies a second projection, which shares the gather of the first.
    out_std: standard deviation of the narrowing weights, before division by the square root of their fan-in.
    name: what the names of its sites begin with.
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
        name: str = "mlp",
        rngs: nnx.Rngs,
    ) -> None:
        std = 1 / math.sqrt(d_model)
        self.up_DF = param.normal(rngs.params(), (d_model, d_ff), std, param.W_DF)
        self.gate_DF = param.normal(rngs.params(), (d_model, d_ff), std, param.W_DF) if gated else None
        self.down_FD = param.normal(rngs.params(), (d_ff, d_model), out_std / math.sqrt(d_ff), param.W_FD)
        self.activation = activation
        self.compute_dtype, self.overlap, self.name = compute_dtype, overlap, name

    def __call__(self, x_BTD: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Shards [y, -, x] in and out."""
        return self.stripes([x_BTD])[0]

    def stripes(self, xs_BTD: Sequence[Array]) -> list[Array]:
        """The same for several row stripes of a batch, each computing while the others communicate."""
        shared: dict[str, Any] = {
            "rhs_gather": {"d": "y"},
            "compute_dtype": self.compute_dtype,
            "overlap": self.overlap,
        }
        up: dict[str, Any] = {"lhs_gather": {"d": "x"}, "name": f"{self.name}.up", **shared}
        hs_BTF = widen("btd,df->btf", xs_BTD, self.up_DF, self.gate_DF, activation=self.activation, **up)
        down: dict[str, Any] = {"out_scatter": {"d": "x"}, "name": f"{self.name}.down", **shared}
        return [y_BTD for (y_BTD,) in collective_einsum_grid("btf,fd->btd", hs_BTF, [self.down_FD[...]], **down)]


def widen(
    spec: str,
    xs: Sequence[Array],
    up: nnx.Param,
    gate: nnx.Param | None,
    *,
    activation: str,
    **settings: Any,
) -> list[Array]:
    """The activated projection of every row stripe, gated if there is a `gate`; settings: of the collective einsum."""
    activate = ACTIVATIONS[activation]
    if gate is None:
        return [h for (h,) in collective_einsum_grid(spec, xs, [up[...]], activation=activate, **settings)]
    widened = collective_einsum_grid(spec, xs, [up[...], gate[...]], **settings)
    return [value * activate(opening) for value, opening in widened]
