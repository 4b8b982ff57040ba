"""A mixture of experts: perceptrons of which every token uses a few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from overlapfx.config import Overlap
from overlapfx.layers import param
from overlapfx.layers.mlp import widen
from overlapfx.layers.moe_routing import Routing, regroup, route
from overlapfx.ops import ring
from overlapfx.ops.collective_einsum import collective_einsum_grid

# What is told of each sequence besides its result, in this order; see Routing.
LOAD = ("balance_loss", "router_z_loss", "dropped_tokens")


class Mixture(nnx.Module):
    """Choose, send the tokens to the experts (all-to-all over y), widen, activate, narrow as the MLP does, send back,
    add what the chosen experts answer. Experts are cut over y, their hidden features over x.

    Dimensions besides those of overlapfx/types.py: E experts, K choices of a token, C places of a sequence with an
    expert, M = B C, and Q what is told of a sequence (LOAD).

    experts_per_token: K. capacity_factor: C is this many times the even share, K T / E, rounded up; a choice beyond is
    dropped, and the token goes on with what the others answer. gated, out_std, name: as for the MLP.
    """

    def __init__(
        self,
        *,
        d_model: int,
        d_ff: int,
        num_experts: int,
        experts_per_token: int,
        capacity_factor: float,
        activation: str,
        gated: bool,
        out_std: float,
        compute_dtype: Any,
        overlap: Overlap,
        name: str = "experts",
        rngs: nnx.Rngs,
    ) -> None:
        std, up = 1 / math.sqrt(d_model), (num_experts, d_model, d_ff)
        down, down_std = (num_experts, d_ff, d_model), out_std / math.sqrt(d_ff)
        self.router_DE = param.normal(rngs.params(), (d_model, num_experts), std, param.ROUTER_DE)
        self.up_EDF = param.normal(rngs.params(), up, std, param.W_EDF)
        self.gate_EDF = param.normal(rngs.params(), up, std, param.W_EDF) if gated else None
        self.down_EFD = param.normal(rngs.params(), down, down_std, param.W_EFD)
        self.experts_per_token, self.capacity_factor, self.activation = experts_per_token, capacity_factor, activation
        self.compute_dtype, self.overlap, self.name = compute_dtype, overlap, name

    def stripes(
        self, xs_BTD: Sequence[Array], segments_BT: Sequence[Array]
    ) -> tuple[list[Array], list[Float[Array, "B Q"]]]:
        """Row stripes [y, -, x] in and out, each computing while the others communicate, and their LOADs [y, -].

        segments: 0 marks padding, which no expert sees.
        """
        routings = [self._route(x_BTD, own_BT) for x_BTD, own_BT in zip(xs_BTD, segments_BT, strict=True)]
        pairs = list(zip(xs_BTD, routings, strict=True))
        tokens_EMD = [self._to_experts(_dispatch(x_BTD, r), r) for x_BTD, r in pairs]
        weights_EM = [self._to_experts(_weights(r), r)[..., 0] for r in routings]
        answers_EMD = self._experts(tokens_EMD, weights_EM)
        loads = [jnp.stack([r.balance_B, r.z_B, r.dropped_B], axis=-1) for r in routings]
        return [self._combine(e, x_BTD, r) for e, (x_BTD, r) in zip(answers_EMD, pairs, strict=True)], loads

    def _route(self, x_BTD: Float[Array, "B T D"], segments_BT: Int[Array, "B T"]) -> Routing:
        """In float32 to the last bit: which expert is likeliest should not depend on rounding."""
        logits_BTE = jnp.einsum(
            "btd,de->bte", x_BTD.astype(jnp.float32), self.router_DE[...], precision=lax.Precision.HIGHEST
        )
        num_tokens, num_experts = logits_BTE.shape[1:]
        return route(
            lax.psum(logits_BTE, "x"),
            segments_BT > 0,
            num_choices=self.experts_per_token,
            capacity=capacity(num_tokens, num_experts, self.experts_per_token, self.capacity_factor),
        )

    def _to_experts(self, slots_SW: Float[Array, "S W"], routing: Routing) -> Float[Array, "E M W"]:
        """This device's slots to the devices with their experts, the slots of all devices for its own experts."""
        num_experts, width = routing.choice_of_slot_EBC.shape[0], slots_SW.shape[-1]
        came = ring.all_to_all(slots_SW.reshape(num_experts, -1, width), ("y",), dim=0)  # sender, expert, slot, width
        return jnp.moveaxis(came, 0, 1).reshape(came.shape[1], -1, width)

    def _combine(
        self, answers_EMD: Float[Array, "E M D"], x_BTD: Float[Array, "B T D"], routing: Routing
    ) -> Float[Array, "B T D"]:
        """The way back; the sum of a token's answers, which are weighted."""
        num_own, _, width = answers_EMD.shape
        apart = answers_EMD.reshape(num_own, ring.size(("y",)), -1, width)
        came = ring.all_to_all(jnp.moveaxis(apart, 1, 0).reshape(-1, apart.shape[2], width), ("y",), dim=0)
        slot_NK, token_S1 = _tables(routing)
        return regroup(came.reshape(-1, width), slot_NK, token_S1).reshape(x_BTD.shape)

    def _experts(self, tokens_EMD: Sequence[Array], weights_EM: Sequence[Array]) -> list[Array]:
        """What each expert answers to its tokens, times the weights. These are multiplied in before the narrowing
        product, so that no gradient needs its result and none recomputes it.
        """
        shared: dict[str, Any] = {"compute_dtype": self.compute_dtype, "overlap": self.overlap}
        up: dict[str, Any] = {"lhs_gather": {"d": "x"}, "name": f"{self.name}.up", **shared}
        hs_EMF = widen("emd,edf->emf", tokens_EMD, self.up_EDF, self.gate_EDF, activation=self.activation, **up)
        hs_EMF = [(h * weight[..., None]).astype(h.dtype) for h, weight in zip(hs_EMF, weights_EM, strict=True)]
        down: dict[str, Any] = {"out_scatter": {"d": "x"}, "name": f"{self.name}.down", **shared}
        return [y for (y,) in collective_einsum_grid("emf,efd->emd", hs_EMF, [self.down_EFD[...]], **down)]


def capacity(num_tokens: int, num_experts: int, experts_per_token: int, capacity_factor: float) -> int:
    """Places of a sequence with every expert; never more than it has tokens, since each chooses an expert once."""
    return min(num_tokens, math.ceil(capacity_factor * experts_per_token * num_tokens / num_experts))


def _tables(routing: Routing) -> tuple[Int[Array, "N K"], Int[Array, "S 1"]]:
    """For every token its slots, for every slot its token."""
    num_choices = routing.weight_BTK.shape[-1]
    token_S1 = (routing.choice_of_slot_EBC // num_choices).reshape(-1, 1)
    return routing.slot_of_choice_BTK.reshape(-1, num_choices), token_S1


def _dispatch(x_BTD: Float[Array, "B T D"], routing: Routing) -> Float[Array, "S D"]:
    """A row for every slot: its token, zeros if it is empty."""
    slot_NK, token_S1 = _tables(routing)
    return regroup(x_BTD.reshape(-1, x_BTD.shape[-1]), token_S1, slot_NK)


def _weights(routing: Routing) -> Float[Array, "S 1"]:
    """The weight of every slot's choice."""
    choice_S1, slot_N1 = routing.choice_of_slot_EBC.reshape(-1, 1), routing.slot_of_choice_BTK.reshape(-1, 1)
    return regroup(routing.weight_BTK.reshape(-1, 1), choice_S1, slot_N1)
