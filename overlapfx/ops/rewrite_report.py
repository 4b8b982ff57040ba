"""What became of the collectives of a rewritten function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

from overlapfx.ops.rewrite_graph import short_place
from overlapfx.plan.decide import CallSite


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """One collective einsum that stands for `num_products` products written at `source`, with its decision."""

    source: str
    num_products: int
    replaced: tuple[str, ...]
    site: CallSite

    def line(self) -> str:
        """One line for a log."""
        products = "product" if self.num_products == 1 else f"{self.num_products} products"
        return f"rewritten: {', '.join(self.replaced)} with {products}, {short_place(self.source)}: {self.site.line()}"


@dataclasses.dataclass(frozen=True)
class NotRewritten:
    """One collective that stays as it was, and why."""

    collective: str
    source: str
    reason: str

    def line(self) -> str:
        """One line for a log."""
        return f"not rewritten: {self.collective}, {short_place(self.source)}: {self.reason}"


Finding: TypeAlias = Rewritten | NotRewritten


@dataclasses.dataclass(frozen=True)
class RewriteReport:
    """What became of the AllGathers, ReduceScatters and AllReduces of products in a function, as they were met."""

    rewritten: tuple[Rewritten, ...]
    left: tuple[NotRewritten, ...]

    def __str__(self) -> str:
        found: Sequence[Finding] = (*self.rewritten, *self.left)
        lines = [item.line() for item in found]
        counted = [f"{line} ({lines.count(line)} times)" if lines.count(line) > 1 else line for line in lines]
        head = [] if self.rewritten else ["nothing was rewritten: no product of a gathered array or before a scatter"]
        return "\n".join([*head, *dict.fromkeys(counted)])
