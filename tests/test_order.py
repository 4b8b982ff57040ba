"""Orders imposed on what is traced: the same values, transfers started and awaited where the scheduler puts them."""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core_harness import check_exact, simulated_mesh, unchecked_annotations
from core_jaxpr import count, equations
from core_patterns import ONE_AXIS, mlp_down, mlp_up
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from overlapfx.aot import variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.compile import compile_for
from overlapfx.aot.hlo import Module, parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.slices import make_slice_mesh, parse_slice
from overlapfx.aot.timeline import Timeline, walk
from overlapfx.config import Overlap
from overlapfx.ops import instructions, order
from overlapfx.ops.collective_einsum import collective_einsum
from overlapfx.ops.order_groups import find_groups
from overlapfx.plan.decide import record_sites
from overlapfx.plan.schedulers.base import DONE, START

SCHEDULERS = ("bottom_up", "top_down")
PERM = [(0, 1), (1, 2), (2, 3), (3, 0)]
needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def settings(**fields: Any) -> dict[str, Overlap]:
    """One variant per scheduler."""
    return {scheduler: Overlap(mode="on", scheduler=scheduler, **fields) for scheduler in SCHEDULERS}


class TestExact:
    """Every decomposition with each scheduler equals the einsum of one device, forward and backward."""

    @pytest.mark.core
    @pytest.mark.parametrize("pattern", ["gather_lhs_contracting", "gather_rhs_free", "scatter_rhs_free"])
    def test_rings(self, pattern: str) -> None:
        variants = {
            f"{direction} {name}": overlap
            for direction in ("one", "two", "two_whole")
            for name, overlap in settings(method="ring", direction=direction).items()
        }
        with unchecked_annotations():
            check_exact(ONE_AXIS[pattern](4, 3, 4), variants)

    @pytest.mark.core
    @pytest.mark.parametrize("make", [mlp_up, mlp_down])
    def test_other_decompositions_on_two_axes(self, make: Any) -> None:
        variants = {
            f"{method} {name}": overlap
            for method in ("stripe", "prefetch", "exchange")
            for name, overlap in settings(method=method).items()
        }
        with unchecked_annotations():
            check_exact(make(2, 4, 2, 3), variants)

    @pytest.mark.core
    def test_loops(self) -> None:  # rings of 16 are loops in the program, whose bodies are ordered
        with unchecked_annotations():
            sites = check_exact(ONE_AXIS["gather_lhs_free"](8, 2, 2), settings(method="ring", direction="one"))
        assert {site.order for site in sites} == {order.describe(scheduler) for scheduler in SCHEDULERS}


def layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """Two rounds of a ring: what is sent is multiplied meanwhile."""
    with jax.named_scope("site"):
        sent = lax.ppermute(x, "x", PERM)
        return jnp.maximum(x @ w, 0.0) + sent @ w


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    """Recomputed layers under scan."""
    body = jax.checkpoint(lambda x, w: (layer(w, x), None))
    out, _ = lax.scan(body, x, w)
    return lax.psum(jnp.sum(out * out), "x")


def gradient(scheduler: str, how: str | None = None) -> Any:
    """Loss with its gradient for the weights [3, 4, 4] of all layers, over 4 devices."""
    fn = order.impose(jax.value_and_grad(loss), scheduler, how)
    return jax.shard_map(fn, mesh=simulated_mesh({"x": 4}), in_specs=(P(), P("x")), out_specs=(P(), P()))


@functools.cache
def arrays() -> tuple[jax.Array, jax.Array]:
    """Integers so small that every sum is exact."""
    rng = np.random.default_rng(0)
    made = [rng.integers(-1, 2, shape).astype(np.float32) for shape in ((3, 4, 4), (8, 4))]
    return jnp.asarray(made[0]), jnp.asarray(made[1])


