"""Times every decomposition of some collective einsums against blocking collectives.

    python -m experiments.microbench                          on simulated CPU devices
    python -m experiments.microbench --topology v4:4x4x4      compiled ahead of time for a slice, read off its schedule

Simulated devices share the cores and move data by copying, so there is nothing to hide: figures from there say what a
decomposition costs, not what it gains. What it gains is what the compiled program of a slice is for.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launch import environment
from launch.arguments import Parser, one_sentence
from overlapfx.aot.slices import make_slice_mesh, parse_slice, prepare_environment
from overlapfx.config import MeshConfig, Overlap

if TYPE_CHECKING:
    from experiments.bench_run import Row
    from experiments.bench_sites import Site, Sizes

SCHEMA = 1  # of the records that --json appends
PROG = "experiments.microbench"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The checked arguments; a wrong one is a one-sentence error with exit code 2."""
    parser = Parser(prog=PROG, description="Times every decomposition against blocking collectives.")
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="simulated CPU devices (default 8)")
    parser.add_argument("--topology", metavar="SLICE", help="compile for this slice instead, for example v4:4x4x4")
    parser.add_argument(
        "--x", type=int, default=4, metavar="N", help="size of the model axis (default 4); y is the rest"
    )
    parser.add_argument("--site", action="append", metavar="NAME", help="only this site; may be repeated")
    parser.add_argument("--variant", action="append", metavar="NAME", help="only this decomposition and blocking")
    parser.add_argument("--forward", action="store_true", help="leave the backward pass out")
    parser.add_argument("--runs", type=int, default=9, metavar="N", help="timed runs of each program (default 9)")
    for name in ("tokens", "width", "hidden", "heads", "head_dim"):
        parser.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{name}, per y shard" if name == "tokens" else name
        )
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="TPU compiler option")
    parser.add_argument("--json", metavar="FILE", help="append the results to this file, one JSON record per line")
    arguments = parser.parse_args(argv)
    for name in ("devices", "x", "runs"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} is {getattr(arguments, name)}; it must be at least 1.")
    for option in arguments.option:
        if "=" not in option:
            parser.error(f"--option {option!r} is not of the form NAME=VALUE.")
    return arguments


@dataclasses.dataclass(frozen=True)
class Setup:
    """What one run does; topology is None on simulated devices."""

    arguments: argparse.Namespace
    mesh: Any
    topology: Any
    sizes: Sizes
    sites: Mapping[str, Site]
    variants: Mapping[str, Overlap]
    passes: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    arguments = parse(argv)
    with one_sentence(PROG):
        if arguments.topology:
            prepare_environment()
        else:
            environment.prepare(arguments.devices, arguments.devices)
        setup = set_up(arguments)
    rows = run(setup)
    if arguments.json:
        append_record(pathlib.Path(arguments.json), record(setup, rows))
    return 0


def set_up(arguments: argparse.Namespace) -> Setup:
    """Mesh, sites and variants, in a process whose environment is prepared. Raises ValueError for what does not fit."""
    from experiments import bench_sites

    mesh, topology = _mesh(arguments)
    sizes = _sizes(arguments, bench_sites.COMPILED if topology else bench_sites.SIMULATED)
    sites = _chosen("site", arguments.site, bench_sites.make_sites(sizes, mesh.shape["y"]))
    variants = _chosen("variant", arguments.variant, bench_sites.variants(), always="blocking")
    for site in sites.values():
        bench_sites.arguments(site, mesh, "float32")
    passes = bench_sites.PASSES[:1] if arguments.forward else bench_sites.PASSES
    return Setup(arguments, mesh, topology, sizes, sites, variants, passes)


