"""A jaxpr as a graph of values with producers and users, in which small functions called by `jit` are inlined."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Literal, jaxprs_in_params

_ELEMENTWISE_WORDS = """
abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh div eq erf
erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul name ne neg not or
pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE_WORDS.split())
# What says nothing about numbers, only over which axes they may differ.
VARYING = frozenset({"pvary"})
SHAPING = frozenset({"reshape", "transpose", "squeeze", "broadcast_in_dim"})
GATHERS = frozenset({"all_gather", "all_gather_invariant"})
ALL_REDUCES = frozenset({"psum", "psum_invariant"})
CALLS = frozenset({"jit", "pjit"})
# Operations that, written twice with the same operands, are one.
_ALIKE = (ELEMENTWISE - {"name"}) | VARYING | SHAPING | GATHERS
# jnp.einsum and the activations of jax.nn are functions called by jit. Larger functions stay what they are.
MAX_INLINED = 24


@dataclasses.dataclass(eq=False, repr=False)
class Value:
    """An array of the graph; a constant if it has no producer and is no input."""

    aval: Any
    producer: Op | None = None
    users: list[Op] = dataclasses.field(default_factory=list)
    leaves: bool = False  # a result of the graph
    constant: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Its local shape."""
        return tuple(self.aval.shape)

    @property
    def varying(self) -> frozenset[str]:
        """Mesh axes over which it may differ between devices."""
        return frozenset(self.aval.manual_axis_type.varying)


@dataclasses.dataclass(eq=False, repr=False)
class Op:
    """One equation over values."""

    eqn: Any
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    name_stack: Any

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.eqn.primitive.name

    @property
    def params(self) -> dict[str, Any]:
        """The primitive's parameters."""
        return self.eqn.params

    @property
    def acts(self) -> bool:
        """Whether it does more than compute its outputs; collectives name their axis as an effect, which is none."""
        return any(type(effect).__name__ != "NamedAxisEffect" for effect in self.eqn.effects)

    @property
    def source(self) -> str:
        """The line of the user's code that it comes from, "path:line (function)", as far as that is known."""
        place, _, function = source_info_util.summarize(self.eqn.source_info).partition(" (")
        path, _, rest = place.partition(":")
        return f"{path}:{rest.split(':')[0]} ({function.rstrip(')').split('.')[-1]})" if rest else place

    @property
    def place(self) -> str:
        """`source` without its folder and function."""
        return short_place(self.source)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Inside, what is traced carries this operation's source line and names."""
        names = source_info_util.current_name_stack() + self.name_stack
        with source_info_util.user_context(self.eqn.source_info.traceback, name_stack=names), self.eqn.ctx.manager:
            yield


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Reduced:
    """One array of an AllReduce, `op`, and what stands for that if it was split."""

    op: Op
    scatter: Op | None = None
    gather: Op | None = None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Graph:
    """Operations in the order in which they were written, without those that nothing needs.

    reduced: the arrays of all AllReduces as written, needed or not.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    reduced: tuple[Reduced, ...] = ()


def evaluate(graph: Graph, arrays: Sequence[Any]) -> list[Any]:
    """Traces the operations of a graph as they are."""
    env: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
    for op in graph.ops:
        with op.scope():
            results = bind(op.eqn.primitive, [read(env, value) for value in op.inputs], op.params)
        env.update(zip(op.outputs, results, strict=True))
    return [read(env, value) for value in graph.outputs]


def read(env: Mapping[Value, Any], value: Value) -> Any:
    """The array of a value."""
    return env.get(value, value.constant)


def bind(primitive: Any, inputs: Sequence[Any], params: Mapping[str, Any]) -> Sequence[Any]:
    """Applies a primitive with the parameters that its equation holds."""
    results = primitive.bind(*inputs, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def short_place(source: str) -> str:
    """ "file.py:12" of "/folder/file.py:12 (function)"."""
    return pathlib.PurePath(source.partition(" (")[0]).name


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, as the open one and its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def read_graph(jaxpr: Any, inline: bool, split: Mapping[int, int] = MappingProxyType({})) -> Graph:
    """The graph of a jaxpr, closed or not.

    inline: whether small functions become part of it, and repeats one. split: arrays of AllReduces, by their place in
    `reduced`, that become ReduceScatters along a dimension followed by AllGathers.
    """
    opened, consts = open_jaxpr(jaxpr)
    inputs = tuple(Value(var.aval) for var in opened.invars)
    reader = _Reader(inline, split)
    outputs = reader.read(opened, consts, inputs, None)
    ops = _needed(reader.ops, outputs)
    for op in ops:
        for value in op.inputs:
            value.users.append(op)
    for value in outputs:
        value.leaves = True
    return Graph(inputs, outputs, tuple(ops), tuple(reader.reduced))


class _Reader:
    def __init__(self, inline: bool, split: Mapping[int, int]) -> None:
        self.inline, self.split = inline, split
        self.ops: list[Op] = []
        self.reduced: list[Reduced] = []
        self.seen: dict[Any, tuple[Value, ...]] = {}

    def read(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], outer: Any) -> tuple[Value, ...]:
        env = {var: Value(var.aval, constant=const) for var, const in zip(jaxpr.constvars, consts, strict=True)}
        env.update(zip(jaxpr.invars, inputs, strict=True))

        def value(atom: Any) -> Value:
            return Value(atom.aval, constant=atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            stack = eqn.source_info.name_stack if outer is None else outer + eqn.source_info.name_stack
            operands = tuple(map(value, eqn.invars))
            if self.inline and eqn.primitive.name in CALLS and _is_small(eqn.params["jaxpr"]):
                inner, inner_consts = open_jaxpr(eqn.params["jaxpr"])
                results = self.read(inner, inner_consts, operands, stack)
            elif eqn.primitive.name in ALL_REDUCES:
                results = self._reduce(eqn, operands, stack)
            else:
                results = self._add(eqn, operands, stack)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(map(value, jaxpr.outvars))

    def _add(self, eqn: Any, operands: tuple[Value, ...], stack: Any) -> tuple[Value, ...]:
        key = _key(eqn, operands) if self.inline and eqn.primitive.name in _ALIKE else None
        if key is not None and key in self.seen:
            return self.seen[key]
        results = tuple(Value(var.aval) for var in eqn.outvars)
        op = Op(eqn, operands, results, stack)
        for result in results:
            result.producer = op
        self.ops.append(op)
        if key is not None:
            self.seen[key] = results
        return results

    def _reduce(self, eqn: Any, operands: tuple[Value, ...], stack: Any) -> tuple[Value, ...]:
        """An AllReduce without the arrays that are split, and their halves."""
        results = tuple(Value(var.aval) for var in eqn.outvars)
        whole: list[tuple[Value, Value]] = []
        for operand, result in zip(operands, results, strict=True):
            dim = self.split.get(len(self.reduced))
            op = Op(eqn, (operand,), (result,), stack)
            if dim is None:
                whole.append((operand, result))
                self.reduced.append(Reduced(op))
                continue
            first, second = halves(op, dim)
            between = Value(first.outvars[0].aval)
            scatter = Op(first, (operand,), (between,), stack)
            gather = Op(second, (between,), (result,), stack)
            between.producer, result.producer = scatter, gather
            self.ops += [scatter, gather]
            self.reduced.append(Reduced(op, scatter, gather))
        if whole:
            inputs, outputs = zip(*whole, strict=True)
            self.ops.append(Op(eqn, inputs, outputs, stack))
            for output in outputs:
                output.producer = self.ops[-1]
        return results


def halves(op: Op, dim: int) -> tuple[Any, Any]:
    """A ReduceScatter along a dimension and an AllGather, as equations, that together are an AllReduce of one array."""
    axes = op.params["axes"]
    to = "varying" if op.outputs[0].varying.issuperset(axes) or op.name == "psum" else "invarying"

    def run(x: Any) -> Any:
        part = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return lax.all_gather(part, axes, axis=dim, tiled=True, to=to)

    scatter, gather = jax.make_jaxpr(run)(op.inputs[0].aval).eqns
    return scatter.replace(source_info=op.eqn.source_info), gather.replace(source_info=op.eqn.source_info)


def _key(eqn: Any, operands: tuple[Value, ...]) -> Any:
    key = (eqn.primitive, operands, tuple(sorted(eqn.params.items())))
    try:
        hash(key)
    except TypeError:  # lists as device groups
        return None
    return key


def _is_small(jaxpr: Any) -> bool:
    """Whether a function is short and straight, however deeply its calls are nested."""
    return _length(jaxpr) <= MAX_INLINED


def _length(jaxpr: Any) -> int:
    total = 0
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        if eqn.primitive.name in CALLS:
            total += _length(eqn.params["jaxpr"])
        elif any(True for _ in jaxprs_in_params(eqn.params)):
            return MAX_INLINED + 1
        else:
            total += 1
    return total


def _needed(ops: Sequence[Op], outputs: Sequence[Value]) -> list[Op]:
    wanted = set(outputs)
    kept = []
    for op in reversed(ops):
        if op.acts or not wanted.isdisjoint(op.outputs):
            kept.append(op)
            wanted.update(op.inputs)
    return kept[::-1]