class TestImpose:
    @pytest.mark.parametrize("how", order.MECHANISMS)
    def test_layers_forward_recomputed_and_backward_bit_for_bit(self, how: str) -> None:
        plain = jax.jit(gradient("compiler"))(*arrays())
        ordered = jax.jit(gradient("bottom_up", how))(*arrays())
        jax.tree.map(np.testing.assert_array_equal, ordered, plain)

    @pytest.mark.parametrize("scheduler", SCHEDULERS)
    def test_every_transfer_is_started_and_awaited(self, scheduler: str) -> None:
        plain = jax.make_jaxpr(gradient("compiler"))(*arrays()).jaxpr
        ordered = jax.make_jaxpr(gradient(scheduler, order.ASYNCHRONOUS))(*arrays()).jaxpr
        sends = count(plain, "ppermute")
        assert sends == 3  # of a layer forward, recomputed, transposed
        assert count(ordered, "ppermute_start") == count(ordered, "ppermute_done") == sends
        assert count(ordered, "ppermute") == 0

    def test_work_stands_between_start_and_done(self) -> None:
        ordered = jax.make_jaxpr(gradient("bottom_up", order.ASYNCHRONOUS))(*arrays()).jaxpr
        names = [eqn.primitive.name for eqn in equations(ordered)]
        begin = names.index("ppermute_start")  # of the forward pass
        assert "dot_general" in names[begin : names.index("ppermute_done")]

    def test_scopes_are_kept_and_not_doubled(self) -> None:
        for scheduler in ("compiler", "bottom_up"):
            text = jax.jit(gradient(scheduler)).lower(*arrays()).as_text(debug_info=True)
            assert "site/" in text
            assert "site/site" not in text

    def test_compiler_and_functions_without_transfers_are_left_alone(self) -> None:
        assert order.impose(loss, "compiler") is loss
        plain = jax.make_jaxpr(lambda x: jnp.tanh(x) @ x)(arrays()[1].T @ arrays()[1])
        ordered = jax.make_jaxpr(order.impose(lambda x: jnp.tanh(x) @ x, "bottom_up"))(arrays()[1].T @ arrays()[1])
        assert str(plain) == str(ordered)

    def test_an_outer_order_includes_the_inner(self) -> None:
        inner = order.impose(jax.value_and_grad(loss), "top_down")
        mesh = simulated_mesh({"x": 4})
        twice = jax.shard_map(
            order.impose(inner, "bottom_up", order.ASYNCHRONOUS),
            mesh=mesh,
            in_specs=(P(), P("x")),
            out_specs=(P(), P()),
        )
        once = jax.make_jaxpr(gradient("bottom_up", order.ASYNCHRONOUS))(*arrays())
        assert count(jax.make_jaxpr(twice)(*arrays()).jaxpr, "optimization_barrier") == count(
            once.jaxpr, "optimization_barrier"
        )

    @pytest.mark.core
    def test_under_vmap(self) -> None:
        def local(x: jax.Array, w: jax.Array, scheduler: str) -> jax.Array:
            overlap = Overlap(mode="on", method="ring", scheduler=scheduler)
            call = functools.partial(collective_einsum, "td,df->tf", lhs_gather={"d": "x"}, overlap=overlap)
            return jax.vmap(lambda x: jax.grad(lambda x: jnp.sum(call(x, w) ** 2))(x))(x)

        x, w = jnp.arange(48.0).reshape(2, 3, 8), jnp.arange(32.0).reshape(8, 4)
        specs = (P(None, None, "x"), P(None, "x"))
        found = [
            jax.jit(
                jax.shard_map(
                    functools.partial(local, scheduler=scheduler),
                    mesh=simulated_mesh({"x": 4}),
                    in_specs=specs,
                    out_specs=specs[0],
                )
            )(x, w)
            for scheduler in ("compiler", "bottom_up")
        ]
        np.testing.assert_array_equal(*found)

    def test_sites_say_who_orders_them_by_what(self) -> None:
        overlap = Overlap(mode="on", method="ring", scheduler="top_down")

        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            return collective_einsum("td,df->tf", x, w, lhs_gather={"d": "x"}, overlap=overlap)

        mesh, specs = simulated_mesh({"x": 4}), (P(None, "x"), P())
        fn = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        with record_sites() as sites:
            jax.eval_shape(fn, jnp.ones((2, 8)), jnp.ones((8, 4)))
        assert sites[0].order == f"top_down by {order.mechanism()}"
        assert f"order top_down by {order.mechanism()}" in sites[0].line()


