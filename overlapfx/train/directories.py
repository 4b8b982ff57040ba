"""Directories that a run makes."""

from __future__ import annotations

import os
import pathlib


def make_directory(path: pathlib.Path, what: str, remedy: str) -> None:
    """Makes `path` and its parents unless they exist.

    Raises ValueError with one sentence (`what` it is for, the path, the system's reason, the `remedy`) if it cannot be
    made or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{what} {path} cannot be made ({error.strerror}); {remedy}.") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"{what} {path} cannot be written to; {remedy}.")
