"""Which rows of a batch a process reads, for meshes that processes share in every way."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.train.feeding import process_share


def share_of(process: int, owners: Any, global_batch: int) -> tuple[int, int]:
    """The share where the devices of a mesh y, x belong to the processes in `owners`."""
    mesh = Mesh(np.array(jax.devices()[: np.size(owners)]).reshape(np.shape(owners)), ("y", "x"), axis_types=_auto(2))
    owner = dict(zip(mesh.devices.flat, np.ravel(owners).tolist(), strict=True))
    return process_share(NamedSharding(mesh, P("y")), global_batch, process=process, owner=owner.__getitem__)


def _auto(num: int) -> tuple[Any, ...]:
    return (AxisType.Auto,) * num


@pytest.mark.parametrize(
    ("owners", "shares"),
    [
        ([[0, 0], [0, 0], [1, 1], [1, 1]], {0: (0, 2), 1: (1, 2)}),
        # x spans the processes: both feed everything.
        ([[0, 0, 1, 1], [0, 0, 1, 1]], {0: (0, 1), 1: (0, 1)}),
        # Four processes, of which two and two hold the same rows.
        ([[0, 1], [0, 1], [2, 3], [2, 3]], {0: (0, 2), 1: (0, 2), 2: (1, 2), 3: (1, 2)}),
        # Rows that are not one run: they are told apart by the first.
        ([[1, 1], [0, 0], [1, 1], [0, 0]], {1: (0, 2), 0: (1, 2)}),
        ([[0, 0], [0, 0]], {0: (0, 1)}),
    ],
)
def test_shares(owners: Any, shares: dict[int, tuple[int, int]]) -> None:
    assert {process: share_of(process, owners, 8) for process in shares} == shares


@pytest.mark.parametrize("owners", [[[0, 0], [0, 1], [1, 1]], [[0, 0], [1, 1], [1, 1]]])
def test_parts_that_overlap_or_differ_are_refused(owners: Any) -> None:
    with pytest.raises(ValueError, match="the mesh y=3, x=2 over 2 processes gives them parts of a batch that overlap"):
        share_of(0, owners, 6)


def test_a_process_alone_feeds_everything() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("y", "x"), axis_types=_auto(2))
    assert process_share(NamedSharding(mesh, P("y")), 8) == (0, 1)
