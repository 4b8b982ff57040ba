"""Imposes the order that a scheduler gives on what JAX traces."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from overlapfx import compat
from overlapfx.ops import instructions
from overlapfx.ops.instructions import TRANSFERS, Flat, Step, Value
from overlapfx.ops.order_groups import find_groups
from overlapfx.plan.schedulers import SCHEDULERS
from overlapfx.plan.schedulers.base import DONE, START

# How an order can be imposed, in the order of preference; `python -m experiments.mechanisms` shows what each does.
ASYNCHRONOUS = "asynchronous start and done"  # and barriers
GROUPS = "scheduling groups"
BARRIERS = "optimization barriers"
MECHANISMS = (ASYNCHRONOUS, GROUPS, BARRIERS)


@functools.cache
def _starters() -> dict[str, tuple[Any, Any]]:
    """Primitives (start, done) by the name of the blocking one; empty where this JAX has none."""
    try:
        parallel = importlib.import_module("jax._src.lax.parallel")
    except ImportError:
        return {}
    found = (getattr(parallel, "ppermute_start_p", None), getattr(parallel, "ppermute_done_p", None))
    return {} if None in found else {"ppermute": found}


def why_not(how: str, transfers: Collection[str] = TRANSFERS) -> str:
    """Why no order of `transfers`, names of primitives, is imposed by `how` unless asked for; "" if it may be."""
    if how == ASYNCHRONOUS and not (_starters().keys() & set(transfers) and compat.can_start_transfers()):
        return f"no start of {' or '.join(transfers)} that this JAX offers is accepted by the compiler"
    if how == GROUPS and not all(map(compat.heeds_groups, transfers)):
        return f"the compiler does not heed them for {' and '.join(t for t in transfers if not compat.heeds_groups(t))}"
    return ""


def mechanism(transfers: Collection[str] = TRANSFERS) -> str:
    """The first of MECHANISMS that works for these transfers on the devices that are traced for."""
    return next(how for how in MECHANISMS if not why_not(how, transfers))


def describe(scheduler: str, transfers: Collection[str] = TRANSFERS) -> str:
    """What orders the instructions, for logs: `bottom_up by asynchronous start and done`.

    Inside an order that is imposed further out, which is made for transfers of every kind, it is that one.
    """
    if _imposed.get() is not None:
        transfers = TRANSFERS
    return scheduler if scheduler == "compiler" else f"{scheduler} by {mechanism(transfers)}"


# While the outermost function is traced: the schedulers of those inside that are to have an order too.
_imposed: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("overlapfx_imposed", default=None)


def impose(fn: Callable[..., Any], scheduler: str, how: str | None = None) -> Callable[..., Any]:
    """`fn` with its transfers and products in the order that `scheduler` gives them; the same values.

    fn: a function of arrays to a tree of arrays, called inside shard_map; it is traced once more for this. What it
        calls is included, as are bodies of loops. scheduler: a name in plan.schedulers, or "compiler", which leaves
        `fn` as it is. how: one of MECHANISMS, by default the first that works for the transfers of `fn` (under vmap no
        starts of transfers, which know nothing of it).

    Differentiate first, then impose: an order holds for what it is given, and starts of transfers have no derivative.
    An order imposed further out includes what is inside, which is then left alone.
    """
    assert scheduler == "compiler" or scheduler in SCHEDULERS, scheduler
    assert how is None or how in MECHANISMS, how
    if scheduler == "compiler":
        return fn

    @functools.wraps(fn)
    def ordered(*arguments: Any) -> Any:
        outer = _imposed.get()
        if outer is not None:
            outer.append(scheduler)
            return fn(*arguments)
        flat_arguments, tree = jax.tree.flatten(arguments)

        def on_leaves(*leaves: Any) -> Any:
            return fn(*jax.tree.unflatten(tree, leaves))

        with _outermost() as inner:
            closed, shapes = jax.make_jaxpr(on_leaves, return_shape=True)(*flat_arguments)
        transfers = instructions.transfers(closed.jaxpr)
        if not transfers:
            return fn(*arguments)
        by = how or _mechanism_for(TRANSFERS if inner else transfers, flat_arguments)
        found = _run(closed, (scheduler, by), flat_arguments)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return ordered


def _mechanism_for(transfers: Collection[str], arguments: Sequence[Any]) -> str:
    mapped = any(getattr(x, "batch_dim", None) is not None for x in arguments)
    found = mechanism(transfers)
    return BARRIERS if found == ASYNCHRONOUS and mapped else found


@contextlib.contextmanager
def _outermost() -> Iterator[list[str]]:
    inner: list[str] = []
    token = _imposed.set(inner)
    try:
        yield inner
    finally:
        _imposed.reset(token)


def in_order(closed: ClosedJaxpr, scheduler: str) -> tuple[Flat, list[Step]]:
    """A traced function with its steps in the order that the scheduler gives them."""
    flat = instructions.flatten(closed)
    steps = instructions.group(flat)
    graph = instructions.make_graph(flat, steps, instructions.Rates.here())
    return flat, [steps[i] for i in SCHEDULERS[scheduler](graph)]


def _run(closed: ClosedJaxpr, order: tuple[str, str], arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a traced function in an order, given as (scheduler, mechanism)."""
    flat, steps = in_order(closed, order[0])
    emitter = _Emitter(flat, arguments, order, find_groups(steps) if order[1] == GROUPS else {})
    for step in steps:
        emitter.emit(step)
    return [emitter.read(value) for value in flat.outputs]