class TestGroups:
    def ring(self, x: jax.Array, w: jax.Array, unroll: int) -> jax.Array:
        """Two chains, of which one moves while the other computes, or four, whose transfers overlap each other."""
        overlap = Overlap(mode="on", method="ring", direction="two", unroll=unroll)
        return collective_einsum("tf,fd->td", x, w, out_scatter={"d": "x"}, overlap=overlap)

    def ordered(self, call: Any, scheduler: str) -> list[instructions.Step]:
        found: list[instructions.Step] = []

        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            found[:] = order.in_order(jax.make_jaxpr(call)(x, w), scheduler)[1]
            return x

        specs = (P(None, "x"), P("x"))
        fn = jax.shard_map(local, mesh=simulated_mesh({"x": 4}), in_specs=specs, out_specs=specs[0])
        jax.eval_shape(fn, *[jax.ShapeDtypeStruct((4096, 4096), jnp.float32)] * 2)
        return found

    @pytest.mark.parametrize(("scheduler", "unroll"), [("top_down", 1), ("bottom_up", 2)])
    def test_members_are_beside_each_other_and_independent(self, scheduler: str, unroll: int) -> None:
        steps = self.ordered(functools.partial(self.ring, unroll=unroll), scheduler)
        groups = find_groups(steps)
        needs: dict[int, set[int]] = {}  # by identity of a step: groups of the steps that it needs
        maker: dict[int, int] = {}
        for step in steps:
            before = [id(step.start)] if step.start else [maker[r] for r in step.reads() if r in maker]
            needs[id(step)] = {g for b in before for g in (*needs[b], groups.get(b, 0))}
            assert step.kind == DONE or groups.get(id(step), -1) not in needs[id(step)]
            if step.kind != START:
                maker.update(dict.fromkeys(step.start.writes() if step.start else step.writes(), id(step)))
        starts = [step for step in steps if step.kind == START]
        assert len(starts) == 6 * unroll
        for start in starts:
            done = next(i for i, step in enumerate(steps) if step.start is start)
            beside = {groups.get(id(step)) for step in steps[steps.index(start) : done] if step.is_product}
            assert id(start) not in groups or beside == {groups[id(start)]}
        assert len(set(groups.values())) == sum(id(start) in groups for start in starts)
        assert unroll == 2 or len(set(groups.values())) >= 4
        assert not set(groups.values()) & set(find_groups(steps).values()), "numbers of another order"

    def test_products_that_need_each_other_are_in_none(self) -> None:
        def chain(x: jax.Array, w: jax.Array) -> jax.Array:
            far = lax.ppermute(x, "x", PERM)
            for _ in range(3):
                x = x @ w[:, :1024]
            return x + far

        steps = self.ordered(chain, "top_down")
        start = next(i for i, step in enumerate(steps) if step.kind == START)
        done = next(i for i, step in enumerate(steps) if step.kind == DONE)
        assert sum(step.is_product for step in steps[start:done]) >= 2
        assert find_groups(steps) == {}

    def test_groups_are_in_the_program(self) -> None:
        plain, text = (
            jax.jit(gradient(*how)).lower(*arrays()).as_text() for how in (("compiler",), ("bottom_up", order.GROUPS))
        )
        members: dict[str, list[str]] = {}
        for name, number in re.findall(r'stablehlo\.(\w+).*_scheduling_group_id = "(\d+)"', text):
            members.setdefault(number, []).append(name)
        assert members, "some transfer of the two passes has a product beside it"
        assert all({"collective_permute", "dot_general"} == set(names) for names in members.values()), members
        assert text.count("optimization_barrier") == plain.count("optimization_barrier")
        assert "_scheduling_group_id" not in plain


class TestMechanisms:
    def test_the_first_that_there_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert order.mechanism() == order.ASYNCHRONOUS  # on the CPU both versions that we support have it
        monkeypatch.setattr(order.compat, "can_start_transfers", lambda: False)
        assert order.mechanism() == order.BARRIERS
        monkeypatch.undo()
        monkeypatch.setattr(order, "_starters", dict)
        assert order.mechanism() == order.BARRIERS
        monkeypatch.setattr(order.compat, "target_platform", lambda: "tpu")
        assert order.mechanism() == order.BARRIERS
        assert order.describe("top_down", {"all_gather"}) == "top_down by scheduling groups"
        with order._outermost():
            assert order.describe("top_down", {"all_gather"}) == "top_down by optimization barriers"
        assert "ppermute" in order.why_not(order.GROUPS, ("ppermute", "all_gather"))
        assert order.describe("compiler") == "compiler"
        assert order.describe("top_down") == "top_down by optimization barriers"


