"""The mesh of a run, with the ring self-test that must notice a ring gone wrong (C01)."""

from __future__ import annotations

import functools
import types

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from overlapfx.config import MeshConfig
from overlapfx.mesh import _arrange, batch_axes, make_mesh
from overlapfx.ops import ring, selftest


def ids(mesh: jax.sharding.Mesh) -> list:
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


@pytest.mark.parametrize(
    ("config", "names", "order", "over_batch"),
    [
        (MeshConfig(y=4, x=2), ("y", "x"), [[0, 1], [2, 3], [4, 5], [6, 7]], ("y",)),
        (MeshConfig(y=1, x=8), ("y", "x"), [[0, 1, 2, 3, 4, 5, 6, 7]], ("y",)),
        (MeshConfig(y=8, x=1), ("y", "x"), [[0], [1], [2], [3], [4], [5], [6], [7]], ("y",)),
        (
            MeshConfig(y=2, x=2, replica=2),
            ("replica", "y", "x"),
            [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
            ("replica", "y"),
        ),
    ],
)
def test_axes_in_mesh_order(
    config: MeshConfig, names: tuple[str, ...], order: list, over_batch: tuple[str, ...]
) -> None:
    mesh = make_mesh(config)
    assert mesh.axis_names == names
    assert ids(mesh) == order
    assert mesh.axis_types == (AxisType.Auto,) * len(names)
    assert batch_axes(mesh) == over_batch


def test_some_of_the_devices() -> None:
    mesh = make_mesh(MeshConfig(y=1, x=1), jax.devices()[3:4])
    assert (dict(mesh.shape), ids(mesh)) == ({"y": 1, "x": 1}, [[3]])


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (MeshConfig(y=2, x=2), "mesh.y * mesh.x = 2 * 2 needs 4 devices, but 8 (cpu) are present; "),
        (MeshConfig(y=4, x=4), "mesh.y * mesh.x = 4 * 4 needs 16 devices, but 8 (cpu) are present; "),
        (
            MeshConfig(y=3, x=1, replica=2),
            "mesh.replica * mesh.y * mesh.x = 2 * 3 * 1 needs 6 devices, but 8 (cpu) are present; ",
        ),
    ],
)
def test_wrong_number_of_devices(config: MeshConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match="needs") as error:
        make_mesh(config)
    assert str(error.value).startswith(sentence)
    assert f"--devices={config.num_devices}" in str(error.value)
    assert str(error.value).count(". ") == 0


def fake_slices(num_slices: int) -> list:
    """Eight devices of a kind without torus coordinates, in slices, handed over in shuffled order."""
    kinds = {"platform": "none", "device_kind": "made up"}
    devices = [types.SimpleNamespace(id=i, slice_index=i * num_slices // 8, **kinds) for i in range(8)]
    return devices[::2] + devices[1::2]


def test_only_replicas_cross_slices() -> None:
    for replicas in (2, 4):
        arranged = _arrange((replicas, 8 // replicas, 1), fake_slices(2))
        slices = [{device.slice_index for device in replica.flat} for replica in arranged]
        assert slices == [{0}] * (replicas // 2) + [{1}] * (replicas // 2)
    with pytest.raises(ValueError, match=r"2 slices but mesh.replica is 1; set mesh.replica to a multiple of 2,"):
        _arrange((1, 4, 2), fake_slices(2))


# C01: mesh (2, 4), shift by one along the 4-way axis. Device (y, x) starts with 4 y + x + 1; by hand.
@pytest.mark.core
def test_disjoint_rings_in_one_permute() -> None:
    mesh = make_mesh(MeshConfig(y=2, x=4))
    numbers = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    spec = PartitionSpec("y", "x")

    def shifted(by: int, axes: tuple[str, ...]) -> list:
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
        def body(x: Float[Array, "1 1"]) -> Float[Array, "1 1"]:
            return ring.shift(x, axes, by)

        return np.asarray(jax.jit(body)(jax.device_put(numbers, NamedSharding(mesh, spec)))).tolist()

    assert shifted(1, ("x",)) == [[4, 1, 2, 3], [8, 5, 6, 7]]
    assert shifted(-1, ("x",)) == [[2, 3, 4, 1], [6, 7, 8, 5]]
    assert shifted(2, ("x",)) == [[3, 4, 1, 2], [7, 8, 5, 6]]
    assert shifted(1, ("y",)) == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert shifted(1, ("y", "x")) == [[8, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.core
@pytest.mark.parametrize(
    "config",
    [MeshConfig(y=2, x=4), MeshConfig(y=8, x=1), MeshConfig(y=1, x=8), MeshConfig(y=2, x=2, replica=2)],
)
def test_ring_self_test_passes(config: MeshConfig) -> None:
    selftest.check_rings(make_mesh(config))


def _zeros_in_other_rings(x: Array, axes: tuple[str, ...], by: int, shift: object = ring.shift) -> Array:
    """The reported fault: only the first of several disjoint rings carries values."""
    moved = shift(x, axes, by)
    return jax.numpy.where(jax.lax.axis_index("y") == 0, moved, 0) if axes == ("x",) else moved


def _wrong_way(x: Array, axes: tuple[str, ...], by: int, shift: object = ring.shift) -> Array:
    return shift(x, axes, -by)


def _stays(x: Array, axes: tuple[str, ...], by: int) -> Array:
    return x


@pytest.mark.core
@pytest.mark.parametrize("fault", [_zeros_in_other_rings, _wrong_way, _stays])
def test_ring_self_test_notices_a_fault(fault: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "shift", fault)
    with pytest.raises(RuntimeError, match=r"ring self-test failed: after a shift by -?1 along .* holds \d instead of"):
        selftest.check_rings(make_mesh(MeshConfig(y=2, x=4)))
