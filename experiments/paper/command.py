"""The command behind every figure, alone or all together: compute what is missing, draw, write the pages."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.paper import code, compute, pages
from experiments.paper.figure import Figure
from experiments.paper.measurement import Measurement
from experiments.paper.results import Results
from launch import sweep_store
from launch.arguments import Parser, one_sentence
from launch.config_file import PROJECT
from launch.sweep_machine import this_machine
from launch.sweep_pool import Serve, StartError
from launch.sweep_progress import SweepProgress
from launch.sweep_run import CodeChanged, missing, work_off
from launch.sweep_store import Store

FAILED, INTERRUPTED = 1, 130  # exit codes: no measurement has a result, Ctrl-C
_RESULTS = PROJECT / "experiments" / "results"


def main(name: str, figures: Sequence[Figure], argv: Sequence[str] | None = None, serve: Serve = compute.serve) -> int:
    """Reads the arguments, computes what has no result yet, writes `name`.md and `name`.html; returns the exit code.

    0 if there is any result, else 1; 2 for an error of the user's; 130 if interrupted.
    """
    parser = _parser(name, figures)
    with one_sentence(parser.prog):
        arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
        chosen = _chosen(figures, arguments.figures)
        folder = arguments.results or (arguments.out / "results" if arguments.quick else _RESULTS)
        pages.check(arguments.out, name)
        compute.prepare_environment(arguments.quick)
        basis = code.basis()  # once: the code may change while this runs
        wanted = _wanted(chosen, arguments.quick)
        # Nothing is added to what is only shown, which another process may be adding to.
        store = None if arguments.stored else Store(folder, "--results")
        records = sweep_store.read(folder, "--results").results if store is None else store.results
    if store is not None:
        with store:
            try:
                _compute(wanted, basis, store, arguments, serve)
            except KeyboardInterrupt:
                print(f"interrupted; every finished result is in {store.path}, the same command goes on from there")
                return INTERRUPTED
            except (StartError, CodeChanged) as error:
                print(f"{parser.prog}: {error}", file=sys.stderr)
                return FAILED
    results = Results(records.values(), basis, any_code=arguments.stored)
    for path in pages.write(arguments.out, name, chosen, arguments.quick, results):
        print(f"wrote {path}")
    return 0 if any(results.find(one) is not None for one in wanted) else FAILED


def _parser(name: str, figures: Sequence[Figure]) -> Parser:
    what = "Reproduce the tables and figures of the paper" if len(figures) > 1 else figures[0].title
    parser = Parser(prog=f"python -m experiments.{name}", description=f"{what}, from compiled programs.")
    parser.epilog = "Whatever is interrupted goes on when called again; nothing that is stored is computed twice."
    add = parser.add_argument
    add(
        "--out", type=Path, default=Path("runs") / "paper", metavar="DIR", help="pages, pictures (default: %(default)s)"
    )
    add("--quick", action="store_true", help="tiny models on the smallest slices, in minutes; kept in DIR/results")
    add("--results", type=Path, metavar="DIR", help="what was computed (default: experiments/results)")
    add("--stored", action="store_true", help="compute nothing, show what is stored, also of older code")
    add("--figures", default="", metavar="NAMES", help=f"some of {', '.join(figure.name for figure in figures)}")
    add("--workers", type=_at_least_one, metavar="N", help="processes at a time (default: as many as fit)")
    add("--timeout", type=_at_least_one, default=7200, metavar="SECONDS", help="give a result up (default: 7200)")
    add("--retry", action="store_true", help="try again what failed before")
    return parser


def _at_least_one(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _chosen(figures: Sequence[Figure], text: str) -> list[Figure]:
    names = [name.strip() for name in text.split(",")] if text else [figure.name for figure in figures]
    known = {figure.name: figure for figure in figures}
    for name in names:
        if name not in known:
            raise ValueError(f"--figures has {name!r}; choose from {', '.join(known)}, separated by commas.")
    return [known[name] for name in dict.fromkeys(names)]


def _wanted(figures: Sequence[Figure], quick: bool) -> list[Measurement]:
    """What any of the figures wants, once, under the name that it has in the first."""
    found: dict[str, Measurement] = {}
    for figure in figures:
        for measurement in figure.measurements(quick):
            found.setdefault(measurement.identity(), measurement)
    return list(found.values())


def _compute(
    wanted: Sequence[Measurement],
    basis: Mapping[str, Any],
    store: Store,
    arguments: argparse.Namespace,
    serve: Serve,
) -> None:
    job = compute.Job({m.key(basis): m for m in wanted}, basis, arguments.workers, arguments.timeout)
    todo = missing(job, store, arguments.retry)
    print(f"{len(wanted)} results wanted, {len(wanted) - len(todo)} stored, {len(todo)} to compute", flush=True)
    if store.torn:
        print(f"{store.torn} unfinished lines of killed processes in {store.path} are skipped")
    with SweepProgress(len(todo), lacking="without a result") as progress:
        work_off(job, store, todo, this_machine(), serve, progress)
