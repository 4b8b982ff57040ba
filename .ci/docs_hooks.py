"""Fills the tables of the documentation from the code, so that they cannot differ from it."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

PROJECT = pathlib.Path(__file__).resolve().parent.parent


def on_config(config: Any) -> Any:
    """Lets the tables find the code; what is done to the path while this file is loaded, MkDocs takes back."""
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replaces `<!-- table: NAME -->` lines by tables."""
    for name, make in TABLES.items():
        marker = f"<!-- table: {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, make())
    if "<!-- table:" in markdown:
        raise ValueError(f"a page has a marker for a table that does not exist; the tables are {', '.join(TABLES)}.")
    return markdown


def assumptions() -> str:
    """Every assumed figure of every TPU, with its source."""
    from overlapfx.aot.assumptions import Assumptions
    from overlapfx.aot.slices import FAMILIES, parse_slice

    parts = []
    for family in FAMILIES.values():
        rows = Assumptions.for_slice(parse_slice(f"{family.name}:{family.named[-1]}")).rows()
        cells = [(f"`{figure}`", f"{value:.4g}", unit, source) for figure, value, unit, source in rows]
        parts.append(f"## {family.chip.name}\n\n{_table(('figure', 'value', 'unit', 'source'), cells)}")
    return "\n\n".join(parts)


def tolerances() -> str:
    """The tolerances of the tests."""
    from tolerances import TOLERANCES

    return _table(("dtype", "largest error"), [(dtype, f"{limit:g}") for dtype, limit in TOLERANCES.items()])


TABLES = {"assumptions": assumptions, "tolerances": tolerances}


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
