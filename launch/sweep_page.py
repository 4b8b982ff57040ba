"""The results of a sweep as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence

from launch.sweep_rank import Row, ranked
from launch.sweep_table import COLUMNS, PER_CHIP, cells

# Figures by which a column is sorted; other columns are sorted as text.
_SORTED_BY = {
    "step": "step_s",
    "MFU": "mfu",
    "HFU": "hfu",
    "exposed": "communication_s",
    "memory": "memory_bytes",
    PER_CHIP: "tokens_per_s_per_chip",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.answer { background: #eef5fb; border-left: 4px solid #0072b2; padding: .6rem 1rem; margin: .6rem 0; }
pre { background: #f5f5f5; padding: .6rem 1rem; overflow-x: auto; margin: .4rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th:first-child, td:first-child, .text { text-align: left; }
td.why { white-space: normal; text-align: left; font-size: .85em; color: #555; max-width: 22rem; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid #0072b2; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
tr.off td { color: #777; } img { max-width: 100%; margin: .5rem 0; }
"""
_SCRIPT = """
"use strict";
for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.parentElement, column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
  const body = document.querySelector("tbody");
  const rows = [...body.rows].sort((a, b) => {
    const [u, v] = [value(a), value(b)];
    if (u === "" || v === "") return (u === "") - (v === "");  // rows without the figure stay below
    const order = isNaN(u) || isNaN(v) ? u.localeCompare(v, undefined, { numeric: true }) : u - v;
    return down ? -order : order;
  });
  body.append(...rows);
});
"""


def page(
    title: str,
    answers: Sequence[str],
    commands: Sequence[str],
    rows: Sequence[Row],
    pictures: Mapping[str, bytes],
    notes: Sequence[str],
) -> str:
    """The page. pictures: caption to PNG. Every value that comes from outside is escaped."""
    return "\n".join(
        (
            '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">',
            f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>",
            *(f'<p class="answer">{html.escape(text)}</p>' for text in answers),
            *(f"<pre>{html.escape(command)}</pre>" for command in commands),
            "<h2>All points</h2>\n<p>Click a heading to sort.</p>",
            _table(rows),
            *(_picture(caption, data) for caption, data in pictures.items()),
            "<h2>How to read this</h2>",
            *(f"<p>{html.escape(note)}</p>" for note in notes),
            f"<script>{_SCRIPT}</script>\n</html>\n",
        )
    )


def _table(rows: Sequence[Row]) -> str:
    names = ("rank", *COLUMNS, PER_CHIP, "state", "reason")
    head = "".join(f"<th><button>{html.escape(name)}</button></th>" for name in names)
    body = "\n".join(_line(number, row, rows) for number, row in enumerate(ranked(rows), start=1))
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _line(number: int, row: Row, rows: Sequence[Row]) -> str:
    shown = cells(row, rows)
    parts = [f'<td data-value="{number}">{number}</td>']
    for name, text in shown.items():
        value = row[_SORTED_BY[name]] if name in _SORTED_BY else text.removesuffix("x") if name == "over off" else text
        value = "" if value is None else value
        kind = ' class="text"' if name in ("slice", "mesh", "overlap", "settings") else ""
        parts.append(f'<td{kind} data-value="{html.escape(str(value))}">{html.escape(text)}</td>')
    parts.append(f'<td class="text">{html.escape(row.state)}</td><td class="why">{html.escape(row.why)}</td>')
    begin = "<tr>" if row["step_s"] else '<tr class="off">'
    return f"{begin}{''.join(parts)}</tr>"


def _picture(caption: str, data: bytes) -> str:
    encoded = base64.b64encode(data).decode()
    text = html.escape(caption)
    return f'<h2>{text}</h2>\n<img alt="{text}" src="data:image/png;base64,{encoded}">'
