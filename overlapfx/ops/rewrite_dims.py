"""Dimensions as products of factors, so that reshapes can be followed from a gather to a product to a scatter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from overlapfx.plan.pattern import Axes


class Unsafe(Exception):
    """Why a pattern cannot be proved to mean the same as a collective einsum; the text completes a sentence."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """Part of a dimension: its full size, the axes over which it is gathered, over how many devices."""

    size: int
    axes: Axes = ()
    parts: int = 1

    @property
    def local(self) -> int:
        """The size of one device's shard."""
        return self.size // self.parts

    def split(self, major: int) -> tuple[Factor, Factor]:
        """As a factor of size `major` and the rest; what is gathered goes with the major one."""
        if major % self.parts:
            raise Unsafe(f"a reshape cuts a dimension of {self.size}, gathered from {self.parts} shards, at {major}")
        return Factor(major, self.axes, self.parts), Factor(self.size // major)


Dims = tuple[tuple[Factor, ...], ...]


@dataclasses.dataclass(eq=False)
class Atom:
    """A label in the making: a factor that operands and result of one product share.

    `gathered` and `scattered` hold (axes, parts), the former by operand. Once split or merged into another atom it only
    points there; `leaves` follows.
    """

    size: int
    gathered: dict[int, tuple[Axes, int]] = dataclasses.field(default_factory=dict)
    scattered: tuple[Axes, int] = ((), 1)
    now: tuple[Atom, ...] | None = None

    def split(self, major: int) -> tuple[Atom, Atom]:
        """Into a label of size `major` and the rest."""
        parts = [n for _, n in self.gathered.values()]
        if self.scattered[0] or any(major % n for n in parts):
            raise Unsafe(
                f"a reshape cuts a dimension of {self.size}, sharded {parts or [self.scattered[1]]}, at {major}"
            )
        self.now = (Atom(major, self.gathered), Atom(self.size // major))
        return self.now[0], self.now[1]


def plain(shape: Sequence[int]) -> Dims:
    """The dimensions of an array of which nothing is gathered."""
    return tuple((Factor(size),) for size in shape)


def local_shape(dims: Dims) -> tuple[int, ...]:
    """The shape of one device's shard, one dimension per factor."""
    return tuple(f.local for group in dims for f in group)


def positions(dims: Dims) -> list[list[int]]:
    """For each dimension where its factors are in `local_shape`."""
    starts = [sum(map(len, dims[:i])) for i in range(len(dims))]
    return [list(range(start, start + len(group))) for start, group in zip(starts, dims, strict=True)]


def regroup(factors: Sequence[Any], sizes: Sequence[int]) -> list[tuple[Any, ...]]:
    """The same factors (or atoms) in dimensions of other sizes, split where need be; factors of 1 vanish.

    Raises Unsafe where a boundary falls inside a factor and does not divide it.
    """
    queue = [f for f in factors if f.size != 1]
    groups = []
    for size in sizes:
        group, rest = [], size
        while rest > 1:
            if not queue:
                raise Unsafe("a reshape has no common factors with what it reshapes")
            first = queue.pop(0)
            if rest % first.size:
                if first.size % rest:
                    raise Unsafe(f"a reshape cuts a dimension of {first.size} at {rest}")
                first, minor = first.split(rest)
                queue.insert(0, minor)
            group.append(first)
            rest //= first.size
        groups.append(tuple(group))
    return groups


def atoms(dims: Dims, operand: int) -> list[list[Atom]]:
    """New atoms for the dimensions of an operand."""
    return [
        [Atom(f.size, {operand: (f.axes, f.parts)} if f.axes else {}) for f in group if f.size != 1] for group in dims
    ]


def leaves(group: Sequence[Atom]) -> list[Atom]:
    """The atoms that these have become."""
    found = []
    for atom in group:
        found += [atom] if atom.now is None else leaves(atom.now)
    return found


def unify(ours: Sequence[Atom], theirs: Sequence[Atom]) -> None:
    """Makes the atoms of a dimension of one operand those of a dimension of the other. Raises Unsafe."""
    left, right = leaves(ours), leaves(theirs)
    if math.prod(a.size for a in left) != math.prod(a.size for a in right):
        raise Unsafe("the sizes of a product's operands differ")
    while left and right:
        a, b = left.pop(0), right.pop(0)
        if a is b:
            continue
        if a.size < b.size:
            _check_divides(b, a)
            b, minor = b.split(a.size)
            right.insert(0, minor)
        elif b.size < a.size:
            _check_divides(a, b)
            a, minor = a.split(b.size)
            left.insert(0, minor)
        a.gathered.update(b.gathered)
        b.now = (a,)


def _check_divides(large: Atom, small: Atom) -> None:
    if large.size % small.size:
        raise Unsafe(f"reshapes cut one dimension in two ways, at {large.size} and at {small.size}")


def scatter(group: Sequence[Atom], axes: Axes, parts: int) -> None:
    """Sums over `axes` and keeps a shard of a dimension: of its major atom, which must divide. Raises Unsafe."""
    found = leaves(group)
    if not found:
        raise Unsafe(f"the scattered dimension has size 1, over {parts} devices")
    major = found[0]
    old_axes, old_parts = major.scattered
    if (major.size // old_parts) % parts:
        raise Unsafe(f"the major part of the scattered dimension has size {major.size}, over {parts} devices")
    major.scattered = (old_axes + axes, old_parts * parts)
