"""Plans a training step for a TPU slice that is not there: how long it takes, what it waits for, whether it fits."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.arguments import USER_ERROR, Parser, config_parser, one_sentence, parse
from launch.progress import Progress
from overlapfx.aot import slices, variants
from overlapfx.aot.variants import OURS, Variant
from overlapfx.config import Config
from overlapfx.plan.schedulers import SCHEDULERS

DOES_NOT_FIT = 3  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the arguments, compiles, prints; the exit code is 2 for an error of the user's, else that of `plan`."""
    parser = config_parser("plan", "Compile a training step for a named TPU slice and say what it will do.", False)
    add_arguments(parser)
    with one_sentence(parser.prog):
        arguments, config = parse(parser, sys.argv[1:] if argv is None else argv)
        topology = slices.parse_slice(arguments.topology)
        chosen = variants.choose(arguments.compare)
        variants.choose_schedulers(arguments.scheduler)
        flags = variants.parse_settings("--flag", arguments.flag)
        assumed = variants.parse_figures("--assume", arguments.assume)
        slices.require_compiler()
    slices.prepare_environment()
    return plan(config, topology, chosen, flags, assumed, arguments)


def add_arguments(parser: Parser) -> None:
    """Adds what `plan` reads besides the config."""
    add = parser.add_argument
    add("--topology", required=True, metavar="SLICE", help="for example v4:8x8x8, v5e:16x16, v5p:4x4x4,slices=2")
    add("--compare", default="", metavar="NAMES", help=f"plan several programs: any of {', '.join(variants.NAMES)}")
    add(
        "--scheduler",
        default="",
        metavar="NAMES",
        help="order the compiled instructions anew, beside the compiler's own order: any of "
        f"{', '.join(('compiler', *SCHEDULERS))}",
    )
    add("--json", type=Path, metavar="FILE", help="write all figures, with versions, options and device coordinates")
    add("--png", type=Path, metavar="FILE", help="draw the time line")
    add("--trace", type=Path, metavar="FILE", help="write the time line as a trace for ui.perfetto.dev")
    add("--dump", type=Path, metavar="DIR", help="keep the compiled program's text")
    add("--assume", action="append", default=[], metavar="NAME=VALUE", help="replace a figure of the model of the chip")
    add(
        "--flag", action="append", default=[], metavar="NAME=VALUE", help="a compiler option, for every program planned"
    )


def plan(
    config: Config,
    topology: slices.Slice,
    chosen: Sequence[Variant],
    flags: dict[str, str],
    assumed: dict[str, float],
    arguments: argparse.Namespace,
) -> int:
    """Plans every variant, prints tables, writes files; 0 if the step fits into memory, 3 if not (see `_exit_code`)."""
    # JAX starts here, after the environment is set.
    from overlapfx.aot import plan_text
    from overlapfx.aot.compile import Unreadable, check_options
    from overlapfx.aot.plan_files import PlanFiles
    from overlapfx.aot.step_plan import DoesNotFit, Planner

    with one_sentence("overlapfx plan"):  # what the user can mend, before anything long is done
        files = PlanFiles(chosen, arguments.json, arguments.png, arguments.trace, arguments.dump)
        files.check()
        family = importlib.import_module(f"models.{config.model.family}")
        planner = Planner.make(config, family, topology, assumed)
        check_options(topology, planner.mesh, flags)
    print(plan_text.heading(planner), flush=True)
    progress = Progress()
    outcomes: dict[Variant, plan_text.Outcome] = {}
    for variant in chosen:
        try:
            with progress.working(f"compiling {variant.name} for {topology}"):
                outcomes[variant] = done = planner.plan(variant, flags, variants.choose_schedulers(arguments.scheduler))
        except DoesNotFit as error:
            outcomes[variant] = error
            print(f"\n{variant.name}: memory: DOES NOT FIT: {error}", flush=True)
            continue
        except Unreadable as error:
            print(f"overlapfx plan: {error}", file=sys.stderr)
            return USER_ERROR
        files.write_plan(planner, done)
        if variant is OURS or len(chosen) == 1:
            print(f"\n{plan_text.plan_text(done)}", flush=True)
    if len(chosen) > 1:
        print(f"\n{plan_text.compare_table(outcomes)}")
    print(f"\n{plan_text.assumptions_text(planner)}")
    files.write_document(planner, outcomes)
    for path in files.written():
        print(f"wrote {path}")
    return _exit_code({variant: getattr(outcome, "fits", False) for variant, outcome in outcomes.items()})


def _exit_code(fits: dict[Variant, bool]) -> int:
    """3 if the config's own program does not fit, or, where it was not planned, if none does."""
    return 0 if fits.get(OURS, any(fits.values())) else DOES_NOT_FIT


if __name__ == "__main__":
    sys.exit(main())
