"""Directories that runs and sweeps make and hold."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import socket
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, TextIO


def cache_dir() -> pathlib.Path:
    """What can be made again is kept in overlapfx below $XDG_CACHE_HOME, or else below ~/.cache."""
    configured = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))  # to be ignored unless absolute, by the convention
    return (configured if configured.is_absolute() else pathlib.Path.home() / ".cache") / "overlapfx"


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """A file for what `path` is to hold: the block's end puts it there, at once and whole; its directory is made.

    A block that fails leaves `path` as it was, and nothing beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        file = undo.enter_context(tempfile.NamedTemporaryFile(dir=path.parent, delete=False))
        undo.callback(os.unlink, file.name)
        yield file  # type: ignore[misc]
        file.close()
        os.replace(file.name, path)
        undo.pop_all()


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


def take_lock(path: pathlib.Path, what: str) -> TextIO:
    """The open lock file `path`, held until it is closed or the process ends.

    Raises ValueError with one sentence (`what` it locks, who holds it, the remedy) if another process has it.
    """
    lock = path.open("a+", encoding="utf-8")
    try:
        # The kernel releases it however the process ends, so a stale lock cannot exist.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise ValueError(f"{what} is in use by {holder}; wait until it ends or choose another directory.") from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock
