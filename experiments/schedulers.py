"""Which scheduler makes the quicker step (figure 16 of the paper): ours imposed on the program, or the compiler's own.

    python -m experiments.schedulers --size=32B --size=256B

compiles each size once per scheduler for its TPU v4 slice, then prints the length of the time lines. Beside it stands
what the same scheduler makes of the instructions that the compiler's own program has, which needs no compilation of
its own (`--reorder` prints only that).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from launch.arguments import Parser, one_sentence
from launch.config_file import load_config
from launch.progress import Progress
from overlapfx.aot import slices
from overlapfx.aot.variants import OURS
from overlapfx.config import SCHEDULERS, Config, from_config_dict

if TYPE_CHECKING:
    from overlapfx.aot.step_plan import StepPlan

PROG = "experiments.schedulers"
# The paper's sizes with a slice of as many chips as their mesh has.
SIZES = {
    "32B": "v4:4x4x4",
    "64B": "v4:4x4x8",
    "128B": "v4:4x8x8",
    "256B": "v4:8x8x8",
    "512B": "v4:8x8x16",
    "1024B": "v4:8x16x16",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One size under one scheduler, in seconds and bytes; imposed is None where nothing was compiled for it.

    reordered: the length of the time line when the scheduler orders the instructions of the compiler's own program.
    """

    size: str
    scheduler: str
    reordered_s: float
    imposed_s: float | None = None
    compute_s: float | None = None
    exposed_s: float | None = None
    temporary_bytes: int | None = None
    mechanism: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Plans every size asked for, prints a table; returns the exit code."""
    arguments = _parse(argv)
    slices.prepare_environment()
    progress = Progress()
    rows: list[Row] = []
    for size in arguments.size or SIZES:
        with one_sentence(PROG):
            config = from_config_dict(load_config(f"configs/gpt.py:{size}"))
            with progress.working(f"{size} on {SIZES[size]}"):
                rows += compare(size, config, arguments.topology or SIZES[size], arguments.reorder)
        print(f"{table(rows)}\n", flush=True)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog=PROG, description="Step times of the GPT sizes under every scheduler.")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="only this size; may be repeated")
    parser.add_argument("--topology", metavar="SLICE", help="another slice than the size's own")
    parser.add_argument("--reorder", action="store_true", help="compile once per size, reorder only what was compiled")
    arguments = parser.parse_args(argv)
    with one_sentence(PROG):
        if arguments.topology:
            slices.parse_slice(arguments.topology)
        slices.require_compiler()
    return arguments


def compare(size: str, config: Config, topology: str, reorder_only: bool = False) -> Iterator[Row]:
    """One row per scheduler, the compiler first. Raises ValueError for a mesh that does not fill the slice."""
    own = _plan(config, topology, "compiler", tuple(s for s in SCHEDULERS if s != "compiler"))
    yield _row(size, "compiler", own.step_s, own)
    for order in own.orders:
        made = None if reorder_only else _plan(config, topology, order.scheduler)
        yield _row(size, order.scheduler, order.timeline.total_s, made)


def _plan(config: Config, topology: str, scheduler: str, orders: tuple[str, ...] = ()) -> StepPlan:
    from overlapfx.aot.step_plan import Planner

    overlap = dataclasses.replace(config.overlap, scheduler=scheduler)
    config = dataclasses.replace(config, overlap=overlap)
    family = importlib.import_module(f"models.{config.model.family}")
    return Planner.make(config, family, slices.parse_slice(topology), {}).plan(OURS, {}, orders)


def _row(size: str, scheduler: str, reordered_s: float, plan: StepPlan | None) -> Row:
    from overlapfx.ops import order

    if plan is None:
        return Row(size, scheduler, reordered_s)
    line = plan.timeline
    how = "" if scheduler == "compiler" else order.mechanism()
    temporaries = plan.compiled.memory.temporaries
    return Row(size, scheduler, reordered_s, line.total_s, line.compute_s, line.exposed_s, temporaries, how)


def table(rows: Sequence[Row]) -> str:
    """Seconds per step, estimated; gains over the compiler's own order of the same size."""
    columns = ("imposed", "compute", "exposed", "gain", "GiB temp.", "reordered", "gain")
    lines = [f"{'size':8s}{'scheduler':12s}" + "".join(f"{c:>11s}" for c in columns)]
    own: dict[str, Row] = {}
    for row in rows:
        base = own.setdefault(row.size, row)
        if row.imposed_s is None:
            cells = ["-"] * 5
        else:
            seconds = [f"{s:.3f}" for s in (row.imposed_s, row.compute_s or 0.0, row.exposed_s or 0.0)]
            gain = (base.imposed_s or 0.0) / row.imposed_s
            cells = [*seconds, f"{gain:.3f}x", f"{(row.temporary_bytes or 0) / 2**30:.2f}"]
        cells += [f"{row.reordered_s:.3f}", f"{base.reordered_s / row.reordered_s:.3f}x"]
        lines.append(f"{row.size:8s}{row.scheduler:12s}" + "".join(f"{c:>11s}" for c in cells))
    mechanisms = ", ".join(dict.fromkeys(row.mechanism for row in rows if row.mechanism))
    if mechanisms:
        lines.append(f"imposed by {mechanisms}; reordered: the compiler's own instructions in another order, estimated")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
