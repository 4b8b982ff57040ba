"""The public op: a differentiable einsum of gathered operands, its result scattered if need be, overlapped."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from overlapfx import compat
from overlapfx.config import Overlap
from overlapfx.ops import engine, layout, order, pieces
from overlapfx.plan import pattern
from overlapfx.plan.pattern import AxisNames, Operand, Problem, Result

_NONE: Mapping[str, AxisNames] = {}


def collective_einsum(
    spec: str,
    lhs: Shaped[Array, "..."],
    rhs: Shaped[Array, "..."],
    *,
    lhs_gather: Mapping[str, AxisNames] = _NONE,
    rhs_gather: Mapping[str, AxisNames] = _NONE,
    out_scatter: Mapping[str, AxisNames] = _NONE,
    overlap: Overlap = Overlap(),
    name: str = "einsum",
    compute_dtype: Any = None,
    out_dtype: Any = None,
    bias: Shaped[Array, "..."] | None = None,
    bias_labels: str = "",
    activation: Callable[[Array], Array] | None = None,
) -> Shaped[Array, "..."]:
    """`reference.collective_einsum` with its communication beside its arithmetic; called inside shard_map.

    spec: an einsum of two operands, e.g. "btd,df->btf"; shapes are the local ones.
    lhs_gather, rhs_gather: label -> mesh axis (or axes, major to minor) over which that operand is sharded along the
        label and is gathered first. out_scatter: label of the result -> axis over which the result is summed, keeping
        this device's shard of the label. Labels may appear in several of them.
    compute_dtype: operands are converted to it before they move (a float32 master weight travels as bfloat16);
        gradients come back in the operands' own dtypes, rounded once from float32. out_dtype: default, that of the
        products.
    bias: array over bias_labels (labels of the result, default its last ones), local to the result, added in float32.
    activation: elementwise function applied in float32 to each final piece.

    Derivation. With L, R the gathered operands and Y = L.R: the forward pass gathers L and R and scatters Y. Its dual:
    dL = dY.R and dR = L.dY, where dY is *gathered* along what Y was scattered, and dL, dR are *scattered* along what L,
    R were gathered. So both gradients are collective einsums themselves, planned one by one (or as one, if they share
    the gather of dY). Saved for them: the local shards of both operands (the gathered ones with overlap.save_gathered),
    and the activation's input if there is an activation. Bytes received per device: (n-1) shards for each collective
    over n devices, in the forward pass and once more for each gradient that needs it.

    Differentiable in lhs, rhs and bias, under jit, scan, vmap, remat; check_vma on or off. Raises ValueError, in one
    sentence, for a spec that cannot be.
    """
    (out,) = collective_einsum_multi(
        spec,
        lhs,
        [rhs],
        lhs_gather=lhs_gather,
        rhs_gather=rhs_gather,
        out_scatter=out_scatter,
        overlap=overlap,
        name=name,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        bias=None if bias is None else [bias],
        bias_labels=bias_labels,
        activation=activation,
    )
    return out


def collective_einsum_multi(
    spec: str,
    lhs: Shaped[Array, "..."],
    rhs: Sequence[Shaped[Array, "..."]],
    *,
    lhs_gather: Mapping[str, AxisNames] = _NONE,
    rhs_gather: Mapping[str, AxisNames] = _NONE,
    out_scatter: Mapping[str, AxisNames] = _NONE,
    overlap: Overlap = Overlap(),
    name: str = "einsum",
    compute_dtype: Any = None,
    out_dtype: Any = None,
    bias: Sequence[Shaped[Array, "..."]] | None = None,
    bias_labels: str = "",
    activation: Callable[[Array], Array] | None = None,
) -> list[Shaped[Array, "..."]]:
    """Several right operands share one gather of the left one (query, key, value; gate, up); see `collective_einsum`.

    The right operands have the same labels; their free labels may have different sizes. The gradient of the left
    operand is summed over all of them before it is scattered, once.
    """
    return collective_einsum_grid(
        spec,
        [lhs],
        rhs,
        lhs_gather=lhs_gather,
        rhs_gather=rhs_gather,
        out_scatter=out_scatter,
        overlap=overlap,
        name=name,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        bias=bias,
        bias_labels=bias_labels,
        activation=activation,
    )[0]


def collective_einsum_grid(
    spec: str,
    lhs: Sequence[Shaped[Array, "..."]],
    rhs: Sequence[Shaped[Array, "..."]],
    *,
    lhs_gather: Mapping[str, AxisNames] = _NONE,
    rhs_gather: Mapping[str, AxisNames] = _NONE,
    out_scatter: Mapping[str, AxisNames] = _NONE,
    overlap: Overlap = Overlap(),
    name: str = "einsum",
    compute_dtype: Any = None,
    out_dtype: Any = None,
    bias: Sequence[Shaped[Array, "..."]] | None = None,
    bias_labels: str = "",
    activation: Callable[[Array], Array] | None = None,
) -> list[list[Shaped[Array, "..."]]]:
    """Every left operand times every right one, `[i][j]` from lhs[i] and rhs[j]; see `collective_einsum`.

    Left operands are the row stripes of one activation: they share the gathers of the right operands, and while the
    collective of one stripe is under way the others compute. The gradient of a right operand is summed over all of
    them before it is scattered, once. Labels on one side only may have another size in each operand of that side.
    """
    for side, given in (("left", lhs), ("right", rhs)):
        if not given:
            raise ValueError(f"collective_einsum {name!r}: there is no {side} operand: pass at least one.")
    labels = pattern.parse_spec(spec, name)
    mesh_axes = _bound_axes(lhs_gather, rhs_gather, out_scatter)
    gathers = [
        pattern.check_collective(name, what, labels_of, collective, mesh_axes)
        for what, labels_of, collective in (
            ("lhs_gather", labels[0], lhs_gather),
            ("rhs_gather", labels[1], rhs_gather),
            ("out_scatter", labels[2], out_scatter),
        )
    ]
    lhs = [layout.constrain(labels[0], x) for x in lhs]
    lhs_labels, gathers[0], lhs = _reduce_private(name, labels[0], gathers[0], labels[1] + labels[2], lhs)
    rhs_labels, gathers[1], rhs = _reduce_private(name, labels[1], gathers[1], labels[0] + labels[2], rhs)
    sides = Operand(lhs_labels, gathers[0]), Operand(rhs_labels, gathers[1])
    problem = pattern.forward(*sides, Result(labels[2], gathers[2]), num_rhs=len(rhs), num_lhs=len(lhs))
    operands = [*lhs, *rhs]
    results = pattern.check_sizes(name, problem, [x.shape for x in operands], mesh_axes, len(lhs))
    compute = compute_dtype or jnp.result_type(*operands)
    starts = range(0, len(results), len(rhs))  # of the results of each left operand
    static = _Static(
        name=name,
        problem=problem,
        num_lhs=len(lhs),
        overlap=overlap,
        mesh_axes=tuple(mesh_axes.items()),
        compute_dtype=jnp.dtype(compute),
        out_dtype=jnp.dtype(out_dtype or compute),
        bias_labels=next(_check_bias(name, labels[2], results[i:][: len(rhs)], bias, bias_labels) for i in starts),
        activation=activation,
    )
    everything = _vary_alike([*operands, *(bias or ())], _named_axes(lhs_gather, rhs_gather, out_scatter))
    outs = _apply(static, tuple(everything[: len(operands)]), tuple(everything[len(operands) :]))
    flat = [layout.constrain(labels[2], out) for out in outs]
    return [flat[i : i + len(rhs)] for i in starts]


@dataclasses.dataclass(frozen=True)
class _Static:
    """Everything about a call that is known while tracing."""

    name: str
    problem: Problem
    num_lhs: int
    overlap: Overlap
    mesh_axes: tuple[tuple[str, int], ...]
    compute_dtype: Any
    out_dtype: Any
    bias_labels: str
    activation: Callable[[Array], Array] | None

    def settings(self, site: str) -> Overlap:
        """Settings at a site; an override of the call's own name holds for its backward sites too."""
        base = self.overlap.at(self.name)
        return dataclasses.replace(base, **self.overlap.sites.get(site, {})) if site != self.name else base


