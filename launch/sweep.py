"""Sweeps mesh shapes and any other fields of a config: which of them to use for a model on a slice."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launch import sweep_basis, sweep_rank, sweep_table, sweep_worker
from launch.arguments import Parser, config_parser, one_sentence, parse_overrides
from launch.config_file import load_config
from launch.environment import prepare
from launch.sweep_files import Reports, document, table
from launch.sweep_machine import this_machine
from launch.sweep_points import ALL, MODE, Point, Target, expand
from launch.sweep_pool import Serve, StartError
from launch.sweep_progress import SweepProgress
from launch.sweep_rank import Row
from launch.sweep_run import CodeChanged, Sweep, missing, work_off
from launch.sweep_store import Store
from overlapfx.aot import slices, variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.config import from_config_dict

FAILED, DOES_NOT_FIT, INTERRUPTED = 1, 3, 130  # exit codes: no point has a result, none fits, Ctrl-C


def main(argv: Sequence[str] | None = None, serve: Serve = sweep_worker.serve) -> int:
    """Reads the arguments, works off what has no result yet, prints and writes the answer; returns the exit code.

    0 if some point fits, else 3, or 1 if all failed; 2 for an error of the user's; 130 if interrupted.
    """
    parser = config_parser(
        "sweep", "Find the mesh and the overlap setting for a model on a slice: plan or measure every combination."
    )
    _add_arguments(parser)
    with one_sentence(parser.prog):
        arguments, overrides = parse_overrides(parser, sys.argv[1:] if argv is None else argv)
        targets, basis, told = _measuring(arguments, overrides) if arguments.measure else _planning(arguments)
        if arguments.overlap is not None:
            overrides.append(f"{MODE}={arguments.overlap}")
        points = expand(arguments.config, overrides, arguments.mesh, targets)
        legal = {point.key(basis): point for point in points if point.config is not None}
        if not legal:
            raise ValueError(f"none of the {len(points)} points is legal; the first one, {points[0]}: {points[0].why}")
        store = Store(arguments.out)
    with store:
        sweep = Sweep(legal, basis, told, arguments.workers, arguments.timeout)
        todo = missing(sweep, store, arguments.retry)
        print(f"{len(points)} points, {len(legal)} of them legal, {len(legal) - len(todo)} with a stored result")
        if store.torn:
            print(f"{store.torn} unfinished lines of killed sweeps in {store.path} are skipped")
        try:
            with SweepProgress(len(todo)) as progress:
                work_off(sweep, store, todo, this_machine(), serve, progress)
        except KeyboardInterrupt:
            print(f"interrupted; every finished point is in {store.path}, the same command goes on from there")
            return INTERRUPTED
        except (StartError, CodeChanged) as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return FAILED
        rows = [Row(point, None if point.config is None else store.results[point.key(basis)]) for point in points]
        return _report(arguments, rows, basis, store.folder)


def _add_arguments(parser: Parser) -> None:
    parser.epilog = (
        "--config.FIELD=A,B sweeps any field of the config, for example --config.overlap.unroll=1,2; values with "
        "commas of their own are written as a JSON list. A sweep that was interrupted goes on when called again."
    )
    add = parser.add_argument
    add("--topology", metavar="SLICES", help="for example v4:4x4x4, or several: v4:4x4x4,v5p:4x4x4 (needed for plans)")
    add("--mesh", default=ALL, metavar="SHAPES", help="all (default), or YxX and REPLICAxYxX, separated by commas")
    add("--overlap", metavar="MODES", help="for example off,on,auto; the same as --config.overlap.mode=off,on,auto")
    add("--out", required=True, type=Path, metavar="DIR", help="results and reports; may hold those of other sweeps")
    add("--measure", action="store_true", help="run real steps on the devices of this machine, simulated ones included")
    add("--steps", type=_at_least_one, default=10, metavar="N", help="steps to measure per point (default: 10)")
    add("--workers", type=_at_least_one, metavar="N", help="processes at a time (default: as many as fit)")
    add("--timeout", type=_at_least_one, default=3600, metavar="SECONDS", help="give a point up (default: 3600)")
    add("--retry", action="store_true", help="try again what failed before")
    add("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace a figure of the model of the chip")
    add("--flag", action="append", default=[], metavar="NAME=VALUE", help="a compiler option, for every point")


def _at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


Setting = tuple[list[Target], dict[str, Any], dict[str, Any]]


def _planning(arguments: argparse.Namespace) -> Setting:
    """The slices, what decides results besides configs, what workers need to know. Raises ValueError."""
    if arguments.topology is None:
        raise ValueError("--topology is missing; name a slice such as v4:4x4x4, or measure on this machine: --measure.")
    if arguments.devices is not None:
        raise ValueError(f"--devices={arguments.devices} simulates devices, which only --measure needs; leave it out.")
    found = [slices.parse_slice(name) for name in _slice_names(arguments.topology)]
    assumed = variants.parse_figures("--assume", arguments.assume)
    flags = variants.parse_settings("--flag", arguments.flag)
    for one in found:
        Assumptions.for_slice(one, **assumed)
    slices.require_compiler()
    slices.prepare_environment()
    targets = [Target(str(one), one.num_devices, one.num_slices) for one in found]
    return targets, sweep_basis.planned(assumed, flags), {"assumed": assumed, "flags": flags}


def _slice_names(text: str) -> list[str]:
    """The slices of a list whose commas may also belong to `v4:4x4x4,slices=2`."""
    names: list[str] = []
    for part in text.split(","):
        if part.strip().startswith("slices=") and names:
            names[-1] += f",{part.strip()}"
        else:
            names.append(part)
    return list(dict.fromkeys(names))


def _measuring(arguments: argparse.Namespace, overrides: Sequence[str]) -> Setting:
    """As `_planning`, for the devices of this machine, which a process of its own looks at."""
    given = [name for name in ("topology", "assume", "flag") if getattr(arguments, name)]
    if given:
        raise ValueError(f"--{given[0]} is for plans, and --measure runs on this machine; leave one of them out.")
    config = from_config_dict(load_config(arguments.config))
    prepare(config.mesh.num_devices, arguments.devices)
    look = "import jax; print(jax.device_count(), jax.devices()[0].device_kind)"
    seen = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=False)
    if seen.returncode:
        raise ValueError(f"JAX finds no devices to measure on: {seen.stderr.strip().splitlines()[-1]}")
    number, kind = seen.stdout.strip().splitlines()[-1].split(maxsplit=1)
    # Points that run side by side would measure each other.
    arguments.workers = 1
    target = Target(f"{number} x {kind}", int(number))
    return [target], sweep_basis.measured(kind, arguments.steps), {"num_steps": arguments.steps}


def _report(arguments: argparse.Namespace, rows: Sequence[Row], basis: Mapping[str, Any], folder: Path) -> int:
    """Prints tables and the answer, writes the files unless the same ones are there; returns the exit code."""
    best = {name: row for name, row in sweep_rank.best_by_target(rows).items() if row is not None}
    answers = [sweep_rank.answer(arguments.config, row, rows, arguments.measure) for row in best.values()]
    commands = [_command(arguments, row.point) for row in best.values()]
    print(f"\n{sweep_table.ranking(rows)}")
    for text in (sweep_table.reasons(rows), sweep_table.slices(rows), sweep_table.counts(rows)):
        if text:
            print(f"\n{text}")
    for answer, command in zip(answers, commands, strict=True):
        print(f"\n{answer}\n  {command}")
    if best and not arguments.measure:
        print("  # with --gke or --cloud-tpu, --project, --zone and the rest that overlapfx launch asks for")
    how = "measured" if arguments.measure else "planned (estimates)"
    text = document(rows, {"config_file": arguments.config, "how": how, "basis": basis}, answers, commands)
    reports = Reports(folder)
    where = reports.find(text)
    if where is None:
        where = reports.write(text, _files(arguments, rows, answers, commands))
        print(f"\nwrote {where}/index.html, with sweep.json, sweep.csv and two pictures beside it")
    else:
        print(f"\nthe same as in {where}/index.html")
    if best:
        return 0
    return DOES_NOT_FIT if any(row.state == sweep_rank.TOO_LARGE for row in rows) else FAILED


def _command(arguments: argparse.Namespace, point: Point) -> str:
    """The command that starts what was found best."""
    words = ["overlapfx", "train" if arguments.measure else "launch", f"--config={arguments.config}"]
    if not arguments.measure:
        words += [f"--topology={point.target.name}", *(f"--flag={flag}" for flag in arguments.flag)]
    elif arguments.devices is not None:
        words.append(f"--devices={arguments.devices}")
    return shlex.join([*words, *(f"--config.{override}" for override in point.overrides())])


def _files(
    arguments: argparse.Namespace, rows: Sequence[Row], answers: Sequence[str], commands: Sequence[str]
) -> dict[str, bytes]:
    # Matplotlib takes a second to import, which a call without news can do without.
    from launch import sweep_page, sweep_pictures

    how = "measured" if arguments.measure else "predicted"
    title = f"{arguments.config}: sweep over {len(rows)} points, {how}"
    heat = sweep_pictures.png(sweep_pictures.heat_map(rows, f"{arguments.config}, time per step, {how}"))
    front = sweep_pictures.png(sweep_pictures.pareto_picture(rows, f"{arguments.config}, time against memory, {how}"))
    pictures = {"Heat map over mesh shapes": heat, "Step time against memory": front}
    notes = sweep_table.MEASURED_NOTES if arguments.measure else sweep_table.PLANNED_NOTES
    page = sweep_page.page(title, answers, commands, rows, pictures, notes)
    return {
        "index.html": page.encode(),
        "sweep.csv": table(rows).encode(),
        "heat_map.png": heat,
        "pareto.png": front,
    }


if __name__ == "__main__":
    sys.exit(main())
