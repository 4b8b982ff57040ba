"""The source files of the running Python's standard library, as a text corpus split by file."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

SPLITS = ("train", "validation", "test")
# Installed packages are not the library; tests hold deliberately odd text; the rest is one machine's build settings.
_SKIPPED_DIRECTORIES = frozenset({"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"})
_BUILD_PREFIXES = ("_sysconfigdata", "_sysconfig_vars")


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """One file: its path relative to the library with forward slashes, and its bytes, which are valid UTF-8."""

    name: str
    text: bytes


def collect(root: str | os.PathLike[str] | None = None) -> list[SourceFile]:
    """The source files below `root` (the running Python's standard library unless given), ordered by name.

    Directories of tests and of installed packages are left out, as are files that describe one machine's build or are
    not UTF-8, so that equal Python releases give equal lists.

    Raises:
        ValueError: no source file was found.
    """
    top = Path(sysconfig.get_path("stdlib") if root is None else root)
    files = []
    for directory, subdirectories, names in os.walk(top):
        subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED_DIRECTORIES and not d.startswith("config-")]
        for name in names:
            if not name.endswith(".py") or name.startswith(_BUILD_PREFIXES):
                continue
            path = Path(directory, name)
            text = path.read_bytes()
            if _is_utf8(text):
                files.append(SourceFile(path.relative_to(top).as_posix(), text))
    if not files:
        raise ValueError(
            f"No Python source file was found in the standard library at {top}; use a Python installation that has its "
            "library as files, or choose another data set with data.name."
        )
    return sorted(files, key=lambda file: file.name)


def split_of(name: str) -> str:
    """The split of a file: 90 % of the names are in train, 5 % each in validation and test.

    It depends on the name alone, so a file keeps its split when others come or go.
    """
    percentile = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    if percentile < 90:
        return "train"
    return "validation" if percentile < 95 else "test"


def fingerprint(files: Sequence[SourceFile]) -> str:
    """Twelve hexadecimal digits that change with any name or byte of `files`, or with the split of any of them."""
    digest = hashlib.sha256()
    for file in files:
        header = f"{file.name}\0{split_of(file.name)}\0{len(file.text)}\0"
        digest.update(header.encode())
        digest.update(file.text)
    return digest.hexdigest()[:12]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
