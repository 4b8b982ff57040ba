"""The collective einsums that the microbenchmark prices, as they stand in a transformer partitioned over (y, x)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from overlapfx.config import Overlap
from overlapfx.ops.collective_einsum import collective_einsum
from overlapfx.plan.pattern import AxisNames, canonical_axes, num_shards

PASSES = ("forward", "forward+backward")
Sharded = Mapping[str, AxisNames]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Global sizes. tokens: of each y shard; width: of the model; hidden: of the MLP; heads of size head_dim."""

    tokens: int
    width: int
    hidden: int
    heads: int
    head_dim: int


# Quick on a few cores, and large enough that a product takes longer than calling it.
SIMULATED = Sizes(tokens=512, width=512, hidden=1024, heads=8, head_dim=64)
# The 32B model of the GPT series on 64 chips: 32 sequences of 1024 tokens per y shard.
COMPILED = Sizes(tokens=32768, width=8192, hidden=32768, heads=64, head_dim=128)


@dataclasses.dataclass(frozen=True)
class Site:
    """One collective einsum: global label sizes, and along which label each array is sharded over which axes."""

    name: str
    what: str
    spec: str
    sizes: Mapping[str, int]
    lhs: Sharded
    rhs: Sharded
    out: Sharded
    collectives: Mapping[str, Any]  # lhs_gather, rhs_gather, out_scatter

    def flops(self, which: str) -> int:
        """FLOPs over all devices: one product forward, two more backward."""
        return 2 * math.prod(self.sizes.values()) * (1 if which == "forward" else 3)

    def labels(self) -> tuple[str, str, str]:
        """Labels of the left operand, the right operand and the result."""
        inputs, out = self.spec.split("->")
        lhs, rhs = inputs.split(",")
        return lhs, rhs, out


def make_sites(sizes: Sizes, num_y: int) -> dict[str, Site]:
    """The sites by name, for `num_y` shards of the data axis."""
    t, d, f, n, h = sizes.tokens * num_y, sizes.width, sizes.hidden, sizes.heads, sizes.head_dim
    sites = (
        Site(
            "mlp_up",
            "activation gathered over x, weight over y, both along the contracted label",
            "td,df->tf",
            {"t": t, "d": d, "f": f},
            lhs={"t": "y", "d": "x"},
            rhs={"d": "y", "f": "x"},
            out={"t": "y", "f": "x"},
            collectives={"lhs_gather": {"d": "x"}, "rhs_gather": {"d": "y"}},
        ),
        Site(
            "mlp_down",
            "weight gathered over y along a free label, result scattered over x along the same",
            "tf,fd->td",
            {"t": t, "d": d, "f": f},
            lhs={"t": "y", "f": "x"},
            rhs={"f": "x", "d": "y"},
            out={"t": "y", "d": "x"},
            collectives={"rhs_gather": {"d": "y"}, "out_scatter": {"d": "x"}},
        ),
        Site(
            "attention_out",
            "as mlp_down, with two contracted labels",
            "tnh,nhd->td",
            {"t": t, "n": n, "h": h, "d": d},
            lhs={"t": "y", "n": "x"},
            rhs={"n": "x", "d": "y"},
            out={"t": "y", "d": "x"},
            collectives={"rhs_gather": {"d": "y"}, "out_scatter": {"d": "x"}},
        ),
        Site(
            "weight_contracting",
            "weight alone gathered over y, along the contracted label (1D partitioning)",
            "td,df->tf",
            {"t": t, "d": d, "f": f},
            lhs={"t": "y"},
            rhs={"d": "y", "f": "x"},
            out={"t": "y", "f": "x"},
            collectives={"rhs_gather": {"d": "y"}},
        ),
        Site(
            "weight_free",
            "weight alone gathered over y, along its free label, tokens sharded over both axes (1D partitioning)",
            "td,df->tf",
            {"t": t, "d": d, "f": f},
            lhs={"t": ("y", "x")},
            rhs={"f": "y"},
            out={"t": ("y", "x")},
            collectives={"rhs_gather": {"f": "y"}},
        ),
    )
    return {site.name: site for site in sites}


def variants() -> dict[str, Overlap]:
    """Every decomposition by name, the blocking one first."""
    rings = {
        "ring one": ("one", 1, "auto"),
        "ring one, 2 chains": ("one", 2, "halves"),
        "ring one, parity": ("one", 2, "parity"),
        "ring two": ("two", 1, "auto"),
        "ring two, 2 chains": ("two", 2, "halves"),
        "ring two whole": ("two_whole", 1, "auto"),
    }
    return {
        "blocking": Overlap(method="blocking"),
        **{
            name: Overlap(method="ring", direction=direction, unroll=unroll, interleave=interleave)
            for name, (direction, unroll, interleave) in rings.items()
        },
        "stripe": Overlap(method="stripe"),
        "prefetch": Overlap(method="prefetch"),
        "exchange": Overlap(method="exchange"),
    }


def _shardings(site: Site, mesh: Mesh) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    def spec(labels: str, sharded: Sharded) -> PartitionSpec:
        return PartitionSpec(*(canonical_axes(sharded[c]) if c in sharded else None for c in labels))

    lhs, rhs, out = site.labels()
    return spec(lhs, site.lhs), spec(rhs, site.rhs), spec(out, site.out)


def program(site: Site, mesh: Mesh, overlap: Overlap, which: str) -> Callable[..., Any]:
    """(lhs, rhs, cotangent) -> result, and both gradients in "forward+backward", over the mesh."""
    lhs_spec, rhs_spec, out_spec = _shardings(site, mesh)

    def call(lhs: Shaped[Array, "..."], rhs: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        return collective_einsum(site.spec, lhs, rhs, overlap=overlap, name=site.name, **site.collectives)

    def forward(lhs: Shaped[Array, "..."], rhs: Shaped[Array, "..."], _: Shaped[Array, "..."]) -> Any:
        return call(lhs, rhs)

    def both(lhs: Shaped[Array, "..."], rhs: Shaped[Array, "..."], cotangent: Shaped[Array, "..."]) -> Any:
        out, pullback = jax.vjp(call, lhs, rhs)
        return out, *pullback(cotangent)

    return jax.shard_map(
        forward if which == "forward" else both,
        mesh=mesh,
        in_specs=(lhs_spec, rhs_spec, out_spec),
        out_specs=out_spec if which == "forward" else (out_spec, lhs_spec, rhs_spec),
    )


def arguments(site: Site, mesh: Mesh, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and shardings of (lhs, rhs, cotangent); ValueError, in one sentence, if the mesh does not divide them."""
    made = []
    arrays = zip(site.labels(), (site.lhs, site.rhs, site.out), _shardings(site, mesh), strict=True)
    for labels, sharded, spec in arrays:
        for label, axes in sharded.items():
            parts = num_shards(canonical_axes(axes), mesh.shape)
            if site.sizes[label] % parts:
                raise ValueError(
                    f"site {site.name}: label {label!r} of size {site.sizes[label]} is not a multiple of mesh axis "
                    f"{'*'.join(canonical_axes(axes))} of size {parts}; choose another size or another mesh."
                )
        shape = tuple(site.sizes[c] for c in labels)
        made.append(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec)))
    return tuple(made)
