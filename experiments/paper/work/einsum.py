"""One collective einsum compiled for a slice in several decompositions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments import bench_run, bench_sites
from experiments.bench_sites import Site, Sizes
from experiments.paper.measurement import GATE
from overlapfx.aot.slices import environment, make_slice_mesh, parse_slice
from overlapfx.aot.variants import OURS
from overlapfx.config import Overlap
from overlapfx.plan import cost


def find(task: Mapping[str, Any]) -> dict[str, Any]:
    """One row per variant as the microbenchmark makes them, those left out with the reason; seconds.

    All have the compiler options of our steps, without which stripes would be gathered one after the other.
    """
    topology = parse_slice(task["slice"])
    mesh, placement = make_slice_mesh(topology, {"y": task["y"], "x": task["x"]})
    sizes = Sizes(**task["sizes"])
    site = (bench_sites.make_sites(sizes, task["y"]) | ring_sites(sizes, task["y"]))[task["site"]]
    known = bench_sites.variants() | {GATE: Overlap()}
    chosen = {name: known[name] for name in task["variants"]}
    with cost.pricing(environment(topology, placement)):
        rows = [
            dataclasses.asdict(row)
            for row in bench_run.compile_for_slice(site, mesh, task["which"], chosen, topology, OURS.options)
            if isinstance(row, bench_run.Row)
        ]
    return {
        "rows": rows,
        "peak_s": site.flops(task["which"]) / (mesh.size * topology.chip.per_device().peak_bf16_flops),
        "is_physical_cycle": {report.axis: report.is_cycle for report in placement.reports},
        "max_hops": {report.axis: report.max_hops for report in placement.reports},
    }


def ring_sites(sizes: Sizes, num_y: int) -> dict[str, Site]:
    """The two sites with one collective each, both over x: what the size of a single ring changes.

    sizes: as for `bench_sites.make_sites`.
    """
    labels = {"t": sizes.tokens * num_y, "d": sizes.width, "f": sizes.hidden}
    gather = Site(
        "ring_gather",
        "activation gathered over x along the contracted label",
        "td,df->tf",
        labels,
        lhs={"t": "y", "d": "x"},
        rhs={"f": "x"},
        out={"t": "y", "f": "x"},
        collectives={"lhs_gather": {"d": "x"}},
    )
    scatter = Site(
        "ring_scatter",
        "result scattered over x along its free label",
        "tf,fd->td",
        labels,
        lhs={"t": "y", "f": "x"},
        rhs={"f": "x"},
        out={"t": "y", "d": "x"},
        collectives={"out_scatter": {"d": "x"}},
    )
    return {site.name: site for site in (gather, scatter)}
