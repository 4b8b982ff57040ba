"""What the compiled program contains: as many permutes, gathers, scatters and products as the derivation says."""

from __future__ import annotations

import re
from typing import Any

import core_jaxpr
import jax
import jax.numpy as jnp
import pytest
from core_harness import Case, forward_program, make_values, place, quick_compile, sharded_program
from core_patterns import ONE_AXIS, mlp_up, query_key_value

from overlapfx.config import Overlap

pytestmark = pytest.mark.core

KINDS = ("collective-permute", "all-gather", "reduce-scatter", "all-to-all", "dot")


def ring_of(direction: str, unroll: int = 1, interleave: str = "halves", **options: Any) -> Overlap:
    return Overlap(method="ring", direction=direction, unroll=unroll, interleave=interleave, **options)


def counts(program: Any, *arrays: Any) -> dict[str, int]:
    """Instructions in the compiled text, by kind; those that are absent are left out."""
    text = jax.jit(program).lower(*arrays).compile(quick_compile()).as_text()
    found = {kind: len(re.findall(rf"\s{kind}(?:-start)?\(", text)) for kind in KINDS}
    return {kind: number for kind, number in found.items() if number}


def forward_counts(case: Case, overlap: Overlap) -> dict[str, int]:
    lhs, rhs, _, _ = place(case, make_values(case))
    return counts(forward_program(case, overlap), lhs, rhs)


def gradient_counts(case: Case, overlap: Overlap) -> dict[str, int]:
    return counts(sharded_program(case, {"site": overlap}), *place(case, make_values(case)))


def gradient_jaxpr(case: Case, overlap: Overlap) -> Any:
    return jax.make_jaxpr(sharded_program(case, {"site": overlap}))(*place(case, make_values(case))).jaxpr


def barriers_last() -> bool:
    """Whether this XLA keeps what stands behind a barrier apart to the end; some CPU versions merge it after all."""
    text = jax.jit(lambda x: jnp.sin(x) + jnp.sin(jax.lax.optimization_barrier(x))).lower(1.0).compile().as_text()
    return len(re.findall(r"\ssine\(", text)) == 2


GATHERS = {
    "blocking": (Overlap(method="blocking"), {"all-gather": 1, "dot": 1}),
    # N - 1 sends, not N, and one product per shard.
    "one": (ring_of("one"), {"collective-permute": 3, "dot": 4}),
    # Halves: every shard's two halves travel and are multiplied apart.
    "two": (ring_of("two"), {"collective-permute": 6, "dot": 8}),
    # Two arrivals share a product: own shard, one from each side at once, the one opposite.
    "two_whole": (ring_of("two_whole"), {"collective-permute": 3, "dot": 3}),
    "prefetch": (Overlap(method="prefetch", direction="one"), {"collective-permute": 3, "dot": 1}),
    "stripe": (Overlap(method="stripe"), {"all-gather": 4, "dot": 4}),
}


@pytest.mark.parametrize("how", GATHERS)
@pytest.mark.parametrize("pattern", [p for p in ONE_AXIS if p.startswith("gather")])
def test_gathers_of_four(pattern: str, how: str) -> None:
    overlap, want = GATHERS[how]
    assert forward_counts(ONE_AXIS[pattern](4, 4, 4), overlap) == want


SCATTERS = {
    "blocking": (Overlap(method="blocking"), {"reduce-scatter": 1, "dot": 1}),
    "one": (ring_of("one"), {"collective-permute": 3, "dot": 4}),
    "one, chains of halves": (ring_of("one", 2, "halves"), {"collective-permute": 6, "dot": 8}),
    # The paper's two chains: one hop of two places each, and the epilogue.
    "one, chains by parity": (ring_of("one", 2, "parity"), {"collective-permute": 3, "dot": 4}),
    "two": (ring_of("two"), {"collective-permute": 6, "dot": 8}),
    # Three accumulators one way, one the other; the owner's own partial product is with the longer chain.
    "two_whole": (ring_of("two_whole"), {"collective-permute": 3, "dot": 3}),
    "exchange": (Overlap(method="exchange"), {"all-to-all": 1, "dot": 1}),
    "stripe": (Overlap(method="stripe"), {"reduce-scatter": 4, "dot": 4}),
}