def run(setup: Setup) -> list[Row]:
    """Prints a note per compilation and a table per site and pass; returns every row."""
    from experiments import bench_run

    rows: list[Row] = []
    options = dict(option.split("=", 1) for option in setup.arguments.option)
    for site in setup.sites.values():
        for which in setup.passes:
            peak_s = None
            if setup.topology is None:
                here = bench_run.time_on_devices(site, setup.mesh, which, setup.variants, setup.arguments.runs)
            else:
                here = bench_run.compile_for_slice(site, setup.mesh, which, setup.variants, setup.topology, options)
                peak_s = site.flops(which) / (setup.mesh.size * setup.topology.chip.per_device().peak_bf16_flops)
            done = _collect(here)
            print(table(f"{site.name} {which}: {site.spec}, {site.what}", done, peak_s), flush=True)
            rows += done
    return rows


def _mesh(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The mesh (y, x), and the slice if there is one."""
    from overlapfx.mesh import make_mesh

    topology = parse_slice(arguments.topology) if arguments.topology else None
    num_devices = topology.num_devices if topology else arguments.devices
    if num_devices % arguments.x:
        raise ValueError(f"--x={arguments.x} does not divide {num_devices} devices; choose one of their divisors.")
    y = num_devices // arguments.x
    if topology is None:
        return make_mesh(MeshConfig(y=y, x=arguments.x)), None
    return make_slice_mesh(topology, {"y": y, "x": arguments.x})[0], topology


def _sizes(arguments: argparse.Namespace, default: Sizes) -> Sizes:
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(default)}
    for name, size in given.items():
        if size is not None and size < 1:
            raise ValueError(f"--{name} is {size}; it must be at least 1.")
    return dataclasses.replace(default, **{name: size for name, size in given.items() if size is not None})


def _chosen(what: str, names: list[str] | None, known: Mapping[str, Any], always: str = "") -> dict[str, Any]:
    for name in names or ():
        if name not in known:
            raise ValueError(f"--{what} {name!r} does not exist; choose from {', '.join(known)}.")
    return {name: value for name, value in known.items() if not names or name in names or name == always}


def _collect(results: Iterable[Any]) -> list[Row]:
    """The rows; notes go to stderr as they come, since a table is complete only at its end."""
    rows = []
    for result in results:
        if isinstance(result, str):
            print(result, file=sys.stderr, flush=True)
        else:
            rows.append(result)
    return rows


def table(title: str, rows: Sequence[Row], peak_s: float | None = None) -> str:
    """Rows as text: milliseconds, and how many times as fast as blocking."""
    blocking = next((row.total_s for row in rows if row.variant == "blocking" and row.total_s), None)
    estimated = any(row.compute_s is not None for row in rows)
    heads = ("estimate", "compute", "exposed", "blocking") if estimated else ("median", "spread")
    lines = ["", title]
    if peak_s is not None:
        lines.append(f"arithmetic at peak {peak_s * 1e3:.3f} ms")
    lines.append(f"{'ms':22s}" + "".join(f"{head:>12s}" for head in heads) + f"{'gain':>8s}")
    for row in rows:
        if row.total_s is None:
            lines.append(f"{row.variant:22s}  left out: {row.skipped}")
            continue
        shown = (
            (row.total_s, row.compute_s, row.exposed_s, row.blocking_s) if estimated else (row.total_s, row.spread_s)
        )
        gain = f"{blocking / row.total_s:7.2f}x" if blocking else ""
        lines.append(f"{row.variant:22s}" + "".join(f"{(s or 0) * 1e3:12.3f}" for s in shown) + gain)
    return "\n".join(lines)


def record(setup: Setup, rows: Sequence[Row]) -> dict[str, Any]:
    """One run as JSON: when, with what, on what, and every row with its plans; times in seconds."""
    packages = ["jax", "jaxlib", *(["libtpu"] if importlib.util.find_spec("libtpu") else [])]
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "kind": "simulated" if setup.topology is None else "compiled",
        "topology": setup.arguments.topology,
        "compiler_options": setup.arguments.option,
        "mesh": dict(setup.mesh.shape),
        "sizes": dataclasses.asdict(setup.sizes),
        "runs": setup.arguments.runs if setup.topology is None else None,
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "cpu_cores": os.cpu_count(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def append_record(path: pathlib.Path, made: Mapping[str, Any]) -> None:
    """Adds a line to the file: earlier records stay, each with the versions that it was made with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    sys.exit(main())
