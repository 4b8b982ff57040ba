"""Prepares the process before anything imports JAX: simulated devices, the compilation cache, checked annotations."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import re

import checked_annotations
import pytest
from core_guard import CoreGuard
from hypothesis import settings

NUM_DEVICES = 8
# As in launch.environment, which may not be imported this early: XLA's CPU runtime confuses permutes that run at once.
ONE_BY_ONE = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
QUICK_COMPILATION = "--xla_backend_optimization_level=0"


def _set_environment() -> None:
    """Eight simulated CPU devices, whatever the caller's environment says; subprocesses inherit them."""
    flags = re.sub(
        r"--xla_(force_host_platform_device_count|backend_optimization_level)=\S*", "", os.environ.get("XLA_FLAGS", "")
    )
    # The suite compiles much and computes little: without LLVM's optimisations it takes half the processor time.
    flags += f" {ONE_BY_ONE} {QUICK_COMPILATION} --xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["XLA_FLAGS"] = flags.strip()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_cache_dir()))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # Pictures without a window system.
    os.environ.setdefault("MPLBACKEND", "Agg")


def _cache_dir() -> pathlib.Path:
    """A folder outside the tree, one per kind of processor: compiled code is not portable, which JAX's key ignores."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.is_file() else platform.processor()
    features = sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*$", text, re.MULTILINE))) or [text]
    kind = hashlib.sha256("\n".join(features).encode()).hexdigest()[:12]
    root = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return root / "overlapfx" / f"tests-jax-{importlib.metadata.version('jax')}-{kind}"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CoreGuard(config), "core-guard")


_set_environment()
checked_annotations.install()
# Compilation makes the first example slow, so no deadline; the same examples every time, so that a failure can be
# repeated.
settings.register_profile("suite", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("suite")
