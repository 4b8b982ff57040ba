"""Planted faults: each must fail the comparison that the rest of the suite relies on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from core_harness import check_exact
from core_patterns import ONE_AXIS, TWO_AXES

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.ops import collective_einsum, looped, pieces, ring, striped
from overlapfx.plan import pattern
from overlapfx.plan.chains import Chain, Stream

pytestmark = pytest.mark.core

ONE_WAY = Overlap(method="ring", direction="one", unroll=1)
TWO_CHAINS = Overlap(method="ring", direction="one", unroll=2, interleave="parity")
STRIPE = Overlap(method="stripe")


@dataclasses.dataclass(frozen=True)
class Fault:
    """`name` of `module` replaced by what `wrong` makes of it, and where that must show."""

    module: Any
    name: str
    wrong: Callable[[Any], Any]
    pattern: str
    overlap: Overlap
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def backwards(shift: Any) -> Any:
    return lambda x, axes, by: shift(x, axes, -by)


def next_place(index: Any) -> Any:
    return lambda axes: index(axes) + 1


def one_round_less(make: Any) -> Any:
    def shortened(*table: Any) -> tuple[Stream, ...]:
        return tuple(dataclasses.replace(s, stop=s.stop - 1) for s in make(*table))

    return shortened


def one_row_too_far(make: Any) -> Any:
    def moved(*table: Any) -> tuple[Stream, ...]:
        return tuple(dataclasses.replace(s, piece=dataclasses.replace(s.piece, offset=1)) for s in make(*table))

    return moved


def one_hop_too_many(make: Any) -> Any:
    def longer(*table: Any) -> tuple[Chain, ...]:
        *chains, last = make(*table)
        return (*chains, dataclasses.replace(last, last=last.last + 1))

    return longer


def nothing_arrives(shift: Any) -> Any:
    return lambda x, axes, by: shift(x, axes, by) * 0


def always_the_first_rows(take: Any) -> Any:
    return lambda x, labels, label, start, size: take(x, labels, label, 0, size)


def without_the_last(cut: Any) -> Any:
    return lambda plan, size: [*cut(plan, size)[:-1], (0, 1)]


def bfloat16_always(_: Any) -> Any:
    return lambda *operands: jnp.dtype(jnp.bfloat16)


def rotated(exchange: Any) -> Any:
    return lambda x, axes, dim: jnp.roll(exchange(x, axes, dim), 1, dim + 1)


def gradient_from_one_device(vary: Any) -> Any:
    def wrong(x: jax.Array, axes: frozenset[str]) -> jax.Array:
        added = tuple(sorted(axes - compat.varying_axes(x)))
        spread = vary(x, axes)
        return jnp.where(jax.lax.axis_index(added) == 0, spread, jax.lax.stop_gradient(spread)) if added else spread

    return wrong


def without_the_second_term(make: Any) -> Any:
    def shortened(problem: pattern.Problem, num_lhs: int) -> pattern.Problem:
        whole = make(problem, num_lhs)
        return dataclasses.replace(whole, terms=(whole.terms[0], *whole.terms[2:]))

    return shortened


def as_if_linear(_: Any) -> Any:
    return lambda activation, z, dy: dy


FAULTS = {
    "gather sends the wrong way": Fault(ring, "shift", backwards, "gather_lhs_free", ONE_WAY),
    "scatter sends the wrong way": Fault(ring, "shift", backwards, "scatter_lhs_free", ONE_WAY),
    "prefetch sends the wrong way": Fault(
        ring, "shift", backwards, "gather_rhs_free", Overlap(method="prefetch", direction="one")
    ),
    "shard id off by one, free label": Fault(ring, "index", next_place, "gather_lhs_free", ONE_WAY),
    "shard id off by one, contracted label": Fault(ring, "index", next_place, "gather_rhs_contracting", ONE_WAY),
    "shard id off by one, batch label": Fault(ring, "index", next_place, "gather_lhs_batch", ONE_WAY),
    "shard id off by one, scatter": Fault(ring, "index", next_place, "scatter_batch", ONE_WAY),
    "last shard not added": Fault(looped, "gather_streams", one_round_less, "gather_lhs_contracting", ONE_WAY),
    "last shard not placed": Fault(looped, "gather_streams", one_round_less, "gather_rhs_batch", ONE_WAY),
    "pieces placed one row too far": Fault(looped, "gather_streams", one_row_too_far, "gather_rhs_free", ONE_WAY),
    "a chain ends beside its owner": Fault(looped, "scatter_chains", one_hop_too_many, "scatter_rhs_free", TWO_CHAINS),
    "arriving sums are lost": Fault(ring, "shift", nothing_arrives, "scatter_lhs_free", ONE_WAY),
    "stripes of the wrong rows": Fault(pieces, "take", always_the_first_rows, "gather_lhs_free", STRIPE),
    "last stripe dropped": Fault(striped, "_stripes", without_the_last, "scatter_rhs_free", STRIPE),
    "partial einsums in bfloat16": Fault(
        pieces, "accumulation_dtype", bfloat16_always, "scatter_lhs_free", Overlap(method="exchange")
    ),
    "sums of a ring in bfloat16": Fault(
        pieces, "accumulation_dtype", bfloat16_always, "gather_lhs_contracting", ONE_WAY
    ),
    "exchanged partials of other rows": Fault(
        ring, "all_to_all", rotated, "scatter_lhs_free", Overlap(method="exchange")
    ),
    "gradient of a replicated operand from one device": Fault(
        compat, "vary", gradient_from_one_device, "gather_replicated", ONE_WAY
    ),
    "gradient of a shared operand without one weight": Fault(
        pattern, "backward", without_the_second_term, "query_key_value", ONE_WAY
    ),
    "gradient not through the activation": Fault(
        collective_einsum, "_through_activation", as_if_linear, "gather_lhs_free", ONE_WAY, {"activation": jax.nn.relu}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = FAULTS[fault]
    name = planted.pattern
    case = ONE_AXIS[name](4, 3, 4) if name in ONE_AXIS else TWO_AXES[name](2, 2, 3, 4)
    check_exact(case, {"variant": planted.overlap}, **planted.options)
    monkeypatch.setattr(planted.module, planted.name, planted.wrong(getattr(planted.module, planted.name)))
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_exact(case, {"variant": planted.overlap}, **planted.options)
