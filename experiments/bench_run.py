"""Times programs on the devices at hand, or reads their cost off the program compiled for a slice that is not there."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from experiments import bench_sites
from experiments.bench_sites import Site
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import compile_for
from overlapfx.aot.read import time_line
from overlapfx.aot.slices import Slice
from overlapfx.config import Overlap
from overlapfx.plan.decide import CallSite, record_sites


@dataclasses.dataclass(frozen=True)
class Row:
    """One decomposition of one site; times in seconds, those that were not asked for are None.

    total_s: median of the runs, or the length of the time line. skipped: why there is no figure.
    """

    site: str
    which: str
    variant: str
    plans: tuple[str, ...] = ()
    total_s: float | None = None
    spread_s: float | None = None  # between the quartiles of the runs
    compute_s: float | None = None
    exposed_s: float | None = None
    blocking_s: float | None = None
    compile_s: float | None = None
    skipped: str = ""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A jitted program with the plans of its call sites."""

    variant: str
    fn: Any
    sites: tuple[CallSite, ...]

    @property
    def plans(self) -> tuple[str, ...]:
        """A line per call site."""
        return tuple(site.line() for site in self.sites)


def trace_all(
    site: Site, mesh: Mesh, which: str, variants: Mapping[str, Overlap], dtype: Any
) -> tuple[list[Traced], list[Row]]:
    """Programs of all variants that apply to the site and differ; a row with the reason for each other one."""
    traced, skipped = [], []
    arguments = bench_sites.arguments(site, mesh, dtype)
    seen: dict[str, str] = {}  # text of a program -> variant that it is
    for variant, overlap in variants.items():
        fn = jax.jit(bench_sites.program(site, mesh, overlap, which))
        with record_sites() as sites:
            text = fn.lower(*arguments).as_text()
        why = "; ".join(sites[0].plan.downgrades)
        if not why and text in seen:
            why = f"the same program as {seen[text]}"
        if why:
            skipped.append(Row(site.name, which, variant, skipped=why))
        else:
            seen[text] = variant
            traced.append(Traced(variant, fn, tuple(sites)))
    return traced, skipped


def time_on_devices(
    site: Site, mesh: Mesh, which: str, variants: Mapping[str, Overlap], num_runs: int
) -> Iterator[str | Row]:
    """Compiles every variant, runs each once to warm up, then all in turn `num_runs` times; yields notes, then rows.

    In turn, so that whatever else the machine does meets all variants alike. float32 operands.
    """
    traced, skipped = trace_all(site, mesh, which, variants, jnp.float32)
    arguments = [_fill(a, seed) for seed, a in enumerate(bench_sites.arguments(site, mesh, jnp.float32))]
    compiled, compile_s = [], []
    for program in traced:
        begin = time.perf_counter()
        compiled.append(program.fn.lower(*arguments).compile())
        jax.block_until_ready(compiled[-1](*arguments))
        compile_s.append(time.perf_counter() - begin)
    yield f"{site.name} {which}: compiled {len(traced)} programs in {sum(compile_s):.1f} s"
    seconds: list[list[float]] = [[] for _ in traced]
    for _ in range(num_runs):
        for times, run in zip(seconds, compiled, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times.append(time.perf_counter() - begin)
    for program, times, compiling in zip(traced, seconds, compile_s, strict=True):
        low, middle, high = statistics.quantiles(times, n=4) if num_runs > 1 else times * 3
        yield Row(
            site.name,
            which,
            program.variant,
            program.plans,
            total_s=middle,
            spread_s=high - low,
            compile_s=compiling,
        )
    yield from skipped


def _fill(abstract: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(abstract.shape, np.float32)
    return jax.device_put(values, abstract.sharding)


def compile_for_slice(
    site: Site,
    mesh: Mesh,
    which: str,
    variants: Mapping[str, Overlap],
    topology: Slice,
    compiler_options: Mapping[str, str],
) -> Iterator[str | Row]:
    """Compiles every variant for a slice and walks its schedule; yields notes, rows as they come. bfloat16 operands."""
    traced, skipped = trace_all(site, mesh, which, variants, jnp.bfloat16)
    assumptions = Assumptions.for_slice(topology)
    for program in traced:
        arguments = bench_sites.arguments(site, mesh, jnp.bfloat16)
        made = compile_for(topology, program.fn, arguments, compiler_options)
        line = time_line(made, assumptions)
        yield f"{site.name} {which}, {program.variant}: compiled in {made.compile_s:.1f} s"
        yield Row(
            site.name,
            which,
            program.variant,
            program.plans,
            total_s=line.total_s,
            compute_s=line.compute_s,
            exposed_s=line.exposed_s,
            blocking_s=line.blocking_s,
            compile_s=made.compile_s,
        )
    yield from skipped
