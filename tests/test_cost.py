"""The gate: predicted seconds of every way to run a site, by hand and against what compiled programs took."""

from __future__ import annotations

import dataclasses

import pytest

from overlapfx.chips import TPU_V4, TPU_V5P
from overlapfx.config import Overlap
from overlapfx.plan import cost, decide, pattern
from overlapfx.plan.cost import AxisLinks, Environment, Pricing, Work
from overlapfx.plan.pattern import Operand, Result
from overlapfx.plan.prices import PRICES
from overlapfx.plan.slots import Slot, find_slots

V4 = PRICES["TPU v4"]


def down(
    rows: int, features: int, width: int, num_x: int, num_stripes: int = 1, accum_bytes: int = 4
) -> tuple[Work, tuple[Slot, ...], dict[tuple[str, int], dict[str, int]]]:
    """The narrowing product of an MLP on one device, its result scattered over x; float32 unless said otherwise."""
    problem = pattern.forward(Operand("tf"), Operand("fd"), Result("td", (("d", ("x",)),)), 1)
    sizes = {0: {"t": rows, "f": features, "d": width}}
    slots = find_slots(problem, [(rows, features), (features, width)], [2, 2], sizes, {"x": num_x}, accum_bytes)
    return Work(problem, sizes, frozenset({1}), num_stripes), slots, {("scatter", 0): sizes[0]}


