"""The torus against an independent picture of it: an explicit graph searched breadth first, loads counted by pair."""

from __future__ import annotations

import collections
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapfx.aot.slices import FAMILIES, parse_slice
from overlapfx.chips import H100, TPU_V4, TPU_V5E
from overlapfx.plan.placement import axis_groups, place
from overlapfx.plan.torus import Torus, collective_traffic, group_spans, native_links, permute_traffic

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def tori(draw):
    shape = draw(shapes)
    wrap = tuple(draw(st.booleans()) for _ in shape)
    return Torus(shape, wrap, draw(st.sampled_from([1, 2])))


def neighbours(torus, device):
    """Devices one link away, written down without the code under test."""
    found = set()
    for dim, size in enumerate(torus.shape):
        for sign in (1, -1):
            position = device[dim] + sign
            if torus.wrap[dim] and size > 2:
                position %= size
            if 0 <= position < size:
                found.add((*device[:dim], position, *device[dim + 1 :]))
    if torus.cores == 2:
        found.add((*device[:-1], 1 - device[-1]))
    return found


def distances(torus, start):
    """Hops from `start` to every device, by breadth-first search."""
    reached = {start: 0}
    queue = collections.deque([start])
    while queue:
        here = queue.popleft()
        for there in neighbours(torus, here):
            if there not in reached:
                reached[there] = reached[here] + 1
                queue.append(there)
    return reached


def ring_steps(placement, axis):
    """Hops of every step of every ring of an axis, by search."""
    known = {}
    for group in placement.groups(axis):
        for a, b in zip(group, [*group[1:], group[0]], strict=True):
            if a not in known:
                known[a] = distances(placement.torus, a)
            yield known[a][b]


