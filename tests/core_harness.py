"""Runs collective einsums on simulated devices beside the single-device einsum that they must equal."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.ops import reference
from overlapfx.ops.collective_einsum import collective_einsum_grid, collective_einsum_multi
from overlapfx.plan.decide import CallSite, record_sites
from overlapfx.plan.pattern import AxisNames, canonical_axes

# Nearly all of this suite's time is compilation, and what is compiled runs once on a few hundred numbers. Later
# versions of XLA have only one way to emit fusions, so there it is quicker to have none.
_QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_QUICK_FUSIONS: tuple[dict[str, Any], ...] = (
    {"xla_cpu_use_fusion_emitters": False},
    {"xla_disable_hlo_passes": "fusion"},
)
# Settings by name; None stands for the blocking reference.
Variants = Mapping[str, Overlap | None]

Sharded = Mapping[str, AxisNames]  # label -> mesh axes over which an array is sharded along it
_EMPTY: Sharded = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective einsum in global terms.

    sizes: global size of every label. rhs_sizes: one per right operand, what differs there. lhs, rhs, out: how the
    arrays are sharded where they enter and leave. Along an axis over which the result is not sharded every device holds
    a copy of it; each copy is compared, and gets a cotangent of its own.
    """

    name: str
    spec: str
    sizes: Mapping[str, int]
    mesh: Mapping[str, int]
    lhs: Sharded = dataclasses.field(default_factory=dict)
    rhs: Sharded = dataclasses.field(default_factory=dict)
    out: Sharded = dataclasses.field(default_factory=dict)
    lhs_gather: Sharded = dataclasses.field(default_factory=dict)
    rhs_gather: Sharded = dataclasses.field(default_factory=dict)
    out_scatter: Sharded = dataclasses.field(default_factory=dict)
    rhs_sizes: tuple[Mapping[str, int], ...] = (_EMPTY,)
    bias_labels: str = ""  # of a bias per right operand, "" for none; sharded like the result

    def labels(self) -> tuple[str, str, str]:
        inputs, out = self.spec.split("->")
        lhs, rhs = inputs.split(",")
        return lhs, rhs, out

    def copies(self) -> tuple[str, ...]:
        """Mesh axes over which every device holds the same result."""
        used = {axis for axes in self.out.values() for axis in canonical_axes(axes)}
        return tuple(axis for axis in self.mesh if axis not in used)

    def collectives(self) -> dict[str, Sharded]:
        return {"lhs_gather": self.lhs_gather, "rhs_gather": self.rhs_gather, "out_scatter": self.out_scatter}


@dataclasses.dataclass(frozen=True)
class Values:
    """Global arrays: operands with cotangents, or their gradients with results.

    Cotangents and results have a leading dimension over copies.
    """

    lhs: np.ndarray
    rhs: tuple[np.ndarray, ...]
    bias: tuple[np.ndarray, ...]
    out: tuple[np.ndarray, ...]


@functools.cache
def quick_compile() -> dict[str, Any]:
    """Options that make XLA compile quickly, for this version of it."""
    for fusions in _QUICK_FUSIONS:
        try:
            jax.jit(lambda x: x).lower(0.0).compile(_QUICK | fusions)
        except jax.errors.JaxRuntimeError:
            continue
        return _QUICK | fusions
    return _QUICK


@contextlib.contextmanager
def unchecked_annotations() -> Iterator[None]:
    """Turns the run-time check of array annotations off, where it would cost more than all the rest together."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def simulated_mesh(shape: Mapping[str, int]) -> Mesh:
    """A mesh over the first of the simulated devices."""
    num_devices = math.prod(shape.values())
    devices = np.array(jax.devices()[:num_devices]).reshape(tuple(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(AxisType.Auto,) * len(shape))


def partition(labels: str, sharded: Sharded) -> PartitionSpec:
    """Where an array with these labels lies."""
    return PartitionSpec(*(canonical_axes(sharded[c]) if c in sharded else None for c in labels))


def integers(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Small integers: their products and sums are exact in float32 in every order, but not in bfloat16."""
    return rng.integers(-9, 10, tuple(shape)).astype(np.float32)


