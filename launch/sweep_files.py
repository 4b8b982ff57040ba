"""The files that a sweep leaves behind: JSON, CSV, two pictures, one page."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

from launch.sweep_points import mesh_text
from launch.sweep_rank import Row, over_off, ranked
from overlapfx.config import to_dict

FORMAT = 1  # of the document; counts up when a reader of the old form would be wrong
_DOCUMENT = "sweep.json"
_TEMPORARY = ".report.tmp"
_FIGURES = (
    "step_s",
    "mfu",
    "hfu",
    "communication_s",
    "communication_share",
    "memory_bytes",
    "hbm_bytes",
    "tokens_per_s",
    "tokens_per_s_per_chip",
    "num_chips",
)


def document(rows: Sequence[Row], about: dict[str, Any], answers: Sequence[str], commands: Sequence[str]) -> str:
    """Everything as JSON text: the ranked points with config and result, illegal and failed ones with the reason.

    Seconds and bytes throughout. The same results give the same text.
    """
    points = [
        {
            "rank": number,
            **_named(row, rows),
            "config": None if row.point.config is None else to_dict(row.point.config),
            "result": None if row.result is None else {k: v for k, v in row.result.items() if k not in ("config",)},
        }
        for number, row in enumerate(ranked(rows), start=1)
    ]
    whole = {"format": FORMAT, **about, "answers": list(answers), "commands": list(commands), "points": points}
    return json.dumps(whole, indent=1) + "\n"


def table(rows: Sequence[Row]) -> str:
    """One line per point as CSV, the best first; seconds and bytes, empty where there is no figure."""
    buffer = io.StringIO()
    names = ["rank", *_named(rows[0], rows), *_FIGURES]
    writer = csv.DictWriter(buffer, names, lineterminator="\n")
    writer.writeheader()
    for number, row in enumerate(ranked(rows), start=1):
        writer.writerow({"rank": number, **_named(row, rows), **{name: row[name] for name in _FIGURES}})
    return buffer.getvalue()


def _named(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    """What identifies a point, what became of it."""
    mesh = row.point.mesh
    return {
        "slice": row.point.target.name,
        "mesh": mesh_text(mesh),
        "replica": mesh.replica,
        "y": mesh.y,
        "x": mesh.x,
        "overlap": row.mode,
        "settings": row.others,
        "state": row.state,
        "over_off": over_off(row, rows),
        "why": row.why,
    }


class Reports:
    """The numbered reports in a directory: report-1, report-2, ...; none is ever changed."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def find(self, text: str) -> pathlib.Path | None:
        """The report with this document, if it was written before."""
        for path in self._folder.glob(f"report-*/{_DOCUMENT}"):
            if path.read_text(encoding="utf-8") == text:
                return path.parent
        return None

    def write(self, text: str, files: dict[str, bytes]) -> pathlib.Path:
        """A new report, there as a whole or not at all; returns its directory."""
        temporary = self._folder / _TEMPORARY
        if temporary.exists():  # of a sweep that was killed while it wrote
            shutil.rmtree(temporary)
        temporary.mkdir()
        for name, data in {_DOCUMENT: text.encode(), **files}.items():
            (temporary / name).write_bytes(data)
        numbered = (self._folder / f"report-{number}" for number in itertools.count(1))
        final = next(path for path in numbered if not path.exists())
        os.rename(temporary, final)
        return final
