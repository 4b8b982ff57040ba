"""Says what a command is busy with: a clock that runs on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn


class Progress:
    """Announces long pieces of work on `file` (default: standard error, so that results can be piped)."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file

    @contextlib.contextmanager
    def working(self, what: str) -> Iterator[None]:
        """Shows `what` while the block runs, with the seconds so far; says how long it took if it succeeds."""
        begun = time.perf_counter()
        if self._file.isatty():
            columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
            # Compiling keeps Python's lock for seconds at a time, so the clock may stand still for a while.
            with Bar(*columns, console=Console(file=self._file), transient=True, refresh_per_second=2) as bar:
                bar.add_task(what)
                yield
        else:
            print(f"{what} ...", file=self._file, flush=True)
            yield
        print(f"{what}: {time.perf_counter() - begun:.1f} s", file=self._file, flush=True)