def normals(rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Random numbers whose sums depend on the order."""
    return rng.standard_normal(tuple(shape)).astype(np.float32)


def make_values(case: Case, fill: Callable[..., np.ndarray] = integers, dtype: Any = np.float32) -> Values:
    """Operands, with cotangents as `out`; the same for the same case shape. Rounded to dtype."""
    rng = np.random.default_rng(7)
    lhs_labels, rhs_labels, out_labels = case.labels()
    num_copies = math.prod(case.mesh[axis] for axis in case.copies())

    def make(labels: str, changed: Mapping[str, int], *leading: int) -> np.ndarray:
        sizes = {**case.sizes, **changed}
        return fill(rng, (*leading, *(sizes[c] for c in labels))).astype(jnp.dtype(dtype))

    return Values(
        lhs=make(lhs_labels, {}),
        rhs=tuple(make(rhs_labels, changed) for changed in case.rhs_sizes),
        bias=tuple(make(case.bias_labels, changed) for changed in case.rhs_sizes if case.bias_labels),
        out=tuple(make(out_labels, changed, num_copies) for changed in case.rhs_sizes),
    )


def expected(case: Case, values: Values, activation: Callable[..., Any] | None = None) -> Values:
    """Results of a single-device einsum and the gradients of all copies together, in float32."""
    lhs, rhs, bias, cotangents = (
        jax.tree.map(lambda x: np.asarray(x, np.float64), part)
        for part in (values.lhs, values.rhs, values.bias, values.out)
    )
    lhs_labels, rhs_labels, out_labels = case.labels()
    dlhs = np.zeros_like(lhs)
    out, drhs, dbias = [], [], []
    for i, r in enumerate(rhs):
        y = np.einsum(case.spec, lhs, r)
        if bias:
            y = y + np.einsum(f"{case.bias_labels},{out_labels}->{out_labels}", bias[i], np.ones_like(y))
        dy = cotangents[i].sum(0)
        if activation is not None:
            y, pullback = jax.vjp(activation, jnp.asarray(y, jnp.float32))
            (dy,) = map(np.asarray, pullback(jnp.asarray(dy, jnp.float32)))
        out.append(np.broadcast_to(np.asarray(y, np.float32), cotangents[i].shape))
        dlhs += np.einsum(f"{out_labels},{rhs_labels}->{lhs_labels}", dy, r)
        drhs.append(np.einsum(f"{out_labels},{lhs_labels}->{rhs_labels}", dy, lhs).astype(np.float32))
        if bias:
            dbias.append(np.einsum(f"{out_labels}->{case.bias_labels}", dy).astype(np.float32))
    return Values(dlhs.astype(np.float32), tuple(drhs), tuple(dbias), tuple(out))


def option_product(directions: Sequence[str] = ("one", "two", "two_whole")) -> dict[str, Overlap]:
    """Every combination of options that can change a program: only rings know directions and unrolling."""
    variants = {m: Overlap(method=m) for m in ("blocking", "stripe", "prefetch", "exchange")}
    for direction, (unroll, interleave) in itertools.product(directions, ((1, "auto"), (2, "parity"), (2, "halves"))):
        name = f"ring-{direction}-{unroll}-{interleave}"
        variants[name] = Overlap(method="ring", direction=direction, unroll=unroll, interleave=interleave)
    return variants


def some_options() -> dict[str, Overlap]:
    """One or two of each kind, where the rest adds nothing."""
    names = (
        "blocking",
        "stripe",
        "prefetch",
        "exchange",
        "ring-one-2-parity",
        "ring-two-2-halves",
        "ring-two_whole-1-auto",
    )
    rows = {"rows-whole": Overlap(method="blocking", row_stripes=2), "rows-on": Overlap(mode="on", row_stripes=2)}
    return {name: option_product()[name] for name in names} | rows


def device_program(case: Case, variants: Variants, **options: Any) -> Callable[..., Any]:
    """What runs inside shard_map: results and gradients of every variant."""
    everywhere = frozenset(case.mesh)
    shared = {**case.collectives(), "bias_labels": case.bias_labels, **options}

    def blocking(lhs: jax.Array, rhs: Any, bias: Any) -> Any:
        each = zip(rhs, bias or [None] * len(rhs), strict=True)
        return [reference.collective_einsum(case.spec, lhs, r, bias=b, **shared) for r, b in each]

    def overlapped(name: str, overlap: Overlap, lhs: jax.Array, rhs: Any, bias: Any) -> Any:
        given = {"bias": bias or None, "overlap": overlap, "name": name, **shared}
        dim = _row_dim(case)
        if overlap.row_stripes == 1 or dim is None or lhs.shape[dim] == 1:
            return collective_einsum_multi(case.spec, lhs, rhs, **given)
        stripes = jnp.array_split(lhs, min(overlap.row_stripes, lhs.shape[dim]), axis=dim)
        outs = collective_einsum_grid(case.spec, stripes, rhs, **given)
        where = case.labels()[2].index(case.labels()[0][dim])
        return [jnp.concatenate(parts, axis=where) for parts in zip(*outs, strict=True)]

    def run(apply: Callable[..., Any], lhs: jax.Array, rhs: Any, bias: Any, cotangents: Any) -> Any:
        def spread(lhs: jax.Array, rhs: Any, bias: Any) -> Any:
            return tuple(compat.vary(y, everywhere) for y in apply(lhs, rhs, bias))

        out, pullback = jax.vjp(spread, lhs, rhs, bias)
        gradients = pullback(tuple(ct[0].astype(y.dtype) for ct, y in zip(cotangents, out, strict=True)))
        return *gradients, tuple(y[None] for y in out)

    def program(*arrays: Any) -> Any:
        return {
            name: run(blocking if overlap is None else functools.partial(overlapped, name, overlap), *arrays)
            for name, overlap in variants.items()
        }

    return program


def _row_dim(case: Case) -> int | None:
    """A dimension of the left operand along which its rows can be cut: in the result, in nothing else, not moved."""
    lhs, rhs, out = case.labels()
    moved = {*case.lhs_gather, *case.out_scatter, *case.bias_labels}
    return next((i for i, c in enumerate(lhs) if c in out and c not in rhs and c not in moved), None)


def partitions(case: Case) -> tuple[Any, ...]:
    """Where operands, biases and results lie."""
    lhs_labels, rhs_labels, out_labels = case.labels()
    num_rhs = len(case.rhs_sizes)
    return (
        partition(lhs_labels, case.lhs),
        (partition(rhs_labels, case.rhs),) * num_rhs,
        (partition(case.bias_labels, case.out),) * num_rhs if case.bias_labels else (),
        (PartitionSpec(case.copies() or None, *partition(out_labels, case.out)),) * num_rhs,
    )


def sharded_program(case: Case, variants: Variants, **options: Any) -> Callable[..., Any]:
    """`device_program` over the case's mesh: (lhs, rhs, bias, cotangents) -> variant -> (gradients, results)."""
    specs = partitions(case)
    return jax.shard_map(
        device_program(case, variants, **options),
        mesh=simulated_mesh(case.mesh),
        in_specs=specs,
        out_specs=dict.fromkeys(variants, specs),
    )


def forward_program(case: Case, overlap: Overlap, **options: Any) -> Callable[..., Any]:
    """(lhs, rhs) -> results, without gradients, over the case's mesh."""

    def program(lhs: jax.Array, rhs: Any) -> Any:
        out = collective_einsum_multi(case.spec, lhs, rhs, **case.collectives(), overlap=overlap, **options)
        return tuple(compat.vary(y, frozenset(case.mesh))[None] for y in out)

    lhs, rhs, _, out = partitions(case)
    return jax.shard_map(program, mesh=simulated_mesh(case.mesh), in_specs=(lhs, rhs), out_specs=out)


def place(case: Case, values: Values) -> tuple[Any, ...]:
    """The operands and cotangents as device arrays, in the order of `sharded_program`."""
    device = NamedSharding(simulated_mesh(case.mesh), PartitionSpec())
    return jax.device_put((values.lhs, values.rhs, values.bias, values.out), device)


def run_case(case: Case, variants: Variants, values: Values, **options: Any) -> dict[str, Values]:
    """Runs all variants as one compiled program and returns what each made."""
    arrays = place(case, values)
    compiled = jax.jit(sharded_program(case, variants, **options)).lower(*arrays).compile(quick_compile())
    return {name: Values(*jax.tree.map(np.asarray, made)) for name, made in compiled(*arrays).items()}


def check_exact(case: Case, variants: Variants, **options: Any) -> list[CallSite]:
    """Asserts that all variants and the reference equal the single-device einsum bit for bit, with every gradient.

    Returns the call sites, named after the variants.
    """
    values = make_values(case)
    want = expected(case, values, options.get("activation"))
    with record_sites() as sites:
        # The reference's gradients are autodiff's, which rounds them to the dtype of the converted operands.
        reference_too: Variants = {} if "compute_dtype" in options else {"reference": None}
        got = run_case(case, {**reference_too, **variants}, values, **options)
    assert len(got) == len(variants) + len(reference_too)
    for name, result in got.items():
        plans = "\n".join(site.line() for site in sites if site.name.split(".")[0] == name)
        for what, actual, desired in pair_up(result, want):
            where = f"{case.name} {dict(case.mesh)} {name}: {what}\n{plans}"
            assert actual.dtype == desired.dtype, where
            np.testing.assert_array_equal(actual, desired, err_msg=where)
    return sites


def pair_up(actual: Values, desired: Values) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(name, actual, desired) of every result and every gradient."""
    pairs = [("gradient of lhs", actual.lhs, desired.lhs)]
    pairs += [(f"gradient of rhs {i}", *p) for i, p in enumerate(zip(actual.rhs, desired.rhs, strict=True))]
    pairs += [(f"gradient of bias {i}", *p) for i, p in enumerate(zip(actual.bias, desired.bias, strict=True))]
    pairs += [(f"result {i}", *p) for i, p in enumerate(zip(actual.out, desired.out, strict=True))]
    return pairs
