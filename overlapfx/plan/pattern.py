"""The algebra of collective einsums: products of gathered operands, results scattered, closed under gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

AxisNames = str | Sequence[str]
Axes = tuple[str, ...]
LabelAxes = tuple[tuple[str, Axes], ...]  # ((label, axes), ...), hashable, in the order of the labels


@dataclasses.dataclass(frozen=True)
class Term:
    """One product: operands `lhs` and `rhs` (indices into Problem.operands), added into result `out`."""

    lhs: int
    rhs: int
    out: int

    def operands(self) -> tuple[int, int]:
        """Both operand indices, left first."""
        return (self.lhs, self.rhs)


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that enters: its labels, and the axes over which each sharded label is gathered first."""

    labels: str
    gather: LabelAxes = ()


@dataclasses.dataclass(frozen=True)
class Result:
    """An array that leaves: its labels, and the axes over which each label is summed and scattered."""

    labels: str
    scatter: LabelAxes = ()


@dataclasses.dataclass(frozen=True)
class Problem:
    """Several einsums that share operands or results.

    Forward passes have one result per right operand. The gradient for a shared left operand sums over all of them.
    Both are the same thing, which is why one engine runs forward and backward.
    """

    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    terms: tuple[Term, ...]

    def spec(self, term: Term) -> str:
        """The einsum string of one term."""
        lhs, rhs = self.operands[term.lhs].labels, self.operands[term.rhs].labels
        return f"{lhs},{rhs}->{self.results[term.out].labels}"

    def role(self, operand: int, label: str) -> str:
        """What gathering `label` of `operand` means for the products: "free", "contracting" or "batch".

        The three cases of the paper's section 5.1. A label may play different roles in different terms (in a backward
        pass it does); then the first term decides the name, and the engine treats each term by itself.
        """
        term = next(t for t in self.terms if operand in t.operands())
        other = term.rhs if term.lhs == operand else term.lhs
        if label not in self.results[term.out].labels:
            return "contracting"
        return "batch" if label in self.operands[other].labels else "free"