Arrays = tuple[Array, ...]


def _forward(static: _Static, operands: Arrays, bias: Arrays, for_gradient: bool) -> tuple[Any, dict[int, Array]]:
    problem, settings = static.problem, static.settings(static.name)
    moving = tuple(x.astype(static.compute_dtype) for x in operands)
    weights = range(static.num_lhs, len(operands))
    plan = engine.plan_problem(
        static.name, problem, moving, settings, dict(static.mesh_axes), early=weights, num_stripes=static.num_lhs
    )
    epilogue = engine.Epilogue(
        dtypes=(static.out_dtype,) * len(problem.results),
        bias=bias * static.num_lhs or None,
        bias_labels=static.bias_labels,
        activation=static.activation,
        keep_input=for_gradient,
    )
    gathered = [i for i, o in enumerate(problem.operands) if o.gather]
    keep = gathered if for_gradient and settings.save_gathered else ()
    run = functools.partial(engine.run, problem, plan=plan, epilogue=epilogue, keep=keep)
    with jax.named_scope(static.name):  # by which plans find a site in the compiled program
        return order.impose(run, settings.scheduler)(moving)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(static: _Static, operands: Arrays, bias: Arrays) -> Arrays:
    results, _ = _forward(static, operands, bias, for_gradient=False)
    return tuple(result[0] for result in results)


