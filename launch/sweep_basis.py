"""What decides the result of a point besides its config: our code, the versions of packages, the environment."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

# Packages with code that ends up in a compiled step, or prices it.
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "numpy")
CODE = ("overlapfx", "models")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


def code_hash(modules: Sequence[str] = CODE) -> str:
    """A hash of every source file that may decide a result, packages with all in them; changes with any change."""
    digest = hashlib.sha256()
    for module in modules:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        root = pathlib.Path(spec.origin).parent
        files = sorted(root.rglob("*.py")) if spec.submodule_search_locations else [pathlib.Path(spec.origin)]
        for file in files:
            digest.update(f"{module}/{file.relative_to(root).as_posix()}\0".encode())
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def planned(assumed: Mapping[str, float], flags: Mapping[str, str]) -> dict[str, Any]:
    """The basis of a planned result: with the figures and the compiler options that the user replaced."""
    return {"how": "planned", **_common(), "assumed": dict(assumed), "flags": dict(flags)}


def measured(device_kind: str, num_steps: int) -> dict[str, Any]:
    """The basis of a measured result: it holds for this machine."""
    return {"how": "measured", **_common(), "devices": device_kind, "machine": platform.node(), "num_steps": num_steps}


def _common() -> dict[str, Any]:
    found: dict[str, str] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    environment = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    return {"code": code_hash(), "versions": found, "environment": environment}
