"""Schedulers: every order is legal, within the cap, no worse than as written on our sites, with its memory counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_graphs import Builder, site_graphs

from overlapfx.plan.schedulers import SCHEDULERS, as_written, bottom_up, memory, order, top_down
from overlapfx.plan.schedulers.base import (
    COMPUTE,
    DONE,
    START,
    Graph,
    Node,
    check_order,
    most_in_flight,
    peak_bytes,
    simulate,
)

OURS = (bottom_up, top_down)


@st.composite
def graphs(draw):
    """Any graph whose constraints are data: then every transfer can be waited for right after it starts."""
    b = Builder()
    values = []
    for k in range(draw(st.integers(1, 14))):
        reads = draw(st.lists(st.sampled_from(values), max_size=3, unique=True)) if values else []
        seconds = draw(st.sampled_from((0.0, 1.0, 2.5)))
        size = draw(st.integers(0, 5))
        if values and draw(st.booleans()):
            source = draw(st.sampled_from(values))
            loads = tuple((link, draw(st.sampled_from((0.5, 3.0)))) for link in draw(st.sets(st.integers(0, 2))))
            is_copy = draw(st.booleans())
            start = b.add(f"t{k}", START, [source], loads=loads, latency_s=0.25, size_bytes=size, is_copy=is_copy)
            values.append(b.add(f"d{k}", DONE, [start], shares=(start,), is_copy=is_copy))
        else:
            loads = ((0, 1.0),) if draw(st.integers(0, 9)) == 0 else ()
            shares = tuple(reads[:1]) if draw(st.booleans()) else ()
            values.append(b.add(f"c{k}", COMPUTE, reads, seconds=seconds, loads=loads, size_bytes=size, shares=shares))
    return b.graph(*draw(st.sets(st.sampled_from(values))))


class TestProperties:
    @settings(max_examples=300, deadline=None)
    @given(graphs(), st.integers(1, 4))
    def test_orders_are_topological_and_within_the_cap(self, graph, cap):
        for scheduler in OURS:
            found = scheduler.order(graph, cap)
            check_order(graph, found)
            assert most_in_flight(graph, found) <= cap, scheduler.__name__

    @settings(max_examples=200, deadline=None)
    @given(graphs())
    def test_memory_order_is_legal_and_needs_no_more(self, graph):
        found = memory.order(graph)
        check_order(graph, found)
        assert peak_bytes(graph, found) <= peak_bytes(graph, as_written.order(graph))

    @settings(max_examples=200, deadline=None)
    @given(graphs())
    def test_time_line_adds_up(self, graph):
        for name in SCHEDULERS:
            line = simulate(graph, order(graph, name))
            busy = sum(node.seconds for node in graph.nodes)
            assert line.total_s >= max(busy + line.exposed_s, max(graph.tail_s, default=0.0)) - 1e-9
            assert line.peak_bytes >= max((node.size_bytes for node in graph.nodes), default=0)


@pytest.mark.parametrize("scheduler", OURS, ids=lambda module: module.__name__.rpartition(".")[2])
def test_never_worse_than_as_written_on_our_sites(scheduler):
    gains = []
    for name, graph in site_graphs():
        written = simulate(graph, as_written.order(graph))
        found = scheduler.order(graph)
        check_order(graph, found)
        line = simulate(graph, found)
        assert line.total_s <= written.total_s * (1 + 1e-9), name
        gains.append(written.total_s / line.total_s)
    assert len(gains) > 800 and max(gains) > 1.5  # the comparison is not of equals


class TestRing:
    """A ring of two interleaved accumulators, small enough to be scheduled by hand."""

    def ring(self):
        b = Builder()
        first = b.add("a0", seconds=2.0, size_bytes=4)
        send = b.start("sa", first, 0, 1.5, 4)
        done = b.done(send)
        b.add("a1", operands=[done], seconds=2.0, size_bytes=4)
        b.add("b0", seconds=2.0, size_bytes=4)
        return b.graph(3, 4)

    def names(self, graph, found):
        return [graph.nodes[i].name for i in found]

    def test_as_written_waits(self):
        graph = self.ring()
        line = simulate(graph, as_written.order(graph))
        assert (line.total_s, line.exposed_s) == (pytest.approx(6 + 1.5 + 1e-6), pytest.approx(1.5 + 1e-6))
        # a0 lives until its transfer is done, what arrives until a1 is computed.
        assert line.peak_bytes == 8

    @pytest.mark.parametrize("scheduler", OURS)
    def test_independent_work_goes_beside_the_transfer(self, scheduler):
        graph = self.ring()
        found = scheduler.order(graph)
        assert self.names(graph, found) == ["a0", "sa-start", "b0", "sa-done", "a1"]
        line = simulate(graph, found)
        assert (line.total_s, line.exposed_s, line.most_in_flight) == (6.0, 0.0, 1)
        assert line.peak_bytes == 12  # a0, what arrives and b0 at once

    def test_links_queue(self):
        b = Builder()
        starts = [b.start(f"s{i}", b.add(f"v{i}", size_bytes=1), 0, 1.0) for i in range(2)]
        for start in starts:
            b.done(start)
        line = simulate(b.graph(), range(len(b.nodes)))
        assert line.total_s == pytest.approx(2.0 + 1e-6)  # one link, one after the other

    def test_a_blocking_collective_holds_the_processor_behind_the_queue(self):
        b = Builder()
        b.start("s", b.add("v", size_bytes=1), 0, 1.0)
        b.add("psum", loads=((0, 0.5),), latency_s=0.25)
        assert simulate(b.graph(), range(len(b.nodes))).total_s == pytest.approx(1.75)

    def test_memory_of_updates_in_place_is_counted_once(self):
        b = Builder()
        buffer = b.add("buffer", size_bytes=10)
        update = b.add("update", operands=[buffer], shares=(buffer,))
        view = b.add("view", operands=[update], shares=(update,))
        b.add("last", operands=[view], size_bytes=3)
        assert peak_bytes(b.graph(3), range(4)) == 13
        assert peak_bytes(Graph(tuple(b.nodes[:3]), (2,)), range(3)) == 10

    def test_memory_is_free_after_the_last_reader_but_not_results(self):
        nodes = [Node("a", size_bytes=5), Node("b", operands=(0,), size_bytes=7), Node("c", size_bytes=6)]
        assert peak_bytes(Graph(tuple(nodes), (2,)), range(3)) == 12
        assert peak_bytes(Graph(tuple(nodes), (1, 2)), range(3)) == 13


class TestMemoryOrder:
    def test_frees_before_it_allocates(self):
        big = [Node(f"big{i}", size_bytes=10) for i in range(2)]
        small = [Node(f"small{i}", operands=(i,), size_bytes=1) for i in range(2)]
        graph = Graph((*big, *small), (2, 3))
        assert memory.order(graph) == [0, 2, 1, 3]
        assert (peak_bytes(graph, memory.order(graph)), peak_bytes(graph, range(4))) == (12, 21)


class TestCap:
    def wide(self, count=6):
        b = Builder()
        dones = [b.done(b.start(f"s{i}", b.add(f"v{i}", size_bytes=1), i, 1.0)) for i in range(count)]
        for i, done in enumerate(dones):
            b.add(f"use{i}", operands=[done], seconds=1.0)
        return b.graph()

    @pytest.mark.parametrize("scheduler", OURS)
    def test_binds(self, scheduler):
        graph = self.wide()
        free = most_in_flight(graph, scheduler.order(graph))
        assert free >= 2
        for cap in (1, 2):
            assert most_in_flight(graph, scheduler.order(graph, cap)) == cap

    @pytest.mark.parametrize("scheduler", OURS)
    def test_order_as_written_where_the_cap_leaves_no_other(self, scheduler):
        nodes = (
            Node("a", START),
            Node("b", START, after=(0,)),
            Node("c", DONE, (0,), after=(1,)),
            Node("d", DONE, (1,), after=(2,)),
        )
        assert scheduler.order(Graph(nodes), 1) == [0, 1, 2, 3]
        check_order(Graph(nodes), scheduler.order(Graph(nodes), 2))


class TestRefused:
    def test_a_graph_that_is_not_in_a_legal_order(self):
        with pytest.raises(ValueError, match=r"node 0 \(a\) needs node 1, which does not stand before it"):
            Graph((Node("a", operands=(1,)), Node("b")))

    def test_a_done_without_its_start(self):
        with pytest.raises(ValueError, match=r"node 1 \(d\) is a done whose first operand is no start"):
            Graph((Node("a"), Node("d", DONE, (0,))))

    def test_an_order_that_is_none(self):
        graph = Graph((Node("a"), Node("b", operands=(0,))))
        with pytest.raises(ValueError, match="b stands before a, which it needs"):
            check_order(graph, [1, 0])
        with pytest.raises(ValueError, match="must hold each once"):
            check_order(graph, [0, 0])