class TestInstructions:
    def graph(self) -> tuple[list[instructions.Step], Any]:
        def local(w: jax.Array, x: jax.Array) -> jax.Array:
            closed = jax.make_jaxpr(layer)(w, x)
            flat = instructions.flatten(closed)
            steps = instructions.group(flat)
            self.found = steps, instructions.make_graph(flat, steps, instructions.Rates(1e6, 1e6, 1e6, 0.5))
            return layer(w, x)

        w, x = arrays()
        jax.eval_shape(
            jax.shard_map(local, mesh=simulated_mesh({"x": 4}), in_specs=(P(), P("x")), out_specs=P("x")), w[0], x
        )
        return self.found

    def test_a_sum_joins_the_product_that_can_wait_for_the_transfer(self) -> None:
        steps, _ = self.graph()
        long = [[op.eqn.primitive.name for op in step.operations] for step in steps if step.is_long]
        assert long == [["dot_general", "max"], ["dot_general", "add"]]

    def test_costs(self) -> None:
        _, graph = self.graph()
        start = next(node for node in graph.nodes if node.kind == START)
        done = next(node for node in graph.nodes if node.kind == DONE)
        assert start.loads == ((0, 2 * 4 * 4 / 1e6),)  # 2 rows of 4 float32 over one link
        assert (start.latency_s, start.size_bytes) == (0.5, 32)
        assert graph.nodes[done.operands[0]] is start
        products = [node for node in graph.nodes if node.name == "dot_general"]
        # 32 + 64 bytes in, 32 out, against 64 FLOP; the first also reads a zero, the second what the first has made.
        assert [round(node.seconds * 1e6) for node in products] == [32 + 64 + 32 + 4, 32 + 64 + 32 + 32]


@pytest.mark.slow
@needs_compiler
class TestCompiled:
    """An Einsum-ReduceScatter ring compiled for four TPU v4 chips: where its starts and dones stand in the text."""

    def compiled(self, scheduler: str) -> tuple[Module, Timeline, str]:
        """The program, its time line, who orders it by what means."""
        topology = parse_slice("v4:2x2x1")
        mesh, _ = make_slice_mesh(topology, {"x": 4})
        overlap = Overlap(mode="on", method="ring", direction="two", unroll=1, scheduler=scheduler)
        call = functools.partial(collective_einsum, "tf,fd->td", out_scatter={"d": "x"}, overlap=overlap)
        specs = (P(None, "x"), P("x", None))
        arguments = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(((4096, 32768), (32768, 8192)), specs, strict=True)
        ]
        fn = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=specs[0])
        with record_sites() as sites:
            made = compile_for(topology, fn, arguments, variants.OURS.options)
        module = parse_module(made.text)
        line = walk(lower(module), topology.torus, made.coords, Assumptions.for_chip(topology.chip))
        return module, line, sites[0].order

    @pytest.mark.parametrize("scheduler", SCHEDULERS)
    def test_work_stands_beside_every_transfer(self, scheduler: str) -> None:
        module, line, by = self.compiled(scheduler)
        steps = module.computations[module.entry].instructions
        starts = [i for i, step in enumerate(steps) if step.opcode == "collective-permute-start"]
        assert len(starts) == 6  # three hops each way
        beside = []
        for i in starts:
            done = next(k for k in range(i, len(steps)) if steps[k].operands == (steps[i].name,))
            assert steps[done].opcode == "collective-permute-done"
            products = [step for step in steps[i:done] if step.opcode == "fusion" and "dot_general" in step.op_name]
            beside.append(bool(products))
        # Barriers alone hold the order of the products; then the compiler places starts and dones as it likes.
        assert all(beside) if order.ASYNCHRONOUS in by else any(beside), by
        assert beside.count(True) == sum(t.is_overlapped for t in line.transfers if t.medium == "ici")
