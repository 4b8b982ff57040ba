"""Legal values of configuration fields, checked when a dataclass that declares them is made."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from typing import Annotated, Any, ClassVar


@dataclasses.dataclass(frozen=True)
class Range:
    """Legal values of a number: from `low` to `high`, ends included unless open."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.low < value if self.open_low else self.low <= value
        return above and (value < self.high if self.open_high else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.open_low else 'at least'} {self.low}"
        return low if self.high == math.inf else f"{low} and {'below' if self.open_high else 'at most'} {self.high}"


@dataclasses.dataclass(frozen=True)
class Choices:
    """Legal values of a text field."""

    values: tuple[str, ...]

    def __contains__(self, value: str) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(self.values)}"


Positive = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2**31 - 1)]
PositiveFloat = Annotated[float, Range(0, open_low=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1, open_high=True)]


@functools.cache
def _hints(cls: Any) -> list[tuple[str, Any]]:
    """Field names with their resolved hints; resolving takes longer than all the checks."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [(name, hint) for name, hint in hints.items() if typing.get_origin(hint) is not ClassVar]


class Section:
    """Checks every field of a frozen dataclass against its type hint when an instance is made."""

    _where: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)):  # type: ignore[arg-type]
            check_field(self._where + name, getattr(self, name), hint)


def check_field(field: str, value: Any, hint: Any) -> None:
    """Raises a ValueError that names `field` unless `value` has the type of `hint` and lies in its legal values."""
    kind, *legal = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
    if kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    elif kind is int:
        fits = isinstance(value, int) and not isinstance(value, bool)
    else:
        fits = isinstance(value, typing.get_origin(kind) or kind)
    if not fits:
        wanted = {float: "a finite number", int: "an integer", bool: "True or False", str: "text"}.get(kind)
        raise ValueError(f"{field} is {value!r}; it must be {wanted or 'a ' + str(getattr(kind, '__name__', kind))}.")
    for values in legal:
        if value not in values:
            raise ValueError(f"{field} is {value!r}; it must be {values}.")
