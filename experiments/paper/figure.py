"""What a figure of the paper consists of: measurements, a fixed text, tables, a picture, findings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from matplotlib.figure import Figure as Picture

from experiments.paper.measurement import Measurement
from experiments.paper.results import Results

NOT_KNOWN = "its numbers are not at hand, so there is nothing to set beside ours."


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns, then rows of as many cells; the first column names the rows."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A claim of the paper beside what our numbers say of it.

    agrees: None where the numbers do not tell. numbers, why: sentences made from the results.
    """

    claim: str
    agrees: bool | None
    numbers: str
    why: str = ""

    @property
    def verdict(self) -> str:
        """In words."""
        return {True: "agrees", False: "does not agree", None: "cannot be told"}[self.agrees]


@dataclasses.dataclass(frozen=True)
class Content:
    """What is made of results; `notes` are sentences below the tables."""

    tables: tuple[Table, ...]
    picture: Picture | None = None
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Figure:
    """One table or figure; `name` is also its module in experiments/ and the name of its picture.

    simulated, measured, published: what each is, in sentences; "" where nothing is.
    measurements, content: of the quick variant or of the full one.
    """

    name: str
    title: str
    simulated: str
    measured: str
    published: str
    measurements: Callable[[bool], list[Measurement]]
    content: Callable[[bool, Results], Content]

    def failures(self, quick: bool, results: Results) -> list[tuple[str, str]]:
        """(name, reason) of every measurement without a result."""
        return [(m.name, results.why(m)) for m in self.measurements(quick) if results.find(m) is None]
