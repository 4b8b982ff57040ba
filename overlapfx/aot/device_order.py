"""The order of the TPU devices of a real run, the same that a plan of it assumes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from overlapfx import chips
from overlapfx.aot.slices import FAMILIES, device_coord
from overlapfx.config import MeshConfig
from overlapfx.plan.placement import Placement, place
from overlapfx.plan.torus import Coord, Torus


def physical_order(devices: Sequence[Any], mesh: MeshConfig) -> list[Any] | None:
    """`devices` in mesh order (replica, y, x; x fastest), so that rings run over physical cycles where there are any.

    None where there is nothing to decide by: devices that are no TPU of the table, another number of them than the mesh
    has, slices that do not fill a box of the torus, replicas that cannot be shared out over the slices. Then JAX's own
    arrangement has to do.
    """
    found = physical_placement(devices, mesh)
    if found is None:
        return None
    ordered: list[Any] = []
    for members, placement in found:
        by_place = {_place(device, members, placement.torus): device for device in members}
        if sorted(by_place) != placement.torus.coordinates():
            return None
        ordered += [by_place[coord] for coord in placement.order]
    return ordered


def physical_placement(devices: Sequence[Any], mesh: MeshConfig) -> list[tuple[list[Any], Placement]] | None:
    """Per slice its devices and the placement of the mesh on its torus; None where there is nothing to decide by."""
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(devices) != mesh.num_devices or mesh.replica % len(slices):
        return None
    axes = {"replica": mesh.replica // len(slices), "y": mesh.y, "x": mesh.x}
    found = []
    for index in sorted(slices):
        torus = _torus(slices[index])
        if torus is None:
            return None
        found.append((slices[index], place(torus, axes)))
    return found


def _torus(devices: Sequence[Any]) -> Torus | None:
    """The torus that the devices of one slice span; None if they are of no known kind, or of several."""
    kinds = {device.device_kind for device in devices}
    chip = chips.BY_DEVICE_KIND.get(kinds.pop()) if len(kinds) == 1 else None
    family = next((family for family in FAMILIES.values() if family.chip is chip), None)
    if chip is None or family is None:
        return None
    dims = range(chip.torus_dims)
    shape = [1 + max(d.coords[dim] for d in devices) - min(d.coords[dim] for d in devices) for dim in dims]
    if math.prod(shape) * chip.devices_per_chip != len(devices):
        return None
    return Torus.for_chip(chip, shape, family.permute_wrap)


def _place(device: Any, devices: Sequence[Any], torus: Torus) -> Coord:
    """Position in the slice, whose corner need not be the origin."""
    corner = [min(d.coords[dim] for d in devices) for dim in range(len(torus.shape))]
    coord = device_coord(device, torus)
    return tuple(at - corner[dim] if dim < len(corner) else at for dim, at in enumerate(coord))