def _apply_fwd(static: _Static, operands: Arrays, bias: Arrays) -> tuple[Arrays, Any]:
    results, kept = _forward(static, operands, bias, for_gradient=True)
    inputs = tuple(result[1] for result in results) if static.activation is not None else ()
    return tuple(result[0] for result in results), (operands, bias, kept, inputs)


def _apply_bwd(static: _Static, residuals: Any, cotangents: Arrays) -> tuple[Arrays, Arrays]:
    operands, bias, kept, inputs = residuals
    if static.activation is not None:
        cotangents = tuple(
            _through_activation(static.activation, z, dy) for z, dy in zip(inputs, cotangents, strict=True)
        )
    problem = pattern.without_gathers(
        pattern.backward(static.problem, static.num_lhs), [len(cotangents) + i for i in kept]
    )
    dys = tuple(dy.astype(static.compute_dtype) for dy in cotangents)
    # Behind a barrier, or XLA would see that the operands are those of the forward pass, gather them once and keep the
    # gathered ones until here.
    again = [
        lax.optimization_barrier(x) if o.gather else x for x, o in zip(operands, static.problem.operands, strict=True)
    ]
    arrays = (*dys, *(kept.get(i, x.astype(static.compute_dtype)) for i, x in enumerate(again)))
    gradients: dict[int, Array] = {}
    for site, results in _backward_sites(static):
        part, used = pattern.restrict(problem, results)
        here = [arrays[i] for i in used]
        plan = engine.plan_problem(
            site,
            part,
            here,
            static.settings(site),
            dict(static.mesh_axes),
            early=[new for new, old in enumerate(used) if old >= len(cotangents)],
            num_stripes=static.num_lhs,
        )
        epilogue = engine.Epilogue(dtypes=tuple(operands[i].dtype for i in results))
        run = functools.partial(engine.run, part, plan=plan, epilogue=epilogue)
        with jax.named_scope(site):
            outs, _ = order.impose(run, static.settings(site).scheduler)(here)
        gradients.update({i: out[0] for i, out in zip(results, outs, strict=True)})
    dbias = tuple(
        _bias_gradient(static.problem.results[0].labels, static.bias_labels, cotangents[j :: len(bias)], b)
        for j, b in enumerate(bias)
    )
    return tuple(gradients[i] for i in range(len(operands))), dbias


_apply.defvjp(_apply_fwd, _apply_bwd)


def _backward_sites(static: _Static) -> list[tuple[str, tuple[int, ...]]]:
    """The gradients, each with a plan of its own; but where both need the same gathered cotangent, it feeds both."""
    everything, num_lhs = tuple(range(len(static.problem.operands))), static.num_lhs
    if static.problem.results[0].scatter and len(everything) == num_lhs + 1:
        return [(f"{static.name}.bwd", everything)]
    return [(f"{static.name}.dlhs", everything[:num_lhs]), (f"{static.name}.drhs", everything[num_lhs:])]


def _through_activation(activation: Callable[[Array], Array], z: Array, dy: Array) -> Array:
    accum = pieces.accumulation_dtype(z)
    _, pullback = jax.vjp(activation, z.astype(accum))
    (dz,) = pullback(dy.astype(accum))
    return dz


