"""Predicted against published figures of the same models on TPU v4: a finding, not a test to tune to."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.arguments import Parser, one_sentence
from launch.config_file import load_config
from launch.progress import Progress
from overlapfx.aot import slices, variants
from overlapfx.config import Config, from_config_dict, to_dict

if TYPE_CHECKING:
    from overlapfx.aot.step_plan import StepPlan
    from overlapfx.aot.variants import Variant

# size: (config it is made from, fields that differ, slice, published MFU in percent without recomputation). The figures
# were read off a plot, +-0.3. The 16B model: 36 layers, M 6144, 48 heads, public configuration of the same series.
_16B = ["model.num_layers=36", "model.d_model=6144", "model.d_ff=24576", "model.num_heads=48", "model.num_kv_heads=48"]
PUBLISHED: dict[str, tuple[str, list[str], str, float]] = {
    "16B": ("32B", [*_16B, "mesh.x=2", "model.remat=all", "name=gpt_16B"], "v4:2x4x4", 42.4),
    "32B": ("32B", [], "v4:4x4x4", 42.2),
    "128B": ("128B", [], "v4:4x8x8", 48.3),
    "256B": ("256B", [], "v4:8x8x8", 53.0),
    "512B": ("512B", [], "v4:8x8x16", 48.8),
    "1024B": ("1024B", [], "v4:8x16x16", 53.5),
}
# 4096 sequences of 512 tokens on 1024 chips: MLPerf v1.1.
PUBLISHED_200B_STEP_S = 16.8
EXPLANATION = """
Why they differ:
- Predicted is the processor's schedule and the links, nothing else: no input, no host, no stragglers, no variation of
  the clock. All that can only make a real step slower.
- The published runs used another framework with its automatic partitioning, on an older compiler. The nearest programs
  here are those of xla; blocking is what they would be if nothing overlapped.
- What the published 16B and 32B runs recomputed is not the same as here, and MFU does not count recomputation.
- Partial sums that cross the network are float32 here, twice the bytes of bfloat16; attention is plain here, so its
  scores are written to memory; the sums of the norms over devices are blocking all-reduces.
- MFU in this table follows the published convention, 6 N + 12 L M T floating-point operations per token. It counts
  every pair of tokens in attention, of which a causal model needs half.
""".strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Plans what is not in the results file yet, prints the table; 2 for an error of the user's."""
    parser = Parser(prog="python -m experiments.calibration", description="Predicted against published figures.")
    parser.add_argument("--sizes", default=",".join(PUBLISHED), help="comma-separated; default: %(default)s")
    parser.add_argument(
        "--compare", default="blocking,xla-auto,xla-async", help="programs to plan; default: %(default)s"
    )
    parser.add_argument(
        "--results", type=Path, default=Path("runs/calibration.json"), help="kept and added to; default: %(default)s"
    )
    with one_sentence(parser.prog):
        arguments = parser.parse_args(argv)
        sizes = _sizes(arguments.sizes)
        chosen = variants.choose(arguments.compare)
        slices.require_compiler()
    slices.prepare_environment()
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    for size in sizes:
        _plan_size(size, chosen, results, arguments.results)
    print(table(sizes, chosen, results))
    print(f"\n{EXPLANATION}")
    return 0


def _sizes(text: str) -> list[str]:
    sizes = [size.strip() for size in text.split(",")]
    for size in sizes:
        if size not in PUBLISHED:
            raise ValueError(f"--sizes has {size!r}; choose from {', '.join(PUBLISHED)}, separated by commas.")
    return sizes


def config_of(size: str) -> Config:
    """The config of a published size."""
    base, changes, _, _ = PUBLISHED[size]
    return from_config_dict(load_config(f"configs/gpt.py:{base}", changes))


def key_of(size: str, variant: Variant) -> str:
    """Names a result by everything that it depends on: config, slice, program, compiler, source of this project."""
    about = {"config": to_dict(config_of(size)), "slice": PUBLISHED[size][2], "program": variant.name}
    about["options"] = dict(variant.options)
    about["versions"] = {name: importlib.metadata.version(name) for name in ("jax", "flax", "libtpu")}
    about["source"] = _source_digest()
    return f"{size} {variant.name} {hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]}"


@functools.cache
def _source_digest() -> str:
    """Changes with any file that the step or its reading may depend on."""
    project = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for file in sorted(file for package in ("overlapfx", "models") for file in (project / package).rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _plan_size(size: str, chosen: Sequence[Variant], results: dict[str, Any], path: Path) -> None:
    """Plans the variants of one size that have no result; each is written as soon as it is there."""
    missing = [variant for variant in chosen if key_of(size, variant) not in results]
    if not missing:
        return
    from overlapfx.aot.step_plan import DoesNotFit, Planner

    config = config_of(size)
    topology = slices.parse_slice(PUBLISHED[size][2])
    planner = Planner.make(config, importlib.import_module(f"models.{config.model.family}"), topology, {})
    for variant in missing:
        try:
            with Progress().working(f"compiling {size} {variant.name} for {topology}"):
                result = _figures(config, planner.plan(variant, {}), planner.num_params)
        except DoesNotFit as error:
            result = {"does_not_fit": str(error)}
        results[key_of(size, variant)] = result
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _figures(config: Config, plan: StepPlan, num_params: int) -> dict[str, Any]:
    model, topology = config.model, plan.compiled.topology
    tokens = config.data.global_batch * model.seq_len
    flops = (6 * num_params + 12 * model.num_layers * model.d_model * model.seq_len) * tokens
    peak = topology.chip.peak_bf16_flops * topology.num_chips
    return {
        "step_s": plan.step_s,
        "communication_share": plan.timeline.communication_share,
        "mfu_published_convention": flops / plan.step_s / peak,
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "compile_s": plan.compiled.compile_s,
        "memory_bytes": plan.compiled.memory.total,
    }


def table(sizes: Sequence[str], chosen: Sequence[Variant], results: dict[str, Any]) -> str:
    """One line per size and program: published MFU, predicted MFU by the same convention, the error in points."""
    head = ("size", "program", "step s", "comm.", "predicted MFU", "published", "error")
    lines = [f"{head[0]:6s} {head[1]:13s} {head[2]:>8s} {head[3]:>7s} {head[4]:>14s} {head[5]:>10s} {head[6]:>8s}"]
    for size in sizes:
        published = PUBLISHED[size][3]
        for variant in chosen:
            result = results[key_of(size, variant)]
            if "does_not_fit" in result:
                lines.append(f"{size:6s} {variant.name:13s} does not fit: {result['does_not_fit']}")
                continue
            predicted = 100 * result["mfu_published_convention"]
            lines.append(
                f"{size:6s} {variant.name:13s} {result['step_s']:8.2f} {result['communication_share']:7.1%} "
                f"{predicted:12.1f} % {published:8.1f} % {predicted - published:+8.1f}"
            )
    lines.append(
        f"200B   needs models/bert.py, which does not exist yet; published: {PUBLISHED_200B_STEP_S} s per step of 4096 "
        f"sequences of 512 tokens on 1024 chips (MLPerf v1.1)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
