"""How far a sweep is: a bar on a terminal, one plain line per point anywhere else."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from launch.sweep_rank import FITS, Row, duration


class SweepProgress:
    """A context manager; `num_points` are to be worked off, on `file` (default: standard error).

    lacking: what is said of those that did not come out as hoped.
    """

    def __init__(self, num_points: int, file: TextIO | None = None, lacking: str = "without a step that fits") -> None:
        self._file = sys.stderr if file is None else file
        self._num_points, self._lacking = num_points, lacking
        self._done = self._bad = 0
        self._busy: list[str] = []
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> SweepProgress:
        if self._file.isatty():
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            self._bar = self._opened.enter_context(Progress(*columns, console=Console(file=self._file), transient=True))
            self._task = self._bar.add_task("", total=self._num_points)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def started(self, name: str) -> None:
        """A worker begins with the point."""
        self._busy.append(name)
        self._show()

    def done(self, row: Row) -> None:
        """A point has a result, or none and a reason."""
        self.finished(str(row.point), _result(row), row.state == FITS)

    def finished(self, name: str, result: str, good: bool) -> None:
        """As `done`, for work of any kind: its `result` in words, and whether it is what was hoped for."""
        self._busy = [other for other in self._busy if other != name]
        self._done += 1
        self._bad += not good
        self._line(f"[{self._done}/{self._num_points}] {name}: {result}")
        self._show()

    def note(self, text: str) -> None:
        """A line of its own."""
        self._line(text)

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._file, flush=True)

    def _show(self) -> None:
        if self._bar is not None:
            without = f"{self._bad} {self._lacking}; " if self._bad else ""
            self._bar.update(self._task, completed=self._done, description=f"{without}{', '.join(self._busy)}")


def _result(row: Row) -> str:
    took = f"({row['took_s']:.0f} s)"
    if row["step_s"] is None:
        return f"{row.state}: {row.why} {took}"
    mfu = "" if row["mfu"] is None else f", MFU {row['mfu']:.1%}"
    return f"{duration(row['step_s'])} per step{mfu}{'' if row.state == FITS else ', DOES NOT FIT'} {took}"