def _bias_gradient(labels: str, bias_labels: str, dys: Sequence[Array], bias: Array) -> Array:
    """Summed over the results that the bias was added to."""
    accum = pieces.accumulation_dtype(dys[0])
    parts = [jnp.einsum(f"{labels}->{bias_labels}", dy.astype(accum)) for dy in dys]
    return sum(parts[1:], start=parts[0]).astype(bias.dtype)


def _bound_axes(*collectives: Mapping[str, AxisNames]) -> dict[str, int]:
    """Sizes of the mesh axes that shard_map has bound here.

    In automatic partitioning a vmap of size 1 stands for each axis (see `ops.layout`); found by asking for the names.
    """
    mesh = jax.sharding.get_abstract_mesh()
    bound = {axis: mesh.shape[axis] for axis in mesh.axis_names if axis in mesh.manual_axes}
    wanted = _named_axes(*collectives) - bound.keys()
    return bound | {axis: 1 for axis in sorted(wanted) if layout.is_whole(axis)}


def _named_axes(*collectives: Mapping[str, AxisNames]) -> frozenset[str]:
    return frozenset(axis for given in collectives for axes in given.values() for axis in pattern.canonical_axes(axes))


def _vary_alike(arrays: Sequence[Array], axes: frozenset[str]) -> list[Array]:
    """Types all arrays as varying over `axes` too, and over whatever any of them varies over.

    This puts the sums of a replicated operand's gradient where they belong: in the transpose of the cast, outside the
    custom rule.
    """
    axes = axes.union(*(compat.varying_axes(x) for x in arrays))
    return [compat.vary(x, axes) for x in arrays]


def _check_bias(
    name: str,
    out_labels: str,
    results: Sequence[Mapping[str, int]],
    bias: Sequence[Array] | None,
    bias_labels: str,
) -> str:
    """The labels of the bias; results: local label sizes of each result."""
    if bias is None:
        return ""
    where = f"collective_einsum {name!r}: bias"
    if len(bias) != len(results):
        raise ValueError(
            f"{where}: there are {len(results)} right operands but {len(bias)} bias arrays: give one for each of them."
        )
    labels = bias_labels or out_labels[len(out_labels) - bias[0].ndim :]
    for b, sizes in zip(bias, results, strict=True):
        if len(labels) != b.ndim or any(c not in out_labels for c in labels):
            raise ValueError(
                f"{where} of shape {b.shape} has labels {labels!r}: give bias_labels, one label of the result "
                f"{out_labels!r} per dimension."
            )
        for label, size in zip(labels, b.shape, strict=True):
            if size != sizes[label]:
                raise ValueError(
                    f"{where} has size {size} along label {label!r}, of which this device's part of the result has "
                    f"{sizes[label]}: pass the part of the bias that belongs to it."
                )
    return labels


def _reduce_private(
    name: str, labels: str, gather: pattern.LabelAxes, elsewhere: str, arrays: Sequence[Array]
) -> tuple[str, pattern.LabelAxes, list[Array]]:
    """Removes what concerns one operand alone: diagonals of repeated labels, sums over labels that nothing else has.

    The sum over a gathered label is the sum of the shards' sums, so such a label is never gathered.
    """
    sharded = dict(gather)
    unique = "".join(dict.fromkeys(labels))
    for label in unique:
        if labels.count(label) > 1 and label in sharded:
            raise ValueError(
                f"collective_einsum {name!r}: label {label!r} is repeated in operand {labels!r} and gathered over "
                f"{'*'.join(sharded[label])}: take the diagonal before the call."
            )
    kept = "".join(c for c in unique if c in elsewhere)
    if kept == labels:
        return labels, gather, list(arrays)
    out = []
    for x in arrays:
        total = jnp.einsum(f"{labels}->{kept}", x, preferred_element_type=pieces.accumulation_dtype(x))
        axes = tuple(a for c in unique if c not in kept for a in sharded.get(c, ()))
        if axes:
            axis_set = frozenset(axes)
            total = lax.psum(compat.vary(total, axis_set), axes)
        out.append(total.astype(x.dtype))
    return kept, tuple((c, a) for c, a in gather if c in kept), out
