"""Runs a jaxpr with its patterns replaced, keeping the structure of jit, scan, remat and custom rules around them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun, jaxprs_in_params

from overlapfx.config import Overlap
from overlapfx.ops import rewrite_reduce
from overlapfx.ops.rewrite_calls import Call
from overlapfx.ops.rewrite_graph import (
    ALL_REDUCES,
    GATHERS,
    Graph,
    Op,
    Value,
    bind,
    evaluate,
    open_jaxpr,
    read,
    read_graph,
)
from overlapfx.ops.rewrite_plan import BodyPlan
from overlapfx.ops.rewrite_report import Finding, NotRewritten, Rewritten
from overlapfx.plan import decide

_COLLECTIVES = GATHERS | ALL_REDUCES | {"reduce_scatter"}
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})
_KINDS = {"reduce_scatter": "ReduceScatter", "psum": "AllReduce", "psum_invariant": "AllReduce"}


class Rewriter:
    """Rewrites jaxprs, each once, so that what jit has traced before is not compiled again."""

    def __init__(self, config: Overlap) -> None:
        self._config = config
        self._known: weakref.WeakKeyDictionary[Any, dict[Any, tuple[Any, list[Finding]]]] = weakref.WeakKeyDictionary()
        self._found: list[Finding] = []

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Finding]]:
        """What is found inside."""
        outer, self._found = self._found, []
        try:
            yield self._found
        finally:
            self._found = outer

    def changed(self, jaxpr: Any) -> Any:
        """The jaxpr, closed or not, rewritten and closed; None if there is nothing to rewrite."""
        if not _holds_collectives(jaxpr):
            return None
        by_mesh = self._known.setdefault(jaxpr, {})
        mesh = jax.sharding.get_abstract_mesh()
        if mesh not in by_mesh:
            by_mesh[mesh] = self._trace(jaxpr)
        new, found = by_mesh[mesh]
        self._found.extend(found)
        for item in found:
            if isinstance(item, Rewritten):
                decide.record(item.site)
        return new

    def _trace(self, jaxpr: Any) -> tuple[Any, list[Finding]]:
        with self.collecting() as found, decide.record_sites():  # recorded by changed()
            inputs = (var.aval for var in open_jaxpr(jaxpr)[0].invars)
            new = jax.make_jaxpr(lambda *arrays: self._run(jaxpr, arrays))(*inputs)
        return new if any(isinstance(item, Rewritten) for item in found) else None, found

    def _run(self, jaxpr: Any, arrays: Sequence[Any]) -> list[Any]:
        mapped = bool(jax.sharding.get_abstract_mesh().manual_axes)
        if mapped:
            graph, plan = rewrite_reduce.plan(jaxpr, self._config)
        else:
            graph = read_graph(jaxpr, inline=False)
            plan = BodyPlan(graph.ops, (), ())
        self._found.extend(_rewritten(call, graph) for call in plan.calls)
        self._found.extend(NotRewritten(_describe(op), op.source, why) for op, why in plan.left)
        env: dict[Value, Any] = dict(zip(graph.inputs, arrays, strict=True))
        for node in plan.order:
            if isinstance(node, Call):
                inputs = [read(env, value) for value in node.reads]
                with node.recipe.dots[0].scope():
                    # Without what nothing needs: a gradient's own product.
                    results = evaluate(read_graph(node.jaxpr, inline=False), inputs)
                env.update(zip(node.recipe.values, results, strict=True))
            else:
                with node.scope():
                    made = self._bind(node, [read(env, value) for value in node.inputs])
                env.update(zip(node.outputs, made, strict=True))
        return [read(env, value) for value in graph.outputs]

    def _bind(self, op: Op, inputs: Sequence[Any]) -> Sequence[Any]:
        if not any(map(_holds_collectives, jaxprs_in_params(op.params))):
            return bind(op.eqn.primitive, inputs, op.params)
        if op.name == "shard_map":
            return self._shard_map(op.params, inputs)
        if op.name in _CUSTOM:
            params = op.eqn.primitive.get_bind_params(op.params)
            function, *rules = params["subfuns"]
            if op.name == "custom_vjp_call":  # a rule for tangents must stay linear, which collective einsums are not
                rules = map(self._custom_part, rules)
            parts = (self._custom_part(function), *rules)
            return op.eqn.primitive.bind(*inputs, **{**params, "subfuns": parts})
        return bind(op.eqn.primitive, inputs, {name: self._param(value) for name, value in op.params.items()})

    def _param(self, value: Any) -> Any:
        """A parameter with the jaxprs in it rewritten."""
        if isinstance(value, (tuple, list)):
            return (
                type(value)(map(self._param, value))
                if any(isinstance(v, (Jaxpr, ClosedJaxpr)) for v in value)
                else value
            )
        if not isinstance(value, (Jaxpr, ClosedJaxpr)):
            return value
        new = self.changed(value)
        if new is None or isinstance(value, type(new)):
            return value if new is None else new
        opened, consts = open_jaxpr(new)
        assert not consts, "a rewritten body has constants of its own"
        return opened

    def _shard_map(self, params: dict[str, Any], inputs: Sequence[Any]) -> Sequence[Any]:
        mapped = jax.shard_map(
            lambda *arrays: tuple(self._run(params["jaxpr"], arrays)),
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=tuple(params["out_specs"]),
            check_vma=params["check_vma"],
            axis_names=set(params["newly_manual_axes"]),
        )
        return mapped(*inputs)

    def _custom_part(self, part: Any) -> Any:
        """A function of a custom rule, or what the rule computes, rewritten when it is traced."""

        def run(*args: Any) -> Any:
            return self._call(part.call_wrapped, args)

        return linear_util.wrap_init(run, debug_info=part.debug_info)

    def _call(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        """function(*args), rewritten; arguments and results that are not arrays (symbolic zeros, flags) stay so."""
        places = [i for i, arg in enumerate(args) if isinstance(arg, jax.Array)]
        shape: list[Any] = []

        def arrays_only(*arrays: Any) -> list[Any]:
            filled = list(args)
            for i, array in zip(places, arrays, strict=True):
                filled[i] = array
            leaves, tree = jax.tree.flatten(function(*filled), is_leaf=lambda x: not isinstance(x, (list, tuple)))
            kept = [None if isinstance(leaf, jax.Array) else leaf for leaf in leaves]
            shape.append((tree, kept, [isinstance(leaf, jax.Array) for leaf in leaves]))
            return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

        arrays = [args[i] for i in places]
        traced = jax.make_jaxpr(arrays_only)(*arrays)
        results = iter(jaxpr_as_fun(self.changed(traced) or traced)(*arrays))
        tree, kept, is_array = shape[-1]
        return jax.tree.unflatten(tree, [next(results) if a else k for k, a in zip(kept, is_array, strict=True)])


def _holds_collectives(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name in _COLLECTIVES or any(map(_holds_collectives, jaxprs_in_params(eqn.params)))
        for eqn in open_jaxpr(jaxpr)[0].eqns
    )


def _describe(op: Op) -> str:
    params = op.params
    kind = "AllGather" if op.name in GATHERS else _KINDS[op.name]
    axes = params.get("axis_name", params.get("axes", ()))
    names = "*".join(map(str, axes if isinstance(axes, tuple) else (axes,)))
    return f"{kind} over {names} of {op.inputs[0].aval.dtype}{list(op.inputs[0].shape)}"


def _rewritten(call: Call, graph: Graph) -> Rewritten:
    written = {reduced.scatter: reduced.op for reduced in graph.reduced}
    absorbed = sorted(call.recipe.absorbed, key=lambda op: op.source)
    replaced = (
        f"{_describe(written[op])} as ReduceScatter and AllGather" if op in written else _describe(op)
        for op in absorbed
    )
    dots = call.recipe.dots
    return Rewritten(dots[0].source, len(dots), tuple(replaced), call.decision)