def gather(
    rows: int, depth: int, width: int, num_shards: int, early: bool, num_stripes: int = 1
) -> tuple[Work, tuple[Slot, ...], dict[tuple[str, int], dict[str, int]]]:
    """A product whose left operand is gathered along the contracted label."""
    problem = pattern.forward(Operand("td", (("d", ("x",)),)), Operand("df"), Result("tf"), 1)
    sizes = {0: {"t": rows, "d": depth, "f": width}}
    shapes = [(rows, depth // num_shards), (depth, width)]
    slots = find_slots(problem, shapes, [2, 2], sizes, {"x": num_shards}, 4)
    work = Work(problem, sizes, frozenset({0} if early else ()), num_stripes)
    return work, slots, {("gather", 0): {"t": rows, "d": depth}}


def test_whole_is_arithmetic_plus_what_nothing_hides() -> None:
    work, slots, _ = down(32768, 8192, 16384, 8)
    compute = 2 * 32768 * 8192 * 16384 / 275e12 * V4.columns[16384]
    native = 7 * 32768 * 2048 * 4 / (2 * 45e9) + 4e-6
    assert Pricing(work, slots, Environment()).whole() == pytest.approx(compute + native)
    # An operand known early is gathered beside earlier work, one that is not waits, less with more row stripes.
    moved = 3 * 4096 * 1024 * 2 / (2 * 45e9) + 2e-6
    for early, stripes, exposed in ((True, 1, 0.0), (False, 1, moved), (False, 4, moved / 4)):
        work, slots, _ = gather(4096, 4096, 4096, 4, early, stripes)
        pricing = Pricing(work, slots, Environment())
        assert pricing.whole() == pytest.approx(pricing.compute_s + exposed)


def test_links_and_hops_come_from_the_environment() -> None:
    work, slots, _ = down(32768, 8192, 16384, 8)
    near = Pricing(work, slots, Environment(TPU_V4, {"x": AxisLinks(native=4, ring_load=1, hops=1)}))
    far = Pricing(work, slots, Environment(TPU_V4, {"x": AxisLinks(native=1, ring_load=2, hops=2)}))
    assert far.native(slots[0]) == pytest.approx(4 * near.native(slots[0]), rel=1e-3)
    assert far.ring(slots[0], "two") == pytest.approx(2 * near.ring(slots[0], "two"), rel=1e-2)
    with cost.pricing(Environment(TPU_V4, {"x": AxisLinks(hops=3)})), cost.pricing(Environment()):
        assert cost.environment().links(("x",)).hops == 3, "what an outer block said holds"
    assert cost.environment() == Environment()


def test_widths_between_the_priced_ones() -> None:
    pricing = Pricing(*down(4096, 4096, 4096, 4)[:2], Environment())
    between = pricing._ratio(768)
    assert min(V4.columns[640], V4.columns[1024]) < between < max(V4.columns[640], V4.columns[1024])
    # Narrower than a tile costs as much as the tile.
    assert pricing._ratio(64) == pytest.approx(2 * V4.columns[128])
    assert pricing._ratio(100_000) == V4.columns[max(V4.columns)]


@pytest.mark.parametrize(
    ("direction", "unroll", "compiled_ms"), [("two", 1, 43.34), ("two", 2, 38.03), ("two_whole", 2, 43.38)]
)
def test_rings_of_accumulators_against_compiled_programs(direction: str, unroll: int, compiled_ms: float) -> None:
    """32768 x 8192 by 8192 x 16384 scattered over 8, float32: time lines of programs compiled for v4:8x8x8."""
    work, slots, _ = down(32768, 8192, 16384, 8)
    predicted = Pricing(work, slots, Environment()).decomposed(slots[0], "ring", direction, unroll, 1)
    assert predicted * 1e3 == pytest.approx(compiled_ms, rel=0.15)


@pytest.mark.parametrize(
    ("shape", "num_stripes", "direction", "unroll", "compiled_ms"),
    [
        ((32768, 8192, 8192, 4), 8, "one", 1, 18.1),  # mlp.down of 32B
        ((32768, 8192, 16384, 8), 8, "one", 1, 36.0),  # of 256B
        ((32768, 2048, 16384, 8), 8, "two", 2, 13.0),  # attention.out of 256B
        ((32768, 5120, 20480, 16), 4, "two", 1, 30.7),  # mlp.down of 512B, in pieces of 640 columns
        ((32768, 1280, 20480, 16), 4, "two", 1, 14.8),  # attention.out of 512B
    ],
)
def test_rings_beside_row_stripes_against_compiled_steps(
    shape: tuple[int, int, int, int], num_stripes: int, direction: str, unroll: int, compiled_ms: float
) -> None:
    """bfloat16 sums; time lines of whole steps on TPU v4, per layer, waiting included."""
    rows, *rest = shape
    work, slots, _ = down(rows // num_stripes, *rest, num_stripes, accum_bytes=2)
    one = Pricing(work, slots, Environment()).decomposed(slots[0], "ring", direction, unroll, 1)
    assert num_stripes * one * 1e3 == pytest.approx(compiled_ms, rel=0.06)


def test_beside_row_stripes_one_chain_each_way_is_enough() -> None:
    """attention.out of 256B: with unroll 2 its forward pass took 1.9 ms longer, in twice as many pieces."""
    work, slots, sizes = down(4096, 2048, 16384, 8, num_stripes=8, accum_bytes=2)
    plan, ways = decide.choose(slots, Overlap(), sizes, work)
    assert (plan.direction, plan.unroll) == ("two", 1)
    assert next(way for way in ways if (way.direction, way.unroll) == ("two", 2)).seconds > plan.seconds


def test_uneven_halves_take_as_long_as_the_larger() -> None:
    work, slots, _ = down(8192, 1024, 9 * 128 * 16, 16)  # five registers one way, four the other
    pricing = Pricing(work, slots, Environment())
    assert pricing.ring(slots[0], "two") == pytest.approx(pricing.ring(slots[0], "one") * 5 / 9, rel=1e-2)


def test_the_gate_takes_the_best_of_them() -> None:
    work, slots, sizes = down(32768, 8192, 16384, 8)
    plan, ways = decide.choose(slots, Overlap(), sizes, work)
    assert (plan.method, plan.direction, plan.unroll) == ("ring", "two", 2)
    assert ways[0].seconds == plan.seconds < Pricing(work, slots, Environment()).whole()
    # With a slow network beside fast arithmetic a decomposition still pays; with hardly any arithmetic it does not.
    work, slots, sizes = down(256, 128, 16384, 8)
    plan, _ = decide.choose(slots, Overlap(), sizes, work)
    assert plan.slot is None
    assert decide.choose(slots, Overlap(mode="on"), sizes, work)[0].slot == slots[0]


def test_a_very_large_ring_is_left_whole() -> None:
    """The weight gradient of 1024B over 256 devices took five times its arithmetic in 256 pieces."""
    work, slots, sizes = down(16384, 16384, 24576, 256)
    assert decide.choose(slots, Overlap(), sizes, work)[0].slot is None


def test_early_operands_are_left_to_the_compiler() -> None:
    work, slots, sizes = gather(32768, 8192, 8192, 16, early=True)
    assert decide.choose(slots, Overlap(), sizes, work)[0].slot is None
    # A dependent one is cut into stripes, unless other row stripes hide it.
    plan, _ = decide.choose(*_args(gather(32768, 8192, 8192, 16, early=False)))
    assert plan.method == "stripe"
    plan, _ = decide.choose(*_args(gather(32768, 8192, 8192, 4, early=False, num_stripes=4)))
    assert plan.slot is None


def _args(site: tuple[Work, tuple[Slot, ...], dict[tuple[str, int], dict[str, int]]]) -> tuple:
    work, slots, sizes = site
    return slots, Overlap(), sizes, work


def test_twins_share_a_plan() -> None:
    a = Slot("scatter", 0, "d", ("x",), 4, 8, 100)
    same, other = dataclasses.replace(a, index=1, wire_bytes=50), dataclasses.replace(a, index=2, shard_size=4)
    assert cost.twins(a, [a, same, other]) == (same,)
    assert cost.twins(dataclasses.replace(a, kind="gather"), [a, same]) == ()


@pytest.mark.parametrize("early", [True, False])
def test_a_gather_that_blocks_is_paid_in_full(early: bool) -> None:
    work, slots, sizes = gather(32768, 8192, 8192, 4, early, num_stripes=4)
    assert TPU_V4.async_all_gather and not TPU_V5P.async_all_gather
    pricing = Pricing(work, slots, Environment(TPU_V5P))
    assert pricing.whole() == pytest.approx(pricing.compute_s + pricing.native(slots[0]))
    assert pricing.decomposed(slots[0], "stripe", "one", 1, 4) > pricing.whole()
    with cost.pricing(Environment(TPU_V5P)):
        plan, _ = decide.choose(slots, Overlap(), sizes, work)
    assert plan.method in ("ring", "prefetch") and plan.seconds < pricing.whole()


SPANS = {"y": AxisLinks(native=4, members=(1, 4, 4)), "x": AxisLinks(native=2, members=(4, 1, 1))}
SPLIT = {"y": AxisLinks(native=3, members=(1, 4, 2)), "x": AxisLinks(native=3, members=(4, 1, 2))}


@pytest.mark.parametrize(("axes", "summed"), [(SPANS, True), (SPLIT, True), ({**SPANS, "x": SPLIT["y"]}, False)])
def test_groups_in_three_dimensions_are_summed(axes: dict[str, AxisLinks], summed: bool) -> None:
    where = Environment(TPU_V4, axes)
    assert not where.links(("y",)).is_summed and not where.links(("x",)).is_summed
    assert where.links(("y", "x")).is_summed == summed
    assert not Environment().links(("y", "x")).is_summed


@pytest.mark.parametrize("early", [True, False])
def test_an_all_gather_that_is_an_all_reduce_hides_nowhere(early: bool) -> None:
    """FSDP over a whole 4x4x4 slice: 8192 x 32768 weights gathered take 3.9 ms of AllReduce and 2.2 ms of zeros."""
    work, slots, _ = gather(4096, 8192, 32768, 64, early)
    problem = pattern.forward(Operand("td"), Operand("df", (("d", ("y", "x")),)), Result("tf"), 1)
    slots = find_slots(problem, [(4096, 8192), (128, 32768)], [2, 2], work.sizes, {"y": 16, "x": 4}, 4)
    work = dataclasses.replace(work, problem=problem, early=frozenset({1} if early else ()))
    pricing = Pricing(work, slots, Environment(TPU_V4, SPANS))
    assert pricing.whole() == pytest.approx(pricing.compute_s + pricing.native(slots[0]))
    assert pricing.native(slots[0]) * 1e3 == pytest.approx(3.9 + 2.2, rel=0.15)
    assert pricing.decomposed(slots[0], "stripe", "one", 1, 4) > pricing.whole()
    scatter = dataclasses.replace(slots[0], kind="scatter")
    assert pricing.native(scatter) * 1e3 == pytest.approx(3.93, rel=0.02)
