"""The code that decides the results of the figures."""

from __future__ import annotations

from typing import Any

from launch import sweep_basis

_MODULES = (
    *sweep_basis.CODE,
    "experiments.paper.work",
    "experiments.bench_sites",
    "experiments.bench_run",
    "experiments.foreign",
)


def code_hash() -> str:
    """Changes with any file that may decide a result; pages and tables are not among them."""
    return sweep_basis.code_hash(_MODULES)


def basis() -> dict[str, Any]:
    """What decides a result besides its task: code, versions of packages, environment."""
    return {**sweep_basis.planned({}, {}), "code": code_hash()}