class TestTorus:
    @given(tori())
    def test_distance_is_the_shortest_way(self, torus):
        devices = torus.coordinates()
        assert len(devices) == torus.num_devices
        start = devices[len(devices) // 2]
        for device, hops in distances(torus, start).items():
            assert torus.distance(start, device) == hops

    @given(tori(), st.data())
    def test_route_walks_links_from_source_to_target(self, torus, data):
        devices = torus.coordinates()
        src, dst = data.draw(st.sampled_from(devices)), data.draw(st.sampled_from(devices))
        here = src
        for chip, dim, sign in torus.route(src, dst):
            assert chip == here[: len(torus.shape)]
            moved = list(here)
            moved[dim] = (moved[dim] + sign) % torus.sizes[dim]
            assert tuple(moved) in neighbours(torus, here)
            here = tuple(moved)
        assert here == dst
        assert len(torus.route(src, dst)) == torus.distance(src, dst)

    @pytest.mark.parametrize(
        ("chip", "shape", "wrap"),
        [
            (TPU_V4, (2, 2, 4), (False, False, True)),
            (TPU_V4, (4, 4, 8), (True, True, True)),
            (TPU_V4, (8, 16, 16), (True, True, True)),
            (TPU_V5E, (8, 16), (False, True)),
            (TPU_V5E, (4, 4), (False, False)),
        ],
    )
    def test_which_dimensions_wrap(self, chip, shape, wrap):
        assert Torus.for_chip(chip, shape).wrap == wrap

    def test_links_of_a_chip(self):
        open_line = Torus((3,), (False,))
        assert open_line.links_from((0,)) == [((0,), 0, 1)]
        assert len(open_line.links_from((1,))) == 2
        two_cores = Torus((4, 4, 4), (True, True, True), cores=2)
        assert len(two_cores.links_from((0, 0, 0, 0))) == 7

    def test_wrong_descriptions(self):
        with pytest.raises(ValueError, match="3 dimensions, not of 2"):
            Torus.for_chip(TPU_V4, (4, 4))
        with pytest.raises(ValueError, match="H100"):
            Torus.for_chip(H100, (4, 4))
        with pytest.raises(ValueError, match="one wrap flag per dimension"):
            Torus((4, 4), (True,))


class TestTraffic:
    def test_ring_on_a_closed_dimension_uses_each_link_once(self):
        torus = Torus((8,), (True,))
        traffic = permute_traffic(torus, [((i,), ((i + 1) % 8,)) for i in range(8)])
        assert traffic.max_load == 1
        assert traffic.hops == 1
        assert len(traffic.load) == 8

    def test_ring_on_an_open_line_comes_back_all_the_way(self):
        torus = Torus((8,), (False,))
        traffic = permute_traffic(torus, [((i,), ((i + 1) % 8,)) for i in range(8)])
        assert traffic.hops == 7
        assert traffic.max_load == 1  # the long way back has the other direction for itself

    def test_permutes_of_v5e_avoid_the_wrap_around(self):
        torus = parse_slice("v5e:16x16").torus
        assert torus.distance((0, 0), (15, 0)) == 1
        assert permute_traffic(torus, [((15, 0), (0, 0))]).hops == 15

    def test_sending_to_oneself_is_free(self):
        traffic = permute_traffic(Torus((4,), (True,)), [((1,), (1,))])
        assert traffic.max_load == 0
        assert traffic.hops == 0

    @pytest.mark.parametrize("size", [4, 8])
    @pytest.mark.parametrize("wrap", [True, False])
    def test_all_to_all_load_is_that_of_routing_every_block(self, size, wrap):
        torus = Torus((size,), (wrap,))
        load = collections.Counter()
        for a, b in itertools.permutations(range(size), 2):
            up, down = (
                [((a + k) % size, 1) for k in range((b - a) % size)],
                [((a - k) % size, -1) for k in range((a - b) % size)],
            )
            if not wrap:
                load.update(up if b > a else down)
            elif len(up) == len(down):
                load.update({**dict.fromkeys(up, 0.5), **dict.fromkeys(down, 0.5)})
            else:
                load.update(min(up, down, key=len))
        traffic = collective_traffic(torus, "all-to-all", [[(i,) for i in range(size)]])
        assert traffic.max_load == max(load.values()) / size

    @pytest.mark.parametrize(
        ("shape", "wrap", "links"),
        [
            ((8,), (True,), 2),
            ((8,), (False,), 1),
            ((2,), (False,), 1),
            ((4, 4), (True, True), 4),
            ((4, 4), (True, False), 3),
            ((2, 2, 2), (False,) * 3, 3),
        ],
    )
    def test_native_collective_over_a_whole_box_has_the_links_of_its_dimensions(self, shape, wrap, links):
        torus = Torus(shape, wrap)
        groups = [torus.coordinates()]
        num = math.prod(shape)
        assert native_links(torus, groups) == links
        gather = collective_traffic(torus, "all-gather", groups)
        assert gather.max_load == pytest.approx((num - 1) / num / links)
        assert collective_traffic(torus, "all-reduce", groups).max_load == pytest.approx(2 * gather.max_load)

    def test_latency_is_paid_along_the_longest_chain_of_steps(self):
        ring, line = Torus((8,), (True,)), Torus((8,), (False,))
        groups = [ring.coordinates()]
        assert collective_traffic(ring, "all-gather", groups).hops == 4  # both ways round
        assert collective_traffic(ring, "all-reduce", groups).hops == 8
        assert collective_traffic(line, "reduce-scatter", groups).hops == 7

    def test_interleaved_groups_share_links(self):
        torus = Torus((16,), (True,))
        every_fourth = [[(start + 4 * i,) for i in range(4)] for start in range(4)]
        assert native_links(torus, every_fourth) == 0.5
        neighbours_by_four = [[(4 * start + i,) for i in range(4)] for start in range(4)]
        assert native_links(torus, neighbours_by_four) == 1

    def test_group_that_is_no_box_is_one_ring(self):
        torus = Torus((4, 4), (False, False))
        bent = [[(0, 0), (0, 1), (1, 1)]]
        (span,) = group_spans(torus, bent)
        assert span.dim == -1
        assert span.members == 3

    def test_link_between_two_cores_is_faster(self):
        torus = Torus((1,), (False,), cores=2)
        assert native_links(torus, [[(0, 0), (0, 1)]]) == pytest.approx(6)

    def test_group_of_one_moves_nothing(self):
        assert collective_traffic(Torus((4,), (True,)), "all-reduce", [[(0,)]]).load == {}

    def test_unknown_collective(self):
        with pytest.raises(ValueError, match="no traffic model for collective 'scan'"):
            collective_traffic(Torus((4,), (True,)), "scan", [[(0,), (1,)]])


class TestPlacement:
    @pytest.mark.parametrize(
        ("name", "axes", "cycles"),
        [
            ("v4:2x2x1", {"y": 1, "x": 4}, {"x"}),
            ("v4:2x2x1", {"y": 2, "x": 2}, {"x", "y"}),
            ("v5e:4x4", {"y": 1, "x": 16}, {"x"}),
            ("v5e:4x4", {"y": 4, "x": 4}, {"x"}),
            ("v4:2x2x4", {"y": 4, "x": 4}, {"x", "y"}),
            ("v4:2x2x4", {"y": 2, "x": 8}, {"x"}),
            ("v4:4x4x8", {"y": 16, "x": 8}, {"x", "y"}),
            ("v4:4x4x8", {"y": 1, "x": 128}, {"x"}),
            ("v5e:8x8", {"y": 8, "x": 8}, {"x"}),
            ("v6e:16x16", {"y": 16, "x": 16}, {"x", "y"}),
            ("tpu7x:2x2x4", {"y": 4, "x": 8}, {"x", "y"}),
            ("v4:4x4x4", {"replica": 4, "y": 4, "x": 4}, {"x", "y", "replica"}),
        ],
    )
    def test_rings_lie_on_physical_cycles(self, name, axes, cycles):
        placement = place(parse_slice(name).torus, axes)
        assert sorted(placement.order) == placement.torus.coordinates()
        for report in placement.reports:
            steps = collections.Counter(ring_steps(placement, report.axis)) if report.size > 1 else {}
            assert set(steps) == {1} or report.axis not in cycles
            assert report.is_cycle == (report.size > 1 and set(steps) == {1})

    def test_line_that_does_not_wrap_is_folded(self):
        placement = place(Torus((8,), (False,)), {"x": 8})
        (report,) = placement.reports
        assert sorted(ring_steps(placement, "x")) == [1, 1, 2, 2, 2, 2, 2, 2]
        assert report.hops == {1: 2, 2: 6}
        assert report.max_hops == 2
        assert report.ring_load == 1
        assert not report.is_cycle
        assert "no physical cycle" in str(report)

    def test_v5e_rings_stay_off_the_wrap_around_link(self):
        placement = place(parse_slice("v5e:16x16").torus, {"y": 16, "x": 16})
        for axis in ("x", "y"):
            for group in placement.groups(axis):
                for a, b in zip(group, [*group[1:], group[0]], strict=True):
                    assert max(abs(p - q) for p, q in zip(a, b, strict=True)) <= 2
        assert [report.ring_load for report in placement.reports] == [1, 1]
        assert [report.native_links for report in placement.reports] == [2, 2]

    @settings(max_examples=20)
    @given(tori(), st.data())
    def test_every_mesh_that_fills_the_slice_can_be_placed(self, torus, data):
        total = torus.num_devices
        x = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        placement = place(torus, {"y": total // x, "x": x})
        assert sorted(placement.order) == torus.coordinates()
        for report in placement.reports:
            if report.size > 1:
                steps = list(ring_steps(placement, report.axis))
                assert report.max_hops == max(steps)
                assert report.mean_hops == pytest.approx(sum(steps) / len(steps))
                assert sum(report.hops.values()) == report.size

    def test_groups_are_rows_and_columns_of_the_mesh(self):
        order = [(i,) for i in range(6)]
        assert axis_groups(order, {"y": 2, "x": 3}, "x") == [[(0,), (1,), (2,)], [(3,), (4,), (5,)]]
        assert axis_groups(order, {"y": 2, "x": 3}, "y") == [[(0,), (3,)], [(1,), (4,)], [(2,), (5,)]]

    def test_mesh_that_does_not_fill_the_slice(self):
        with pytest.raises(ValueError, match=r"y=8 x x=8 needs 64 devices but the slice 4x4x8 has 128"):
            place(parse_slice("v4:4x4x8").torus, {"y": 8, "x": 8})

    @pytest.mark.parametrize("family", FAMILIES)
    def test_every_named_slice_can_be_placed(self, family):
        for name in FAMILIES[family].named[:4]:
            torus = parse_slice(f"{family}:{name}").torus
            x = math.gcd(torus.num_devices, 8)
            assert len(place(torus, {"y": torus.num_devices // x, "x": x}).order) == torus.num_devices
