"""Measures on compiled programs what pieces of einsums cost on each TPU, for the gate: writes overlapfx/plan/prices.py.

    python -m experiments.prices [--chips=v4,v5e,v5p,v6e]

Every program is compiled ahead of time for one host; its time is the time line's, from the compiler's estimated cycles.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from overlapfx.aot import slices

HOSTS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
ROWS, DEPTH, WIDTH = 16384, 8192, 16384
COLUMNS = (128, 256, 384, 512, 640, 768, 1024, 2048, 4096, 8192, 16384)
TABLE = Path(__file__).parent.parent / "overlapfx" / "plan" / "prices.py"
_ROWS = "PRICES = {\n"  # the line after which the command writes


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the chips that are asked for, keeps the others' rows."""
    parser = argparse.ArgumentParser(prog="python -m experiments.prices", description=__doc__)
    parser.add_argument("--chips", default=",".join(HOSTS), help=f"any of {', '.join(HOSTS)}")
    chips = parser.parse_args(argv).chips.split(",")
    unknown = sorted(set(chips) - HOSTS.keys())
    if unknown:
        parser.error(f"--chips has {', '.join(unknown)}; choose from {', '.join(HOSTS)}.")
    slices.require_compiler()
    slices.prepare_environment()
    from overlapfx.plan.prices import PRICES  # the table as it is

    rows = dict(PRICES)
    for chip in chips:
        name, rows[name] = _measure(HOSTS[chip])
        print(name, rows[name], flush=True)
        head, begin, _ = TABLE.read_text().partition(_ROWS)
        TABLE.write_text(head + begin + "".join(_row(name, prices) for name, prices in sorted(rows.items())) + "}\n")
    return 0


def _row(name: str, prices: Any) -> str:
    columns = "".join(f"            {width}: {ratio},\n" for width, ratio in prices.columns.items())
    return (
        f'    "{name}": Prices(\n        columns={{\n{columns}        }},\n'
        f"        sum_s_per_byte={prices.sum_s_per_byte},\n        copy_s_per_byte={prices.copy_s_per_byte},\n    ),\n"
    )


def _measure(host: str) -> tuple[str, Any]:
    """The chip's name with its prices."""
    import jax.numpy as jnp
    from jax import lax

    from overlapfx.ops import pieces
    from overlapfx.plan.pattern import Operand, Problem, Result, Term
    from overlapfx.plan.prices import Prices

    problem = Problem((Operand("td"), Operand("df")), (Result("tf"),), (Term(0, 1, 0),))
    run = _Timer(host)
    peak = run.topology.chip.per_device().peak_bf16_flops
    bf16, f32 = jnp.bfloat16, jnp.float32
    columns = {}
    for width in COLUMNS:
        seconds = run(
            lambda x, w: pieces.multiply(problem, problem.terms[0], x, w).astype(bf16),
            [((ROWS, DEPTH), bf16), ((DEPTH, width), bf16)],
        )
        columns[width] = round(seconds * peak / (2 * ROWS * DEPTH * width), 3)
    width = 2048
    with_sum = run(
        lambda x, w, total: pieces.multiply_add(problem, problem.terms[0], (x, w), [total]),
        [((ROWS, DEPTH), bf16), ((DEPTH, width), bf16), ((ROWS, width), f32)],
    )
    extra = with_sum - columns[width] * 2 * ROWS * DEPTH * width / peak
    copied = run(
        lambda x, start: lax.optimization_barrier([pieces.take(x, "df", "f", s, WIDTH // 8) for s in start]),
        [((DEPTH, WIDTH), bf16), ((4,), jnp.int32)],
    )
    return run.topology.chip.name, Prices(
        columns, max(0.0, round(extra / (ROWS * width * 4), 15)), round(copied / (4 * DEPTH * WIDTH // 8 * 2), 15)
    )


class _Timer:
    """Seconds that a function of replicated arrays computes on one host: its einsums, or all if it has none."""

    def __init__(self, host: str) -> None:
        self.topology = slices.parse_slice(host)
        self.mesh, _ = slices.make_slice_mesh(self.topology, {"y": self.topology.num_devices})

    def __call__(self, function: Callable[..., Any], shapes: Sequence[tuple[tuple[int, ...], Any]]) -> float:
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        from overlapfx.aot.assumptions import Assumptions
        from overlapfx.aot.compile import compile_for
        from overlapfx.aot.read import time_line

        spec = PartitionSpec()
        local = jax.shard_map(function, mesh=self.mesh, in_specs=spec, out_specs=spec)
        sharding = NamedSharding(self.mesh, spec)
        arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
        compiled = compile_for(self.topology, local, arguments)
        timeline = time_line(compiled, Assumptions.for_slice(self.topology))
        # Copies of arguments into the layout that the einsum wants are not its own: in a step others make them so.
        return timeline.seconds("compute", "einsum") or timeline.compute_s


if __name__ == "__main__":
    sys.exit(main())
