"""Walking a schedule: small programs whose times are worked out by hand, then programs that the compiler made."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.hlo import parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.program import Blocking, Branch, Compute, Loop, Program, Start, Transfer, Wait
from overlapfx.aot.slices import FAMILIES, parse_slice
from overlapfx.aot.timeline import CATEGORIES, walk
from overlapfx.chips import H100, TPU_7X, TPU_V4, TPU_V6E
from overlapfx.plan.placement import place
from overlapfx.plan.torus import Torus

DATA = pathlib.Path(__file__).parent / "data"
RING = Torus((4,), (True,))
# One cycle is one microsecond, one byte over one link too, so that times can be read off.
UNIT = Assumptions.for_chip(
    TPU_V4,
    clock_hz=1e6,
    link_bytes_per_s=1e6,
    hop_latency_s=1e-9,
    hbm_bytes_per_s=1e6,
    peak_flops=1e6,
    kernel_efficiency=1.0,
    dcn_bytes_per_s=1e6,
)
US = 1e-6


def compute(cycles, name="work", kind="einsum", op_name="step/einsum"):
    return Compute(name, op_name, kind, cycles, 0.0, 0.0)


def permute(name, num_bytes, shift=1, size=4):
    pairs = tuple((i, (i + shift) % size) for i in range(size))
    return Transfer(name, f"ring/{name}", "collective-permute", "ici", num_bytes, pairs=pairs)


def collective(name, kind, num_bytes, size=4):
    return Transfer(name, f"step/{name}", kind, "ici", num_bytes, groups=(tuple(range(size)),))


def run(*steps, torus=RING, assumptions=UNIT, coords=None):
    program = Program("p", tuple(steps), torus.num_devices, {}, {})
    timeline = walk(program, torus, coords or torus.coordinates(), assumptions)
    assert sum(timeline.ledger.values()) == pytest.approx(timeline.total_s)
    assert {category for category, _, _ in timeline.ledger} <= set(CATEGORIES)
    return timeline


def stored(name, topology, axes, **overrides):
    target = parse_slice(topology)
    program = lower(parse_module((DATA / f"{name}.txt").read_text()))
    placement = place(target.torus, axes)
    return walk(program, target.torus, placement.order, Assumptions.for_chip(target.chip, **overrides))


class TestByHand:
    def test_work_hides_a_permute(self):
        t = run(Start(permute("a", 30)), compute(50), Wait("a", "a.done"))
        assert t.total_s == pytest.approx(50 * US)
        assert t.exposed_s == 0
        (transfer,) = t.transfers
        assert (transfer.count, transfer.is_overlapped) == (1, True)
        assert transfer.work_s == pytest.approx(50 * US)
        assert transfer.transfer_s == pytest.approx(30 * US, rel=1e-3)

    def test_rest_of_a_permute_is_exposed(self):
        t = run(Start(permute("a", 80)), compute(50), Wait("a", "a.done"), compute(5, "after"))
        assert t.total_s == pytest.approx(85 * US, rel=1e-3)
        assert t.exposed_s == pytest.approx(30 * US, rel=1e-3)
        assert t.by_kind("exposed") == {"collective-permute": t.exposed_s}
        assert t.communication_share == pytest.approx(30 / 85, rel=1e-3)

    def test_nothing_between_start_and_done(self):
        t = run(compute(7), Start(permute("a", 10)), Wait("a", "a.done"))
        assert not t.transfers[0].is_overlapped

    def test_same_direction_queues_other_direction_does_not(self):
        same = run(Start(permute("a", 10)), Start(permute("b", 10)), Wait("a", ""), Wait("b", ""))
        assert same.total_s == pytest.approx(20 * US, rel=1e-3)
        both = run(Start(permute("a", 10)), Start(permute("b", 10, shift=-1)), Wait("a", ""), Wait("b", ""))
        assert both.total_s == pytest.approx(10 * US, rel=1e-3)

    def test_every_hop_costs_latency_and_bandwidth(self):
        slow = UNIT.replace(hop_latency_s=1e-6)
        near = run(Blocking(permute("a", 10)), assumptions=slow)
        assert near.total_s == pytest.approx(11 * US)
        # Two hops: every link carries the shards of two senders.
        far = run(Blocking(permute("a", 10, shift=2)), assumptions=slow)
        assert far.total_s == pytest.approx(22 * US)

    def test_order_of_devices_decides_the_price(self):
        good = run(Blocking(permute("a", 10)))
        shuffled = run(Blocking(permute("a", 10)), coords=[(0,), (2,), (1,), (3,)])
        assert shuffled.total_s > 1.9 * good.total_s

    @pytest.mark.parametrize(
        ("kind", "passes"),
        [("all-gather", 3 / 8), ("reduce-scatter", 3 / 8), ("all-reduce", 6 / 8), ("all-to-all", 1 / 2)],
    )
    def test_blocking_collective_on_a_closed_ring(self, kind, passes):
        t = run(compute(3), Blocking(collective("c", kind, 800)))
        assert t.blocking_s == pytest.approx(passes * 800 * US, rel=1e-3)
        assert t.by_kind("blocking") == {kind: t.blocking_s}

    def test_collective_waits_for_the_links_that_a_permute_holds(self):
        t = run(Start(permute("a", 100)), Blocking(collective("c", "all-gather", 80)), Wait("a", ""))
        assert t.blocking_s == pytest.approx(130 * US, rel=1e-3)

    def test_work_without_an_estimate(self):
        kernel = Compute("k", "", "kernel", None, num_flops=9.0, num_bytes=4.0)
        t = run(kernel, Compute("c", "", "other", None, 0.0, num_bytes=5.0))
        assert t.by_kind("compute") == pytest.approx({"kernel": 9 * US, "other": 5 * US})
        t = run(kernel, assumptions=UNIT.replace(kernel_efficiency=0.25))
        assert t.by_kind("compute") == pytest.approx({"kernel": 36 * US})

    def test_copies_and_slices_have_their_own_queue_and_their_own_account(self):
        copy = Transfer("copy", "", "copy", "memory", 20)
        between = Transfer("sum", "", "all-reduce", "dcn", 40, num_slices=4)
        t = run(Start(copy), Start(between), Start(permute("a", 5)), Wait("a", ""), Wait("copy", ""), Wait("sum", ""))
        assert t.exposed_s == pytest.approx(5 * US, rel=1e-3)
        assert t.seconds("memory") == pytest.approx(15 * US, rel=1e-3)
        assert t.seconds("dcn") == pytest.approx((2 * 3 / 4 * 40 - 20 + 10) * US, rel=1e-3)
        assert t.communication_s == pytest.approx(t.exposed_s + t.seconds("dcn"))

    def test_longest_branch_is_walked(self):
        t = run(Branch("if", ((compute(3),), (compute(9), compute(1, "more")), ())))
        assert t.total_s == pytest.approx(10 * US)

    def test_scopes(self):
        t = run(
            compute(3, op_name="optimizer/adam"), compute(4, "w2", op_name="layer/einsum"), Blocking(permute("a", 5))
        )
        assert t.in_scope(r"^optimizer/") == pytest.approx(3 * US)
        assert t.in_scope("ring") == pytest.approx(5 * US, rel=1e-3)

    def test_ends_without_starts_and_starts_without_ends_are_counted(self):
        t = run(Wait("ghost", "ghost.done"), Start(permute("a", 5)))
        assert t.unknown == {"wait for a transfer whose start was not found": 1, "transfer that nothing waits for": 1}

    def test_both_ends_of_an_exchange_wait_for_it_once(self):
        t = run(Start(permute("a", 5)), Wait("a", "send-done"), Wait("a", "recv-done"))
        assert not t.unknown
        assert t.transfers[0].count == 1

    def test_too_few_coordinates(self):
        with pytest.raises(ValueError, match="runs on 4 devices but 2 coordinates"):
            run(compute(1), coords=[(0,), (1,)])


steps_in_a_body = st.lists(
    st.one_of(
        st.integers(1, 40).map(lambda c: ("compute", c)),
        st.tuples(st.just("permute"), st.integers(1, 60), st.sampled_from([1, -1])),
        st.tuples(st.just("gather"), st.integers(1, 60)),
    ),
    min_size=1,
    max_size=6,
)


class TestLoops:
    def body(self, recipe):
        """Permutes start in order, each is waited for two steps later or at the end."""
        steps, waiting = [], []
        for number, item in enumerate(recipe):
            if item[0] == "compute":
                steps.append(compute(item[1], f"w{number}"))
            elif item[0] == "permute":
                steps.append(Start(permute(f"p{number}", item[1], item[2])))
                waiting.append(Wait(f"p{number}", f"p{number}.done"))
            else:
                steps.append(Blocking(collective(f"g{number}", "all-gather", item[1])))
            if len(waiting) > 1:
                steps.append(waiting.pop(0))
        return (*steps, *waiting)

    @settings(max_examples=20)
    @given(steps_in_a_body, st.integers(0, 20))
    def test_multiplied_iterations_are_like_walked_ones(self, recipe, trips):
        body = self.body(recipe)
        short = run(Loop("loop", "", trips, body), compute(2, "end"))
        long = run(*(body * trips), compute(2, "end"))
        assert short.total_s == pytest.approx(long.total_s, rel=1e-4)
        for category in CATEGORIES:
            assert short.seconds(category) == pytest.approx(long.seconds(category), rel=1e-4, abs=1e-9)
        for a, b in zip(short.transfers, long.transfers, strict=True):
            assert (a.count, a.exposed_s, a.work_s) == pytest.approx(
                (b.count, b.exposed_s, b.work_s), rel=1e-4, abs=1e-9
            )

    def test_transfer_in_flight_across_a_loop(self):
        loop = Loop("loop", "", 100, (compute(1),))
        hidden = run(Start(permute("a", 60)), loop, Wait("a", ""), Blocking(permute("b", 10)))
        assert hidden.exposed_s == 0
        assert hidden.total_s == pytest.approx(110 * US, rel=1e-3)
        assert hidden.transfers[0].work_s == pytest.approx(100 * US)
        seen = run(Start(permute("a", 160)), loop, Wait("a", ""), Blocking(permute("b", 10)))
        assert seen.exposed_s == pytest.approx(60 * US, rel=1e-3)
        queued = run(Start(permute("a", 160)), loop, Blocking(permute("b", 10)), Wait("a", ""))
        assert queued.total_s == pytest.approx(170 * US, rel=1e-3)

    def test_only_a_few_iterations_are_walked(self):
        t = run(Loop("loop", "", 142, (compute(3), Blocking(permute("a", 5)))))
        (repeat,) = [event for event in t.events if event.category == "repeat"]
        assert repeat.trips == 140
        assert repeat.end_s == pytest.approx(t.total_s)
        assert len(t.events) < 12

    def test_nested(self):
        inner = Loop("inner", "", 10, (compute(2),))
        t = run(Loop("outer", "", 5, (inner, compute(3, "tail"))))
        assert t.total_s == pytest.approx(5 * 23 * US)

    def test_unknown_count_is_walked_once(self):
        assert run(Loop("loop", "", None, (compute(3),))).total_s == pytest.approx(3 * US)


class TestCompiledPrograms:
    """Figures published for these programs by an independent reader of the same compiler's output, in milliseconds."""

    @pytest.mark.slow  # 512 devices under checked annotations
    def test_mlp_with_blocking_collectives(self):
        t = stored("v4_mlp_blocking", "v4:8x8x8", {"y": 64, "x": 8})
        assert t.total_s * 1e3 == pytest.approx(93.4, abs=0.05)
        assert t.compute_s * 1e3 == pytest.approx(69.5, abs=0.05)
        assert t.blocking_s * 1e3 == pytest.approx(23.8, abs=0.05)
        assert not t.unknown

    @pytest.mark.slow
    def test_einsum_and_reduce_scatter(self):
        t = stored("v4_einsum_reduce_scatter", "v4:8x8x8", {"y": 64, "x": 8})
        assert t.total_s * 1e3 == pytest.approx(45.9, abs=0.05)
        assert t.blocking_s * 1e3 == pytest.approx(10.4, abs=0.05)

    def test_faster_links_cost_less(self):
        base = stored("v4_scan_ring", "v4:2x2x2", {"y": 2, "x": 4})
        slower = stored("v4_scan_ring", "v4:2x2x2", {"y": 2, "x": 4}, link_bytes_per_s=45e9 * 0.8)
        faster = stored("v4_scan_ring", "v4:2x2x2", {"y": 2, "x": 4}, link_bytes_per_s=45e9 * 1.25)
        assert slower.communication_s > base.communication_s > faster.communication_s
        assert slower.compute_s == base.compute_s == faster.compute_s

    def test_rows_are_the_links_of_the_watched_device(self):
        t = stored("v4_scan_ring", "v4:2x2x2", {"y": 2, "x": 4})
        assert t.rows == ("compute", "X+", "Y+", "Z+", "memory")
        for row in t.rows:
            spans = sorted((e.start_s, e.end_s) for e in t.events if e.row == row and e.category != "repeat")
            assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans)), row

    def test_other_chips(self):
        fused = stored("v5e_scan_async_fusions", "v5e:4x4", {"y": 4, "x": 4})
        assert fused.transfers[0].is_overlapped
        assert {t.kind for t in fused.transfers if t.medium == "ici"} == {"all-gather"}
        offloaded = stored("tpu7x_offloaded_gather", "tpu7x:2x2x4", {"y": 16, "x": 2})
        assert offloaded.exposed_s > 0
        slices = stored("v4_two_slices", "v4:2x2x2", {"y": 4, "x": 2})
        assert slices.seconds("dcn") > 0
        assert not fused.unknown and not offloaded.unknown and not slices.unknown