class _Emitter:
    """Binds steps one after the other, each tied to the one before it.

    Data dependencies leave the compiler free to reorder. A barrier over the results of one long step with what the next
    one reads takes that freedom away, while the operations inside a step may still be fused. Steps of scheduling groups
    are not tied: a barrier between two of a group would be a dependency that no group may have.
    """

    def __init__(self, flat: Flat, arguments: Sequence[Any], order: tuple[str, str], groups: Mapping[int, int]) -> None:
        self.values: dict[int, Any] = {**flat.constants, **dict(zip(flat.inputs, arguments, strict=True))}
        self.futures: dict[int, Any] = {}  # by identity of a START
        self.order, self.groups = order, groups
        self.starters = _starters() if order[1] == ASYNCHRONOUS else {}
        self.last: Any = None  # a result of the long step before
        self.begun: list[int] = []  # STARTs since then, if they too can be held in their place
        # Only TPU compilers take what a START returns through a barrier.
        self.is_strict = bool(self.starters) and compat.target_platform() == "tpu"

    def read(self, value: Value) -> Any:
        return value.val if isinstance(value, Literal) else self.values[value]

    def emit(self, step: Step) -> None:
        if step.kind == DONE:
            assert step.start is not None
            self._done(step.start)
            return
        local = dict(zip(step.reads(), self._tied(step), strict=True))
        if step.kind == START:
            self._start(step, local)
            return
        for op in step.operations:
            reads = [r.val if isinstance(r, Literal) else local[r] if r in local else self.values[r] for r in op.reads]
            made = self._bind(op, reads, self.groups.get(id(step)) if op is step.operations[0] else None)
            self.values.update(zip(op.writes, made, strict=True))
        if step.is_long and step.operations[-1].writes:
            self.last = self.values[step.operations[-1].writes[0]]

    def _tied(self, step: Step) -> list[Any]:
        """What the step reads, behind a barrier that waits for the long step before and for the STARTs since."""
        reads = [self.values[r] for r in step.reads()]
        begun = self.begun if step.is_long else []
        if self.order[1] == GROUPS or not (step.is_long or step.kind == START) or (self.last is None and not begun):
            return reads
        # A barrier takes only values that vary alike; one of them is enough.
        axes = compat.varying_axes(self.last if self.last is not None else reads[0])
        alike = [k for k, x in enumerate(reads) if compat.varying_axes(x) == axes]
        if not alike:
            return reads
        before = [] if self.last is None else [self.last]
        futures = [self.futures[i] for i in begun]
        _, futures, tied = lax.optimization_barrier((before, futures, [reads[k] for k in alike]))
        self.futures.update(zip(begun, futures, strict=True))
        for k, x in zip(alike, tied, strict=True):
            reads[k] = x
        if step.is_long:
            self.begun = []
        return reads

    def _start(self, step: Step, local: dict[int, Any]) -> None:
        (op,) = step.operations
        (source,) = (local[r] if isinstance(r, int) else r.val for r in op.reads)
        starter = self.starters.get(op.eqn.primitive.name)
        if starter is None:
            (self.futures[id(step)],) = self._bind(op, [source], self.groups.get(id(step)))
        else:
            with _scope(op):
                self.futures[id(step)] = starter[0].bind(_row_major(source), **op.eqn.params)
            if self.is_strict:
                self.begun.append(id(step))

    def _done(self, start: Step) -> None:
        (op,) = start.operations
        starter = self.starters.get(op.eqn.primitive.name)
        value = self.futures.pop(id(start))
        if self.is_strict and starter is not None and self.last is not None and id(start) not in self.begun:
            _, value = lax.optimization_barrier((self.last, value))
        self.begun = [i for i in self.begun if i != id(start)]
        if starter is not None:
            with _scope(op):
                value = _row_major(starter[1].bind(value))
        self.values[op.writes[0]] = value

    def _bind(self, op: instructions.Operation, reads: Sequence[Any], group: int | None) -> list[Any]:
        eqn = op.eqn
        subfuns, params = compat.bind_params(eqn)
        for name in instructions.BODIES.get(eqn.primitive.name, ()):
            params[name] = _reordered(eqn.params[name], self.order)
        with _scope(op), contextlib.nullcontext() if group is None else compat.scheduling_group(group):
            made = eqn.primitive.bind(*subfuns, *reads, **params)
        return list(made) if eqn.primitive.multiple_results else [made]


def _row_major(x: Any) -> Any:
    """`x` in the default layout: left alone, the compiler chooses one for each end of a transfer and finds no way."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _scope(op: instructions.Operation) -> Any:
    """The scope that the operation was traced in, by which plans find it in the compiled program."""
    stack = str(op.eqn.source_info.name_stack)
    context = contextlib.ExitStack()
    context.enter_context(op.eqn.ctx.manager)
    if stack:
        context.enter_context(jax.named_scope(stack))
    return context


def _reordered(inner: ClosedJaxpr | Jaxpr, order: tuple[str, str]) -> ClosedJaxpr | Jaxpr:
    """The body of a loop, or what is recomputed, in an order."""
    closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())

    def body(*arguments: Any) -> list[Any]:
        return _run(closed, order, arguments)

    made = jax.make_jaxpr(body)(*(var.aval for var in closed.jaxpr.invars))
    if isinstance(inner, ClosedJaxpr):
        return made
    assert not made.consts
    return made.jaxpr
