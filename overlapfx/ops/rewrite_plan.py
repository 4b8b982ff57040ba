"""Decides for one function body which products become collective einsums, in which order everything then runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from overlapfx.config import Overlap
from overlapfx.ops import rewrite_calls as calls_of
from overlapfx.ops import rewrite_match as match
from overlapfx.ops.rewrite_calls import Call, Node, Recipe
from overlapfx.ops.rewrite_dims import Unsafe
from overlapfx.ops.rewrite_forms import Forms, find_forms
from overlapfx.ops.rewrite_graph import GATHERS, Graph, Op
from overlapfx.ops.rewrite_match import Site
from overlapfx.ops.rewrite_sum import Sum, match_sum


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class BodyPlan:
    """What runs instead of a body: operations and calls in order; `left` says why of every collective that stays."""

    order: tuple[Node, ...]
    calls: tuple[Call, ...]
    left: tuple[tuple[Op, str], ...]


def plan_body(graph: Graph, overlap: Overlap) -> BodyPlan:
    """Matches, asks the gate, starts again without what was refused, until all that is left is accepted."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: mesh.shape[axis] for axis in mesh.manual_axes}
    return _Planner(graph, overlap, sizes).run()


class _Planner:
    def __init__(self, graph: Graph, overlap: Overlap, sizes: Mapping[str, int]) -> None:
        self.graph, self.overlap = graph, overlap
        self.kept: dict[Op, str] = {}  # collectives that stay, with the reason
        self.refused: dict[Op, str] = {}  # products that stay
        self.unsummed: dict[Op, str] = {}  # scatters whose sum of products stays
        self.unscattered: dict[Op, str] = {}  # products whose scatter stays
        self.traced: dict[Any, Call | str] = {}
        self.dots = match.products(graph)
        self.collectives = [op for op in graph.ops if match.is_collective(op)]
        for op in self.collectives:
            if why := match.refusal(op, sizes):
                self.kept[op] = why
        precision = match.default_precision() if self.dots and self.collectives else None
        for dot in self.dots:
            if why := match.product_refusal(dot, precision):
                self.refused[dot] = why
        self.before = _ancestors(graph)

    def run(self) -> BodyPlan:
        if not self.dots or len(self.kept) == len(self.collectives):
            return BodyPlan(self.graph.ops, (), self._left(()))
        grouping = True
        while True:
            forms = find_forms(self.graph, frozenset(self.kept))
            sums = self._sums(forms) if grouping else []
            found = self._sites(forms, {dot for total in sums for dot in total.dots})
            if self._keep_gathers(forms, {*found, *(dot for total in sums for dot in total.dots)}):
                continue
            recipes = [calls_of.summed(total) for total in sums]
            recipes += self._recipes(found) if grouping else [calls_of.several((s[0],)) for s in found.values()]
            calls = [self._trace(recipe) for recipe in recipes]
            if not all(isinstance(call, Call) for call in calls):
                continue
            accepted = [call for call in calls if isinstance(call, Call)]
            if self._keep_shared(accepted):
                continue
            order = _order(self.graph, accepted)
            if order is not None:
                return BodyPlan(tuple(order), tuple(accepted), self._left(accepted))
            # Two calls that each need a result of the other.
            assert grouping
            grouping = False

    def _sums(self, forms: Forms) -> list[Sum]:
        """Scattered sums of products that are part of no pattern by themselves."""
        sums = []
        for op in self.collectives:
            if op.name == "reduce_scatter" and op not in self.kept and op not in self.unsummed:
                try:
                    total = match_sum(op, forms, self.kept)
                except Unsafe as unsafe:
                    self.unsummed[op] = str(unsafe)
                    continue
                if total is not None and not any(dot in self.refused for dot in total.dots):
                    sums.append(total)
        return sums

    def _sites(self, forms: Forms, taken: set[Op]) -> dict[Op, list[Site]]:
        """For every product that is part of a pattern how it can be written: one or both operands may be first."""
        found: dict[Op, list[Site]] = {}
        for dot in self.dots:
            if dot in self.refused or dot in taken:
                continue
            both = [i for i, v in enumerate(dot.inputs) if v in forms] or [0]
            try:
                sites = [self._match(dot, forms, i) for i in both]
            except Unsafe as unsafe:
                self.refused[dot] = str(unsafe)
                continue
            if usable := [site for site in sites if site is not None]:
                found[dot] = usable
        return found

    def _match(self, dot: Op, forms: Forms, shared: int) -> Site | None:
        if dot not in self.unscattered:
            try:
                return match.match(dot, forms, self.kept, shared)
            except Unsafe as unsafe:
                self.unscattered[dot] = str(unsafe)
        return match.match(dot, forms, self.kept, shared, scattered=False)

    def _keep_gathers(self, forms: Forms, found: set[Op]) -> bool:
        """Keeps gathers that something still needs; returns whether there were any."""
        more = False
        for op in self.collectives:
            if op.name in GATHERS and op not in self.kept:
                ends = match.gather_users(op, forms)
                if why := next((why for why in (self._needs(end, found) for _, end in ends) if why), ""):
                    self.kept[op] = why
                    more = True
        return more

    def _needs(self, user: Op | None, found: set[Op]) -> str:
        """Why this user needs a gathered array whole, "" if it does not."""
        if user is None:
            return (
                "its result leaves the function it is in, as it does for a backward pass that does not gather again: "
                "rewrite before differentiating, or use jax.checkpoint"
            )
        if user in found:
            return ""
        if user.name == "dot_general":
            return f"a product that it feeds, {user.place}, stays as it is: {self.refused.get(user, 'no pattern')}"
        return f"its result is used by {user.name}, {user.place}"

    def _recipes(self, found: Mapping[Op, list[Site]]) -> list[Recipe]:
        """Independent products that share an operand become one call: several alike, or two gradients."""
        alike: dict[Any, list[list[Site]]] = {}
        sharing = [site for sites in found.values() for site in sites if site.gathers[0]]
        for site in sharing:
            groups = alike.setdefault(_likeness(site), [])
            for group in groups:
                if not any(self._linked(site, other) for other in group):
                    group.append(site)
                    break
            else:
                groups.append([site])
        recipes: list[Recipe] = []
        done: set[Op] = set()
        for group in sorted((g for groups in alike.values() for g in groups), key=len, reverse=True):
            rest = tuple(site for site in group if site.dot not in done)
            if len(rest) > 1:
                recipes.append(calls_of.several(rest))
                done.update(site.dot for site in rest)
        for one, other in itertools.combinations(sharing, 2):
            pair = self._both(one, other) if done.isdisjoint((one.dot, other.dot)) else None
            if pair is not None:
                recipes.append(pair)
                done.update(pair.dots)
        return recipes + [calls_of.several((sites[0],)) for dot, sites in found.items() if dot not in done]

    def _both(self, one: Site, other: Site) -> Recipe | None:
        if one.dot is other.dot or one.dot.inputs[one.shared] is not other.dot.inputs[other.shared]:
            return None
        if self._linked(one, other):
            return None
        return calls_of.both(one, other)

    def _linked(self, one: Site, other: Site) -> bool:
        index, of = self.before.index, self.before.of
        return bool(of[other.dot] >> index[one.dot] & 1 or of[one.dot] >> index[other.dot] & 1)

    def _trace(self, recipe: Recipe) -> Call | str:
        """Writes the call and asks the gate; what is refused is remembered as a reason of its products."""
        if recipe.key not in self.traced:
            self.traced[recipe.key] = calls_of.trace(recipe, self.overlap)
        call = self.traced[recipe.key]
        if isinstance(call, str):
            if len(recipe.dots) > 1 and len(recipe.values) == 1:
                scatters = (op for op in recipe.inside if op.name == "reduce_scatter")
                self.unsummed.update(dict.fromkeys(scatters, call))
            else:
                self.refused.update(dict.fromkeys(recipe.dots, call))
        return call

    def _keep_shared(self, calls: Sequence[Call]) -> bool:
        """Keeps gathers that several calls would repeat and none would overlap; returns whether there were any."""
        more = False
        for gather in {g for call in calls for g in call.recipe.absorbed if g.name in GATHERS}:
            users = [call for call in calls if gather in call.recipe.absorbed]
            if len(users) > 1 and not any(c.recipe.decomposes(c.decision.plan.slot, gather) for c in users):
                self.kept[gather] = f"the gate overlaps another collective at each of its {len(users)} products"
                more = True
        return more

    def _left(self, calls: Sequence[Call]) -> tuple[tuple[Op, str], ...]:
        absorbed = frozenset().union(*(call.recipe.absorbed for call in calls))
        half = {reduced.gather for reduced in self.graph.reduced}
        return tuple(
            (op, self.kept.get(op) or self._why_scattered(op))
            for op in self.graph.ops
            if match.is_collective(op) and op not in absorbed and op not in half
        )

    def _why_scattered(self, scatter: Op) -> str:
        """Why a scatter was not absorbed, or a gather if there is no product at all."""
        if scatter.name in GATHERS:
            return "its result feeds no product"
        value = scatter.inputs[0]
        while value.producer is not None and value.producer.name in match.SHAPED:
            if match.only_user(value) is None:
                break
            value = value.producer.inputs[0]
        op = value.producer
        if op is None:
            return "what it sums is not computed here"
        if scatter in self.unsummed:
            return self.unsummed[scatter]
        if op.name != "dot_general":
            return f"what it sums comes from {op.name}, {op.place}, not from a product"
        if match.only_user(value) is None:
            return f"the product that it sums, {op.place}, is also used elsewhere"
        return self.refused.get(op) or self.unscattered.get(op, "its product is part of no pattern")


