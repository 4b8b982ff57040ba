"""The lexical level of HLO text: shapes, balanced brackets, attribute lists."""

from __future__ import annotations

import dataclasses
import math
import re

# Bits per element; tokens, opaque values and tuples hold no data of their own.
_BITS = {"pred": 8, "c64": 64, "c128": 128, "token": 0, "opaque": 0, "tuple": 0}
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([^\]]*)\](\{[^}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|/\*.*?\*/|[()\[\]{},]', re.S)
_SKIP = re.compile(r"(?:\s|/\*.*?\*/)*")


class HloError(ValueError):
    """HLO text that this reader cannot understand."""


def element_bits(dtype: str) -> int:
    """Bits of one element of `dtype` (`bf16`, `f8e4m3fn`, `s4`, ...). Raises HloError for an unknown name."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"(?:bf|f|s|u)(\d+)", dtype)
    if match is None:
        raise HloError(f"unknown element type {dtype!r} in HLO text; teach overlapfx/aot/hlo_syntax.py its size.")
    return int(match[1])


@dataclasses.dataclass(frozen=True)
class Shape:
    """Type of a value: an array (`dtype`, `dims`, `memory_space`) or a tuple (`dtype` "tuple", `elements`).

    `memory_space` is the number in the layout: 0 is HBM, other numbers are on-chip or host memories.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    memory_space: int = 0
    elements: tuple[Shape, ...] = ()

    @property
    def num_elements(self) -> int:
        """Elements of an array; 0 for a tuple."""
        return 0 if self.dtype == "tuple" else math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes without padding, all elements of a tuple together."""
        if self.elements:
            return sum(element.num_bytes for element in self.elements)
        return -(-self.num_elements * element_bits(self.dtype) // 8)


def parse_shape(text: str, start: int = 0) -> tuple[Shape, int]:
    """Read the shape at `text[start:]`; returns it with the position after it. Raises HloError."""
    position = _skip(text, start)
    if text[position : position + 1] == "(":
        elements = []
        position = _skip(text, position + 1)
        while text[position : position + 1] != ")":
            element, position = parse_shape(text, position)
            elements.append(element)
            position = _skip(text, position)
            if text[position : position + 1] == ",":
                position = _skip(text, position + 1)
            elif text[position : position + 1] != ")":
                raise HloError(f"expected ',' or ')' in tuple shape at {text[start : start + 60]!r}.")
        return Shape("tuple", elements=tuple(elements)), position + 1
    match = _SHAPE.match(text, position)
    if match is None:
        raise HloError(f"expected a shape at {text[start : start + 60]!r}.")
    # A dynamic dimension is printed as <=N; its bound is what is stored and moved.
    dims = tuple(int(size.strip().lstrip("<=")) for size in match[2].split(",") if size.strip())
    space = _MEMORY_SPACE.search(match[3] or "")
    return Shape(match[1], dims, int(space[1]) if space else 0), match.end()


def _skip(text: str, position: int) -> int:
    match = _SKIP.match(text, position)
    assert match is not None  # the pattern matches the empty string
    return match.end()


def closing(text: str, start: int) -> int:
    """Position just after the bracket that closes the one at `text[start]`. Raises HloError if there is none."""
    if text.startswith("{{", start):
        # Long lists of groups or pairs have no deeper level: skip them without looking at every brace.
        end = text.find("}}", start)
        if end > 0 and '"' not in text[start : start + 40] and "(" not in text[start:end]:
            return end + 2
    depth = 0
    for token in _STRUCTURE.finditer(text, start):
        first = token[0][0]
        if first in "([{":
            depth += 1
        elif first in ")]}":
            depth -= 1
            if depth == 0:
                return token.end()
    raise HloError(f"unbalanced bracket at {text[start : start + 60]!r}.")


def split_list(text: str) -> list[str]:
    """Split at commas outside brackets and strings, without comments and blank items."""
    parts, begin, position = [], 0, 0
    while (token := _STRUCTURE.search(text, position)) is not None:
        first = token[0][0]
        position = token.end()
        if first in "([{":
            position = closing(text, token.start())
        elif first == ",":
            parts.append(text[begin : token.start()])
            begin = position
    parts.append(text[begin:])
    cleaned = (re.sub(r"/\*.*?\*/", "", part).strip() if "/*" in part else part.strip() for part in parts)
    return [part for part in cleaned if part]


def attributes(text: str) -> dict[str, str]:
    """Read `key=value, key={...}, flag` into a mapping; a bare word maps to the empty string."""
    found: dict[str, str] = {}
    for part in split_list(text):
        key, _, value = part.partition("=")
        if key == "device_ids" and "replica_groups" in found:
            found["replica_groups"] += f", {part}"  # the second half of mesh[...], device_ids=(...) {...}
            continue
        found[key.strip()] = value.strip()
    return found


def braced(text: str) -> list[str]:
    """Items of a braced list `{a, b}` or of a bare name `a`."""
    text = text.strip()
    return split_list(text[1:-1] if text.startswith("{") else text)