@pytest.mark.parametrize("how", SCATTERS)
@pytest.mark.parametrize("pattern", [p for p in ONE_AXIS if p.startswith("scatter")])
def test_scatters_of_four(pattern: str, how: str) -> None:
    overlap, want = SCATTERS[how]
    assert forward_counts(ONE_AXIS[pattern](4, 4, 4), overlap) == want


@pytest.mark.parametrize("pattern", ONE_AXIS)
def test_one_device_sends_nothing(pattern: str) -> None:
    assert forward_counts(ONE_AXIS[pattern](1, 4, 4), ring_of("two")) == {"dot": 1}


@pytest.mark.parametrize("num_devices", [2, 3, 5, 8])
def test_sends_grow_with_the_ring(num_devices: int) -> None:
    for pattern in ("gather_lhs_free", "scatter_lhs_free"):
        want = {"collective-permute": num_devices - 1, "dot": num_devices}
        assert forward_counts(ONE_AXIS[pattern](num_devices, 2, 4), ring_of("one")) == want


def test_forward_and_both_gradients() -> None:
    case = ONE_AXIS["gather_lhs_free"](4, 4, 4)
    # Forward, dx scattered, x streamed again for dw: three rings, of which XLA must not find two to be the same.
    sends = 9 if barriers_last() else 6
    assert gradient_counts(case, ring_of("one")) == {"collective-permute": sends, "dot": 12}
    # With x kept, dw is one product.
    assert gradient_counts(case, ring_of("one", save_gathered=True)) == {"collective-permute": 6, "dot": 9}
    # A scattered result: its cotangent is streamed once for both gradients.
    case = ONE_AXIS["scatter_lhs_free"](4, 4, 4)
    assert gradient_counts(case, ring_of("one")) == {"collective-permute": 6, "dot": 12}
    assert gradient_counts(case, Overlap(method="blocking")) == {"reduce-scatter": 1, "all-gather": 1, "dot": 3}


def test_several_weights_share_one_stream() -> None:
    case = query_key_value(1, 4, 4, 4)
    assert forward_counts(case, ring_of("one")) == {"collective-permute": 3, "dot": 12}
    assert forward_counts(case, Overlap(method="blocking")) == {"all-gather": 1, "dot": 3}
    # Three rings as for one weight: the gradient of x is summed over the weights before it travels.
    assert gradient_counts(case, ring_of("one"))["collective-permute"] == (9 if barriers_last() else 6)


def test_the_backward_stream_starts_behind_a_barrier() -> None:
    case = ONE_AXIS["gather_lhs_free"](4, 4, 4)
    jaxpr = gradient_jaxpr(case, ring_of("one"))
    assert core_jaxpr.count(jaxpr, "ppermute") == 9
    # Besides those of the sums: three additions in each of two rings that add.
    assert core_jaxpr.count(jaxpr, "optimization_barrier") == 6 + 1
    # What never moves needs none.
    jaxpr = gradient_jaxpr(ONE_AXIS["scatter_lhs_free"](4, 4, 4), ring_of("one"))
    assert core_jaxpr.count(jaxpr, "optimization_barrier") == 6


def test_one_of_two_gathers_is_decomposed() -> None:
    case = mlp_up(2, 4, 2, 6)
    # The larger one, of the activation, is the ring.
    assert forward_counts(case, ring_of("one")) == {"collective-permute": 3, "all-gather": 1, "dot": 4}
    assert forward_counts(case, Overlap(method="blocking")) == {"all-gather": 2, "dot": 1}