def _likeness(site: Site) -> Any:
    """Equal for products that may be one call."""
    first = site.dot.inputs[site.shared]
    return (first, site.spec, site.shards[0].shape, site.gather, site.scatter, site.out_dtype)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Ancestors:
    index: Mapping[Op, int]
    of: Mapping[Op, int]  # bit i: operation i comes before


def _ancestors(graph: Graph) -> _Ancestors:
    index = {op: i for i, op in enumerate(graph.ops)}
    of: dict[Op, int] = {}
    for op in graph.ops:
        bits = 0
        for value in op.inputs:
            if value.producer is not None:
                bits |= of[value.producer] | 1 << index[value.producer]
        of[op] = bits
    return _Ancestors(index, of)


def _order(graph: Graph, calls: Sequence[Call]) -> list[Node] | None:
    """What is needed, in the order written, except that a call pulls what it reads forward; None for a cycle."""
    owner = {op: call for call in calls for op in call.recipe.inside}

    def needs(node: Node) -> list[Node]:
        read = node.reads if isinstance(node, Call) else node.inputs
        return [owner.get(v.producer, v.producer) for v in read if v.producer is not None]

    wanted: set[Node] = set()
    roots = [v.producer for v in graph.outputs if v.producer is not None]
    roots += [op for op in graph.ops if op.eqn.effects and not match.is_collective(op)]
    stack: list[Node] = [owner.get(op, op) for op in roots]
    while stack:
        node = stack.pop()
        if node not in wanted:
            wanted.add(node)
            stack.extend(needs(node))
    order: list[Node] = []
    state: dict[Node, bool] = {}  # False: being visited
    for op in graph.ops:
        node = owner.get(op, op)
        if node not in wanted or node in state:
            continue
        visiting = [(node, iter(needs(node)))]
        state[node] = False
        while visiting:
            current, rest = visiting[-1]
            following = next((n for n in rest if not state.get(n, False)), None)
            if following is None:
                state[current] = True
                order.append(current)
                visiting.pop()
            elif following in state:
                return None
            else:
                state[following] = False
                visiting.append((following, iter(needs(following))))
    return order
