"""Results on disk: one line per point, only ever appended, so that a killed process loses nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from overlapfx.train.directories import take_lock

FORMAT = 1  # of a record; counts up when older records must not be used any more
FILE_NAME = "results.jsonl"
_LOCK_NAME = ".lock"
_BEGINNING = '{"format": '  # of every line


class Store:
    """The open results of a directory, locked against other processes until `close`; a context manager.

    option: what errors call the directory.
    `results` holds the newest record by key. A record is a JSON object with "key" and whatever else the writer knows.
    `torn` counts pieces of lines that killed writers left behind; they are skipped.

    Raises:
      ValueError: the directory cannot be made, is in use by another sweep, or its file is not one of ours.
    """

    def __init__(self, folder: pathlib.Path, option: str = "--out") -> None:
        self.folder, self.path = folder, folder / FILE_NAME
        _check_folder(folder, option)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(folder / _LOCK_NAME, f"{option}={folder}")
        except OSError as error:
            raise ValueError(f"{option}={folder} cannot be written to ({error.strerror}); choose another.") from error
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.close)  # a refused directory must not stay locked
            stored = read(folder, option)
            self.results, self.torn = stored.results, stored.torn
            self._file = self.path.open("ab")
            if stored.ends_in_line:  # what a killed writer left of its last line must not swallow the next one
                self._file.write(b"\n")
            _sync_folder(folder)
            undo.pop_all()

    def add(self, record: Mapping[str, Any]) -> None:
        """Appends a record; when this returns it is on disk, whatever becomes of the process or the machine."""
        line = json.dumps({"format": FORMAT, **record}, allow_nan=False)
        assert "\n" not in line
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.results[record["key"]] = json.loads(line)

    def close(self) -> None:
        """Unlocks the directory."""
        self._file.close()
        self._lock.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True)
class Stored:
    """What a file of results holds: the newest record by key, torn pieces, whether it ends inside a line."""

    results: dict[str, dict[str, Any]]
    torn: int
    ends_in_line: bool


def read(folder: pathlib.Path, option: str = "--out") -> Stored:
    """The results of a directory, nothing if there are none, also while another process adds to them.

    Raises ValueError for a file that is not one of ours; option: what the error calls the directory.
    """
    _check_folder(folder, option)
    path = folder / FILE_NAME
    text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
    results: dict[str, dict[str, Any]] = {}
    torn = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not line:
            continue
        if not line.startswith(_BEGINNING[: len(line)]):
            raise ValueError(f"line {number} of {path} is no result of a sweep; choose another {option}.")
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # no beginning of a JSON object is one itself
            torn += 1
            continue
        if record["format"] == FORMAT:
            results[record["key"]] = record
    return Stored(results, torn, bool(text) and not text.endswith("\n"))


def _check_folder(folder: pathlib.Path, option: str) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} is {folder}, which is a file; give a directory.")


def _sync_folder(folder: pathlib.Path) -> None:
    """Makes sure that a new file is still in its folder after a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
