"""Which expert computes which token: choices, places with the experts, the rows that move."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


@dataclasses.dataclass(frozen=True)
class Routing:
    """Where the tokens of B sequences go. Choice b T K + t K + k is the k-th of token t of sequence b; slot
    e B C + b C + c is the c-th place that sequence b has with expert e.
    """

    weight_BTK: Float[Array, "B T K"]  # what an expert's answer counts; a token's choices add up to 1
    slot_of_choice_BTK: Int[Array, "B T K"]  # E B C: no place
    choice_of_slot_EBC: Int[Array, "E B C"]  # B T K: empty
    balance_B: Float[Array, "B"]  # E sum_e (share of the choices) (mean probability): 1 if even, E if all go to one
    z_B: Float[Array, "B"]  # mean square of the logarithm of the sum of exp(logits)
    dropped_B: Float[Array, "B"]  # share of the choices that found no place


def route(
    logits_BTE: Float[Array, "B T E"], is_text_BT: Bool[Array, "B T"], *, num_choices: int, capacity: int
) -> Routing:
    """Every token chooses the experts it finds likeliest; places are given out in the order of the tokens.

    A sequence has `capacity` places with every expert whatever else is in the batch, so that a result depends neither
    on the mesh nor on the other sequences. Since earlier tokens go first with all their choices, no token takes a place
    from an earlier one: a decoder stays causal. Padding takes no place and counts in no mean.
    """
    batch, num_tokens, num_experts = logits_BTE.shape
    probability_BTE = jax.nn.softmax(logits_BTE)
    chosen_BTKE = _likeliest(probability_BTE, num_choices) & is_text_BT[:, :, None, None]
    likelihood_BTK = jnp.sum(jnp.where(chosen_BTKE, probability_BTE[:, :, None], 0), axis=-1)
    total_BT1 = jnp.sum(likelihood_BTK, axis=-1, keepdims=True)
    weight_BTK = likelihood_BTK / jnp.where(is_text_BT[..., None], total_BT1, 1)

    # How many choices up to each one, itself included, fell on each expert.
    flat_BPE = chosen_BTKE.reshape(batch, num_tokens * num_choices, num_experts)
    taken_BPE = jnp.cumsum(flat_BPE.astype(jnp.int32), axis=1)
    place_BP = jnp.sum(jnp.where(flat_BPE, taken_BPE, 0), axis=-1) - 1  # -1: padding
    expert_BP = jnp.argmax(flat_BPE, axis=-1)
    found_BP = (place_BP >= 0) & (place_BP < capacity)
    slot_BP = (expert_BP * batch + jnp.arange(batch)[:, None]) * capacity + place_BP
    slot_BP = jnp.where(found_BP, slot_BP, num_experts * batch * capacity)

    # The c-th choice of an expert comes after all up to which it has at most c - 1.
    rank_C = jnp.arange(capacity)
    first_BEC = jnp.sum(taken_BPE[..., None] <= rank_C, axis=1, dtype=jnp.int32)
    choices = num_tokens * num_choices
    choice_BEC = jnp.where(first_BEC < choices, first_BEC + choices * jnp.arange(batch)[:, None, None], batch * choices)

    num_text_B = jnp.maximum(jnp.sum(is_text_BT, axis=1), 1).astype(jnp.float32)
    share_BE = taken_BPE[:, -1] / (num_choices * num_text_B)[:, None]
    mean_BE = jnp.sum(jnp.where(is_text_BT[..., None], probability_BTE, 0), axis=1) / num_text_B[:, None]
    log_sum_BT = jnp.where(is_text_BT, jax.nn.logsumexp(logits_BTE, axis=-1), 0)
    return Routing(
        weight_BTK=weight_BTK,
        slot_of_choice_BTK=slot_BP.reshape(batch, num_tokens, num_choices),
        choice_of_slot_EBC=choice_BEC.transpose(1, 0, 2),
        balance_B=num_experts * jnp.sum(share_BE * mean_BE, axis=-1),
        z_B=jnp.sum(jnp.square(log_sum_BT), axis=1) / num_text_B,
        dropped_B=jnp.sum(place_BP >= capacity, axis=1) / (num_choices * num_text_B),
    )


def _likeliest(probability_BTE: Float[Array, "B T E"], num_choices: int) -> Bool[Array, "B T K E"]:
    """The largest, the next largest, ...; of equal ones the first."""
    expert_E = jnp.arange(probability_BTE.shape[-1])
    left_BTE, chosen = jax.lax.stop_gradient(probability_BTE), []
    for _ in range(num_choices):
        chosen.append(jnp.argmax(left_BTE, axis=-1)[..., None] == expert_E)
        left_BTE = jnp.where(chosen[-1], -1, left_BTE)
    return jnp.stack(chosen, axis=2)


@jax.custom_vjp
def regroup(
    rows_NW: Float[Array, "N W"], sources_SJ: Int[Array, "S J"], users_NI: Int[Array, "N I"]
) -> Float[Array, "S W"]:
    """out[s] = sum over j of rows[sources[s, j]], in float32 and then of the rows' dtype; a source N is no row.

    users: for every row the places s where it is used, filled up with S. With them the gradient is the same function
    with the tables exchanged, a gather too, where autodiff would scatter.
    """
    return _sum_of_rows(rows_NW, sources_SJ)


def _regroup_fwd(rows_NW: Array, sources_SJ: Array, users_NI: Array) -> tuple[Array, tuple[Array, Array]]:
    return _sum_of_rows(rows_NW, sources_SJ), (sources_SJ, users_NI)


def _regroup_bwd(tables: tuple[Array, Array], cotangent_SW: Array) -> tuple[Any, ...]:
    sources_SJ, users_NI = tables
    none = [np.zeros(table.shape, jax.dtypes.float0) for table in tables]
    return regroup(cotangent_SW, users_NI, sources_SJ), *none


regroup.defvjp(_regroup_fwd, _regroup_bwd)


def _sum_of_rows(rows_NW: Float[Array, "N W"], sources_SJ: Int[Array, "S J"]) -> Float[Array, "S W"]:
    # Filled with zeros where the index is no row's.
    found = [jnp.take(rows_NW, sources_SJ[:, j], axis=0, mode="fill", fill_value=0) for j in range(sources_SJ.shape[1])]
    if len(found) == 1:
        return found[0]
    wide = [row.astype(jnp.float32) for row in found]
    return sum(wide[1:], start=wide[0]).astype(rows_NW.dtype)
