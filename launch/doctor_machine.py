"""What an examination asks of the machine: versions, devices, room."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import re
import shutil
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from launch import session
from launch.config_file import PROJECT
from launch.finding import FAIL, OK, WARN, Finding
from overlapfx.config import Config
from overlapfx.train import state
from overlapfx.train.directories import cache_dir

# Combinations that the whole test suite was run with.
TRIED = (
    {"jax": "0.10.2", "flax": "0.12.8"},
    {"jax": "0.12.0.1", "flax": "0.12.12"},
    {"jax": "0.12.0.1", "flax": "0.12.8"},
)
_PROBE_BYTES = 16 << 20


def versions() -> Iterator[Finding]:
    """The interpreter and the packages, against what this program asks for and has been tried with."""
    installed = {name: _version(name) for name in ("jax", "jaxlib", *_required())}
    listed = ", ".join(f"{name} {version or 'missing'}" for name, version in installed.items())
    yield Finding(OK, "Python", f"{platform.python_version()} on {platform.platform()}")
    bad = list(bad_versions(installed, _required()))
    if bad:
        yield Finding(FAIL, "packages", "\n".join([*bad, listed]))
        return
    tried = any(all(installed[name] == version for name, version in known.items()) for known in TRIED)
    note = "" if tried else "; this combination of jax and flax is not one that the test suite was run with"
    yield Finding(OK if tried else WARN, "packages", listed + note)


def bad_versions(installed: Mapping[str, str | None], required: Mapping[str, str]) -> Iterator[str]:
    """A sentence for everything that is missing, too old, or known not to go together."""
    for name, least in required.items():
        found = installed.get(name)
        if found is None:
            yield f"{name} is missing; install {name}>={least}."
        elif _numbers(found) < _numbers(least):
            yield f"{name} {found} is older than {least}; install {name}>={least}."
    jax_version, jaxlib = installed.get("jax"), installed.get("jaxlib")
    # jaxlib may not be newer than jax, and each jax states its least jaxlib: in practice they come in pairs.
    if jax_version and jaxlib and _numbers(jax_version)[:3] != _numbers(jaxlib)[:3]:
        yield f"jax {jax_version} and jaxlib {jaxlib} do not belong together; install jaxlib=={jax_version}."


def _required() -> dict[str, str]:
    """Package: least version, as the project declares them."""
    try:
        declared = importlib.metadata.requires("overlapfx") or []
    except importlib.metadata.PackageNotFoundError:  # a checkout that is run without being installed
        declared = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    found = [re.fullmatch(r"([\w.-]+)\s*>=\s*([\d.]+)", line) for line in declared if "extra" not in line]
    return {match[1]: match[2] for match in found if match}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:4])


def tpu_compiler() -> Iterator[Finding]:
    """The compiler for TPUs, which `overlapfx plan` needs on any machine and training needs on TPUs."""
    version = _version("libtpu")
    if version:
        yield Finding(OK, "TPU compiler", f"libtpu {version}")
        return
    status = FAIL if jax.default_backend() == "tpu" else WARN
    yield Finding(status, "TPU compiler", "libtpu is missing: overlapfx plan needs it; pip install 'overlapfx[plan]'")


def devices(config: Config) -> Iterator[Finding]:
    """What JAX finds, against what the mesh needs."""
    found, wanted = jax.devices(), config.mesh.num_devices
    kinds = sorted({device.device_kind for device in found})
    text = f"{len(found)} x {', '.join(kinds)} ({jax.default_backend()}), {jax.process_count()} process(es)"
    limit = (found[0].memory_stats() or {}).get("bytes_limit") if found[0].platform != "cpu" else None
    if limit:
        text += f", {limit / 2**30:.1f} GiB each"
    if len(found) != wanted:
        yield Finding(FAIL, "devices", f"{text}; the mesh needs {wanted}: change mesh.*, or pass --devices={wanted}")
        return
    yield Finding(OK if len(kinds) == 1 else WARN, "devices", text)


def disk(config: Config, run_path: Path) -> Iterator[Finding]:
    """Room for the checkpoints of the run, whether it can be written to and how fast; the data cache."""
    size = state_bytes(config)
    need = size * (config.train.checkpoint_keep + 1)  # the newest is written before the oldest goes
    there = _existing(run_path)
    free = shutil.disk_usage(there).free
    rate = _write_rate(there)
    text = (
        f"{free / 1e9:.1f} GB free for {run_path}, written at {rate / 1e6:.0f} MB/s; "
        f"{config.train.checkpoint_keep} + 1 checkpoints of {size / 1e9:.3g} GB need {need / 1e9:.3g} GB, one takes "
        f"about {size / rate:.1f} s (estimate)"
    )
    yield Finding(OK if free > need else FAIL, "disk", text if free > need else f"{text}: make room or use --run_dir")
    cache = _existing(Path(config.data.data_dir).expanduser() if config.data.data_dir else cache_dir())
    if os.access(cache, os.W_OK):
        yield Finding(OK, "data cache", f"{cache} can be written to, {shutil.disk_usage(cache).free / 1e9:.1f} GB free")
    else:
        yield Finding(WARN, "data cache", f"{cache} cannot be written to: data must be prepared there already")


def state_bytes(config: Config) -> int:
    """Bytes of one checkpoint: parameters and both moments."""
    model = session.make_model(config)
    abstract = jax.eval_shape(state.init_fn(model, session.make_optimizer(config), config.seed))
    leaves = [leaf for leaf in jax.tree.leaves(abstract) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def memory_text(needed: int, on_device: bool) -> tuple[str, str]:
    """Status and text for a program that needs `needed` bytes per device, or (simulated devices) in all."""
    if on_device:
        limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
        where = "a device"
    else:
        found = (
            re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
            if os.path.exists("/proc/meminfo")
            else None
        )
        limit, where = int(found[1]) * 1024 if found else None, "this machine for all devices together"
    if limit is None:
        return OK, f"{needed / 1e9:.3g} GB are needed of {where}; how much there is cannot be found out"
    status = OK if needed < 0.9 * limit else WARN if needed < limit else FAIL
    return status, f"{needed / 1e9:.3g} GB of the {limit / 1e9:.3g} GB of {where} (arguments, results, temporaries)"


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that exists."""
    path = path.absolute()
    return path if path.is_dir() else _existing(path.parent)


def _write_rate(folder: Path) -> float:
    """Bytes per second of one written and flushed file."""
    content = np.random.default_rng(0).bytes(_PROBE_BYTES)
    begun = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".overlapfx-doctor-") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return _PROBE_BYTES / (time.perf_counter() - begun)
