"""Which devices take part in a collective, from every notation that the compiler prints."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence

from overlapfx.aot.hlo_syntax import HloError

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?$")
_MESH = re.compile(
    r"mesh\[([^\]]*)\]\s*(?:,?\s*device_ids=(\(\[[\d,]+\](?:T\([\d,]+\))?\)|\[[\d,\s]+\])\s*)?\{([^}]*)\}$"
)
_TILE = re.compile(r"\(\[([\d,]+)\](?:T\(([\d,]+)\))?\)$")
_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")


@functools.lru_cache(maxsize=4096)
def parse_groups(text: str, num_devices: int) -> Groups:
    """Partition ids per replica group.

    Reads lists `{{0,1},{2,3}}`, iota forms `[2,2]<=[2,2]T(1,0)` and mesh forms `mesh['y'=2,'x'=2] {'x'}`; `{}` is one
    group of all `num_devices`. Raises HloError for anything else.
    """
    text = text.strip()
    if text in ("", "{}", "{{}}"):
        return (tuple(range(num_devices)),)
    if text.startswith("{{"):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,\s]+)\}", text))
    if iota := _IOTA.match(text):
        return _iota_groups(_ints(iota[1]), _ints(iota[2]), _ints(iota[3] or ""))
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3])
    raise HloError(f"replica groups {text[:80]!r} are in no known notation.")


@functools.lru_cache(maxsize=4096)
def parse_pairs(text: str) -> Pairs:
    """(source, target) partition ids of `{{0,1},{1,0}}`. Raises HloError if there are none to be read."""
    pairs = re.findall(r"\{(\d+),(\d+)\}", text)
    if not pairs and text.strip() not in ("{}", "{{}}"):
        raise HloError(f"source-target pairs {text[:80]!r} are in no known notation.")
    return tuple((int(src), int(dst)) for src, dst in pairs)


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _iota_groups(result: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> Groups:
    """`[g, n]<=[dims]T(perm)`: number the devices over dims, transpose, cut into g groups of n."""
    strides = _strides(sizes)
    order = order or list(range(len(sizes)))
    walk = itertools.product(*(range(sizes[dim]) for dim in order))
    flat = [sum(index * strides[dim] for index, dim in zip(at, order, strict=True)) for at in walk]
    size = math.prod(result[1:]) if len(result) > 1 else len(flat)
    if len(flat) != math.prod(result):
        raise HloError(f"iota replica groups {list(result)}<={list(sizes)} do not hold the same number of devices.")
    return tuple(tuple(flat[start : start + size]) for start in range(0, len(flat), size))


def _device_ids(text: str | None, num_devices: int) -> Sequence[int]:
    """Order of the devices in a mesh: a list `[3,2,1,0]`, or `([4,2]T(1,0))`, numbers laid over dims and transposed."""
    if not text:
        return range(num_devices)
    if tile := _TILE.match(text):
        sizes = _ints(tile[1])
        return _iota_groups([math.prod(sizes)], sizes, _ints(tile[2] or ""))[0]
    return _ints(text.strip("[]"))


def _mesh_groups(mesh: str, device_ids: str | None, axes: str) -> Groups:
    """`mesh['y'=2,'x'=4] {'x'}`: devices that differ only in the named axes (or parts `'x':(pre)size` of them)."""
    names, sizes = [], []
    for name, size, _, _ in _AXIS.findall(mesh):
        names.append(name)
        sizes.append(int(size))
    ids = _device_ids(device_ids, math.prod(sizes))
    strides = _strides(sizes)
    cuts: list[tuple[int, int]] = []  # (size, stride in the device numbering) per grouped axis
    for name, _, before, size in _AXIS.findall(axes):
        axis = names.index(name)
        if before:
            cuts.append((int(size), strides[axis] * (sizes[axis] // (int(before) * int(size)))))
        else:
            cuts.append((sizes[axis], strides[axis]))
    offsets = [
        sum(i * stride for i, (_, stride) in zip(at, cuts, strict=True))
        for at in itertools.product(*(range(size) for size, _ in cuts))
    ]
    seen: set[int] = set()
    groups = []
    for start in range(len(ids)):
        if start not in seen:
            members = [start + offset for offset in offsets]
            seen.update(members)
            groups.append(tuple(ids[member] for member in members))
    return tuple(groups)
