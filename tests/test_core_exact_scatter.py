"""Every way to scatter the result equals a single-device einsum bit for bit, on rings of every size."""

from __future__ import annotations

import pytest
from core_harness import check_exact, option_product, unchecked_annotations
from core_patterns import ONE_AXIS, RING_SIZES, SHARDS

pytestmark = pytest.mark.core


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("num_devices", RING_SIZES)
@pytest.mark.parametrize("pattern", [name for name in ONE_AXIS if name.startswith("scatter")])
def test_every_option(pattern: str, num_devices: int, shards: str) -> None:
    with unchecked_annotations():
        check_exact(ONE_AXIS[pattern](num_devices, *SHARDS[shards]), option_product())