class TestRepeated:
    def test_counts_what_the_compiler_does_again(self):
        again = ("fusion.7.remat", "fusion.7.remat2", "gather.1.remat.3")
        once = ("fusion.7", "rematted_computation.4", "fusion.remate")
        t = run(*(compute(10, name) for name in (*again, *once)))
        assert t.repeated_s == pytest.approx(30 * US)
        gather = Blocking(collective("all_gather.2.remat", "all-gather", 100))
        assert run(gather, compute(10)).repeated_s == run(gather).total_s > 0


class TestAssumptions:
    def test_every_figure_has_a_source(self):
        fields = {field.name for field in dataclasses.fields(Assumptions)} - {"sources"}
        # The link between two devices of a chip is there only where a chip has two.
        for chip, missing in ((TPU_V4, {"core_links"}), (TPU_V6E, {"core_links"}), (TPU_7X, set())):
            rows = Assumptions.for_chip(chip).rows()
            assert {name for name, _, _, _ in rows} == fields - missing
            assert all(value > 0 and source for _, value, _, source in rows)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_figure_can_be_replaced(self, family):
        topology = parse_slice(f"{family}:{FAMILIES[family].named[-1]}")
        for name, value, _, _ in Assumptions.for_slice(topology).rows():
            wanted = 1 - value if name == "permute_wrap" else value / 2
            given = Assumptions.for_slice(topology, **{name: wanted})
            assert (name, wanted, "given by the user") in [(n, v, source) for n, v, _, source in given.rows()]

    def test_network_follows_the_figures(self):
        v5e = parse_slice("v5e:8x16")
        network = Assumptions.for_slice(v5e).network(v5e)
        assert network == v5e.torus
        assert (network.wrap, network.permute_wrap) == ((False, True), False)
        given = Assumptions.for_slice(v5e, wrap_multiple=8, permute_wrap=1).network(v5e)
        assert (given.wrap, given.permute_wrap) == ((True, True), True)
        tpu7x = parse_slice("tpu7x:4x4x4")
        assert Assumptions.for_slice(tpu7x).network(tpu7x) == tpu7x.torus
        assert Assumptions.for_slice(tpu7x, core_links=3).network(tpu7x).core_speed == 3

    def test_overrides_say_so(self):
        given = Assumptions.for_chip(TPU_V4, link_bytes_per_s=50e9)
        assert given.sources["link_bytes_per_s"] == "given by the user"
        assert given.link_bytes_per_s == 50e9
        assert given.clock_hz == 1.05e9
        half = given.with_link_factor(0.5)
        assert half.link_bytes_per_s == 25e9
        assert half.sources["link_bytes_per_s"] == "0.5 x given by the user"

    def test_unpublished_clock_follows_from_the_peak(self):
        assert Assumptions.for_chip(TPU_V6E).clock_hz == pytest.approx(918e12 / (4 * 256 * 256 * 2))
        assert "assumed" in Assumptions.for_chip(TPU_V6E).sources["clock_hz"]
        # Two devices per chip share its memory, but not the links.
        assert Assumptions.for_chip(TPU_7X).peak_flops == TPU_7X.peak_bf16_flops / 2
        assert Assumptions.for_chip(TPU_7X).link_bytes_per_s == TPU_7X.link_bytes_per_s

    def test_wrong_overrides(self):
        with pytest.raises(ValueError, match="no assumption is called 'speed'"):
            Assumptions.for_chip(TPU_V4, speed=1.0)
        with pytest.raises(ValueError, match="link_bytes_per_s=0 must be positive and finite"):
            Assumptions.for_chip(TPU_V4, link_bytes_per_s=0)
        with pytest.raises(ValueError, match="kernel_efficiency=30 is a part of the peak"):
            Assumptions.for_chip(TPU_V4, kernel_efficiency=30)
        with pytest.raises(ValueError, match="permute_wrap=0.5 is a switch"):
            Assumptions.for_chip(TPU_V4, permute_wrap=0.5)
        with pytest.raises(ValueError, match="H100"):
            Assumptions.for_chip(H100)