def canonical_axes(axes: AxisNames) -> Axes:
    """A mesh axis or a sequence of them as a tuple, major to minor."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


def parse_spec(spec: str, name: str) -> tuple[str, str, str]:
    """Labels of the left operand, the right operand and the result of "ab,bc->ac".

    Raises ValueError for anything but two operands with single-letter labels and an explicit result.
    """
    text = spec.replace(" ", "")
    where = f"collective_einsum {name!r}: spec {spec!r}"
    if text.count("->") != 1 or text.count(",") != 1 or text.index(",") > text.index("->"):
        raise ValueError(f"{where} does not have the form 'ab,bc->ac': write two operands and an explicit result.")
    inputs, out = text.split("->")
    lhs, rhs = inputs.split(",")
    if not (lhs + rhs + out).isalpha() and lhs + rhs + out:
        bad = sorted({c for c in lhs + rhs + out if not c.isalpha()})
        raise ValueError(f"{where} contains {' '.join(bad)!r}: labels are single letters.")
    repeated = sorted({c for c in out if out.count(c) > 1})
    if repeated:
        raise ValueError(f"{where} repeats label {repeated[0]!r} in its result: name each result label once.")
    unknown = sorted(set(out) - set(lhs + rhs))
    if unknown:
        raise ValueError(f"{where} has label {unknown[0]!r} in its result that no operand has: remove it.")
    return lhs, rhs, out


def check_collective(
    name: str, what: str, labels: str, collective: Mapping[str, AxisNames], mesh_axes: Mapping[str, int]
) -> LabelAxes:
    """Validates one of lhs_gather, rhs_gather, out_scatter and returns it in hashable form without axes of size 1.

    what: the argument's name, for messages. labels: labels of the array that it speaks about.
    mesh_axes: size of each mesh axis that is bound here. Raises ValueError with one sentence.
    """
    where = f"collective_einsum {name!r}: {what}"
    seen: dict[str, str] = {}
    checked = []
    for label, value in collective.items():
        if label not in labels:
            raise ValueError(
                f"{where} names label {label!r}, which is not among the labels {labels!r} it applies to: "
                "use one of those."
            )
        axes = canonical_axes(value)
        for axis in axes:
            if axis not in mesh_axes:
                raise ValueError(
                    f"{where} uses axis {axis!r} for label {label!r}, but the mesh axes bound here are "
                    f"{', '.join(mesh_axes) or 'none'}: call it inside shard_map over a mesh that has this axis."
                )
            if axis in seen:
                raise ValueError(
                    f"{where} uses axis {axis!r} twice, for labels {seen[axis]!r} and {label!r}: an array is "
                    "sharded over an axis along one label only."
                )
            seen[axis] = label
        kept = tuple(axis for axis in axes if mesh_axes[axis] > 1)
        if kept:
            checked.append((label, kept))
    return tuple(sorted(checked, key=lambda item: labels.index(item[0])))


def num_shards(axes: Axes, mesh_axes: Mapping[str, int]) -> int:
    """Ring size of a group of axes."""
    size = 1
    for axis in axes:
        size *= mesh_axes[axis]
    return size


def full_sizes(
    name: str, operand: Operand, shape: Sequence[int], mesh_axes: Mapping[str, int], which: str
) -> dict[str, int]:
    """Size of every label of an operand after its gathers; raises ValueError if the rank does not match the labels."""
    if len(shape) != len(operand.labels):
        raise ValueError(
            f"collective_einsum {name!r}: the {which} operand has shape {tuple(shape)} but labels {operand.labels!r}: "
            "give one label per dimension."
        )
    gathered = dict(operand.gather)
    return {
        label: size * num_shards(gathered.get(label, ()), mesh_axes)
        for label, size in zip(operand.labels, shape, strict=True)
    }


def check_sizes(
    name: str, problem: Problem, shapes: Sequence[Sequence[int]], mesh_axes: Mapping[str, int], num_lhs: int = 1
) -> list[dict[str, int]]:
    """Checks that labels agree between operands and scattered labels divide; returns local label sizes by result.

    Labels on one side only may have another size in each operand of that side: they share a gather, not their sizes.
    """
    full = []
    sizes: dict[str, int] = {}
    sides = (problem.operands[0].labels, problem.operands[num_lhs].labels)
    for i, (operand, shape) in enumerate(zip(problem.operands, shapes, strict=True)):
        which = "left" if i < num_lhs else "right"
        full.append(full_sizes(name, operand, shape, mesh_axes, which))
        for label, size in full[-1].items():
            if all(label in side for side in sides) and sizes.setdefault(label, size) != size:
                raise ValueError(
                    f"collective_einsum {name!r}: label {label!r} has size {sizes[label]} on the left and {size} on "
                    f"the right after the gathers (left gathers {_show(problem.operands[0].gather)}, right gathers "
                    f"{_show(operand.gather)}): gather the smaller one over the axes that shard it."
                )
    results = []
    for term in problem.terms:
        result = problem.results[term.out]
        local = {label: (full[term.lhs] | full[term.rhs])[label] for label in result.labels}
        for label, axes in result.scatter:
            size, parts = local[label], num_shards(axes, mesh_axes)
            if size % parts:
                low = size // parts * parts
                legal = f"sizes are {low} or {low + parts}" if low else f"size is {parts}"
                raise ValueError(
                    f"collective_einsum {name!r}: out_scatter of label {label!r} of size {size} over axis "
                    f"{'*'.join(axes)} of size {parts} does not divide: the nearest legal {legal}."
                )
            local[label] = size // parts
        results.append(local)
    return results


def _show(gather: LabelAxes) -> str:
    return ", ".join(f"{label}:{'*'.join(axes)}" for label, axes in gather) or "nothing"


def forward(lhs: Operand, rhs: Operand, result: Result, num_rhs: int, num_lhs: int = 1) -> Problem:
    """y_ij = einsum(lhs_i, rhs_j): left operands that share the gathers of the right ones and the other way round.

    Results are numbered i * num_rhs + j.
    """
    return Problem(
        operands=(*[lhs] * num_lhs, *[rhs] * num_rhs),
        results=(result,) * (num_lhs * num_rhs),
        terms=tuple(Term(i, num_lhs + j, i * num_rhs + j) for i in range(num_lhs) for j in range(num_rhs)),
    )


def backward(problem: Problem, num_lhs: int = 1) -> Problem:
    """Both gradients of a forward problem as one problem: operands (dy_00.., lhs_0.., rhs_0..), results (dlhs_0..,
    drhs_0..).

    With Y = L.R, dL = dY.R and dR = L.dY. The dual of a gather is a scatter of the same label over the same axes, so
    dY is gathered where Y was scattered, and each gradient is scattered where its operand was gathered.
    """
    lhs, rhs = problem.operands[:num_lhs], problem.operands[num_lhs:]
    m, n = num_lhs, len(rhs)
    cotangents = tuple(Operand(result.labels, gather=result.scatter) for result in problem.results)
    results = tuple(Result(o.labels, scatter=o.gather) for o in problem.operands)
    y = {(i, j): i * n + j for i in range(m) for j in range(n)}
    dlhs = tuple(Term(lhs=y[i, j], rhs=m * n + m + j, out=i) for i in range(m) for j in range(n))
    drhs = tuple(Term(lhs=m * n + i, rhs=y[i, j], out=m + j) for j in range(n) for i in range(m))
    return Problem((*cotangents, *lhs, *rhs), results, dlhs + drhs)


def restrict(problem: Problem, results: Sequence[int]) -> tuple[Problem, tuple[int, ...]]:
    """The part of a problem that makes some of its results; returns it with the indices of the operands it keeps."""
    terms = [t for t in problem.terms if t.out in results]
    kept = tuple(sorted({i for t in terms for i in t.operands()}))
    new_operand = {old: new for new, old in enumerate(kept)}
    new_result = {old: new for new, old in enumerate(results)}
    return (
        Problem(
            tuple(problem.operands[i] for i in kept),
            tuple(problem.results[i] for i in results),
            tuple(Term(new_operand[t.lhs], new_operand[t.rhs], new_result[t.out]) for t in terms),
        ),
        kept,
    )


def without_gathers(problem: Problem, operands: Sequence[int]) -> Problem:
    """The same problem when the named operands are already gathered."""
    new = tuple(dataclasses.replace(o, gather=()) if i in operands else o for i, o in enumerate(problem.operands))
    return dataclasses.replace(problem, operands=new)
