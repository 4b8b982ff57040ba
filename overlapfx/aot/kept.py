"""Programs compiled for slices, kept between processes: compiling takes minutes, reading what was compiled seconds."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.experimental.mosaic.dialects import tpu
from jaxlib.mlir import ir

from overlapfx.train.directories import cache_dir, replacing

# Beyond it those that were not asked for the longest go.
_MAX_BYTES = 4 * 2**30
# What else the compiler listens to.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Says nothing about programs for a slice.
_HOST = re.compile(r"--xla_(?:cpu|force_host_platform_device_count)\S*")
_PACKAGES = ("jax", "jaxlib", "libtpu")
# As MLIR prints them: the body of a kernel in its configuration, a string inside a string; scopes, which have slashes,
# unlike names of functions.
_KERNEL = re.compile(r"(body\\22: \\22)([^\\]+)")
_SCOPE = re.compile(r'loc\("([^"]*/[^"]*)"\(')
_LEVEL = 1  # of compression: the text shrinks tenfold, more is not worth the time


@dataclasses.dataclass(frozen=True)
class Kept:
    """Scheduled text of a program, with what is known of its compilation as JSON values."""

    text: str
    facts: Mapping[str, Any]


def directory() -> Path:
    """Where they are; it may be deleted at any time."""
    return cache_dir() / "compiled"


def text_of(lowered: Any) -> str:
    """All that a lowered program (`jax.stages.Lowered`) is compiled from and read by, without places in the source.

    Scopes belong to it: by them einsum sites are found in the compiled program. Kernels come as bytecode with places
    inside; printed they have none.
    """
    text = _KERNEL.sub(lambda found: found[1] + _printed(base64.b64decode(found[2])), lowered.as_text())
    # How often each is printed depends on what the process traced before.
    return "\n".join([text, *sorted(set(_SCOPE.findall(lowered.as_text(debug_info=True))))])


def _printed(kernel: bytes) -> str:
    context = ir.Context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True
    return str(ir.Module.parse(kernel, context=context).operation.get_asm(enable_debug_info=False))


def key(traced: str, options: Mapping[str, str], *place: str) -> str:
    """Names a program: its text before compilation, the options, what describes the place that it is compiled for."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    variables = {name: _HOST.sub("", os.environ.get(name, "")).strip() for name in _VARIABLES}
    rest = json.dumps([versions, variables, dict(options), place], sort_keys=True)
    return hashlib.sha256(f"{rest}\n{traced}".encode()).hexdigest()


def find(name: str) -> Kept | None:
    """The program of this `key`; None if there is none that can be read."""
    path = _path(name)
    try:
        facts, _, text = gzip.decompress(path.read_bytes()).decode().partition("\n")
        os.utime(path)
        return Kept(text, json.loads(facts))
    except (OSError, EOFError, zlib.error, ValueError):  # a damaged file is as good as none
        return None


def keep(name: str, program: Kept) -> None:
    """Stores a program under its `key`, unless there is no room or no permission: it is a cache."""
    packed = gzip.compress(f"{json.dumps(program.facts)}\n{program.text}".encode(), _LEVEL)
    with contextlib.suppress(OSError):
        with replacing(_path(name)) as file:
            file.write(packed)
        _make_room()


def _path(name: str) -> Path:
    return directory() / f"{name}.gz"


def _make_room() -> None:
    files = sorted(((path.stat(), path) for path in directory().iterdir()), key=lambda one: -one[0].st_mtime)
    total = 0
    for status, path in files:
        total += status.st_size
        if total > _MAX_BYTES:
            path.unlink(missing_ok=True)
