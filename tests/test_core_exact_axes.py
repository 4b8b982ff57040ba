"""Every decomposition equals a single-device einsum bit for bit: several axes, loop constructs, shards of one row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_harness import Case, check_exact, option_product, unchecked_annotations
from core_patterns import ONE_AXIS, SHARDS, TWO_AXES, mlp_down, mlp_up, with_replicas

from overlapfx.plan import decide

pytestmark = pytest.mark.core

RINGS = {name: overlap for name, overlap in option_product().items() if overlap.method == "ring"}


@pytest.mark.parametrize(("mesh", "shards"), [((2, 3), "odd"), ((2, 4), "even"), ((1, 2), "odd")])
@pytest.mark.parametrize("pattern", TWO_AXES)
def test_two_axes(pattern: str, mesh: tuple[int, int], shards: str) -> None:
    with unchecked_annotations():
        check_exact(TWO_AXES[pattern](*mesh, *SHARDS[shards]), option_product())


@pytest.mark.parametrize("make", [mlp_up, mlp_down])
def test_axes_of_a_larger_mesh(make: Callable[..., Case]) -> None:
    with unchecked_annotations():
        check_exact(with_replicas(make(2, 2, 2, 3), replicas=2), option_product())


@pytest.mark.parametrize("num_devices", [5, 8])
@pytest.mark.parametrize("pattern", ONE_AXIS)
def test_loop_construct_of_large_rings(pattern: str, num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "MAX_STRAIGHT_SHARDS", 1)
    with unchecked_annotations():
        check_exact(ONE_AXIS[pattern](num_devices, 3, 2), RINGS)


@pytest.mark.parametrize("pattern", ONE_AXIS)
def test_shards_of_one_row_with_annotations_checked(pattern: str) -> None:
    check_exact(ONE_AXIS[pattern](3, 1, 2), option_product())
