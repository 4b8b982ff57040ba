"""Has the annotations of our functions checked whenever they are called or traced."""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys

import pytest

PROJECT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("overlapfx", "models")
# Modules whose annotations are not checked at run time, each with its reason.
UNCHECKED = {
    "overlapfx.config": "checks its own fields and answers with a ValueError, which tests look at",
    "overlapfx.families": "the same",
    "overlapfx.fields": "does that checking",
    **{
        f"overlapfx.plan.schedulers.{name}": "no arrays, and loops over graphs that checks make a hundred times slower"
        for name in ("base", "as_written", "memory", "bottom_up", "top_down")
    },
}


def install() -> None:
    """From here on every import from PACKAGES is checked; must run before the first of them, before JAX too."""
    if importlib.metadata.version("typeguard") != "2.13.3":
        # A later version fails on the first annotation with a shape, with a syntax error that explains nothing.
        raise pytest.UsageError(
            "The tests need typeguard 2.13.3; run them with make test, or pip install typeguard==2.13.3."
        )
    early = sorted({name.split(".")[0] for name in sys.modules} & {"jax", *PACKAGES})
    assert not early, f"imported before the environment was set: {early}"
    from jaxtyping import install_import_hook

    files = [file for package in PACKAGES for file in (PROJECT / package).rglob("*.py") if file.name != "__init__.py"]
    modules = {".".join(file.relative_to(PROJECT).with_suffix("").parts) for file in files}
    install_import_hook(sorted(modules - set(UNCHECKED)), "typeguard.typechecked")
