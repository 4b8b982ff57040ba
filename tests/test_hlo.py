"""Reading scheduled HLO: text that the compiler printed (tests/data, shortened), plus the corners written by hand."""

from __future__ import annotations

import collections
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapfx.aot.hlo import parse_instruction, parse_module
from overlapfx.aot.hlo_groups import parse_groups, parse_pairs
from overlapfx.aot.hlo_syntax import HloError, attributes, closing, parse_shape, split_list
from overlapfx.aot.lowering import lower
from overlapfx.aot.program import Blocking, Branch, Compute, Loop, Start, Wait

DATA = pathlib.Path(__file__).parent / "data"


def program(name):
    return lower(parse_module((DATA / f"{name}.txt").read_text()))


def module_text(body, extra="", header="HloModule m, is_scheduled=true, num_partitions=4"):
    return f"{header}\n\n{extra}\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n{body}\n}}\n"


def flat(steps, times=1):
    """Every step with how often it runs, loops multiplied."""
    for step in steps:
        if isinstance(step, Loop):
            yield from flat(step.body, times * step.num_trips)
        elif isinstance(step, Branch):
            for alternative in step.alternatives:
                yield from flat(alternative, times)
        else:
            yield step, times


def kinds(program, step_type):
    """Transfers by kind and size of group, with how often they run."""
    found = collections.Counter()
    for step, times in flat(program.steps):
        if isinstance(step, step_type) and step.transfer.medium != "memory":
            groups = step.transfer.groups
            found[step.transfer.kind, len(groups[0]) if groups else None] += times
    return dict(found)


class TestSyntax:
    @pytest.mark.parametrize(
        ("text", "num_bytes", "space"),
        [
            ("bf16[32768,2048]{1,0:T(8,128)(2,1)}", 32768 * 2048 * 2, 0),
            ("f32[]{:T(128)}", 4, 0),
            ("pred[10]", 10, 0),
            ("s4[3,3]{1,0}", 5, 0),
            ("f8e4m3fn[7]{0}", 7, 0),
            ("bf16[256,8]{1,0:T(8,128)(2,1)S(3)}", 4096, 3),
            ("token[]", 0, 0),
            ("f32[<=5]{0}", 20, 0),
        ],
    )
    def test_shape(self, text, num_bytes, space):
        shape, end = parse_shape(text)
        assert (shape.num_bytes, shape.memory_space, end) == (num_bytes, space, len(text))

    def test_nested_tuple_with_comments(self):
        shape, _ = parse_shape("((bf16[2]{0}, ()), f32[3]{0}, /*index=2*/u32[]{:S(2)}) next")
        assert shape.num_bytes == 4 + 12 + 4
        assert len(shape.elements) == 3
        assert shape.elements[2].memory_space == 2

    @pytest.mark.parametrize("text", ["", "(f32[2]", "what", "(f32[2] f32[3])"])
    def test_no_shape(self, text):
        with pytest.raises(HloError):
            parse_shape(text)

    def test_unknown_element_type(self):
        with pytest.raises(HloError, match="'q7'"):
            _ = parse_shape("q7[4]")[0].num_bytes

    def test_brackets_inside_strings_do_not_count(self):
        text = '{a="}{", b={c=[1,2]}}, rest'
        assert text[closing(text, 0) :] == ", rest"
        assert split_list('x={1,2}, y="a,b", z') == ["x={1,2}", 'y="a,b"', "z"]
        assert attributes('k=v, m={op_name="f(x, y)"}, flag') == {"k": "v", "m": '{op_name="f(x, y)"}', "flag": ""}
        with pytest.raises(HloError, match="unbalanced"):
            closing("{a", 0)

    def test_instruction(self):
        line = (
            "  ROOT %f.1 = (f32[4]{0}, s32[]) fusion(f32[4]{0} %a.b, %c-d), kind=kLoop, calls=%fused.2, "
            'metadata={op_name="jit(f)/layer[0]/add" stack_frame_id=3}, '
            'backend_config={"window_config":{"estimated_cycles":"1234"},"other":["x,y"]}'
        )
        read = parse_instruction(line)
        assert (read.name, read.opcode, read.operands, read.is_root) == ("f.1", "fusion", ("a.b", "c-d"), True)
        assert read.called == ("fused.2",)
        assert read.estimated_cycles == 1234
        assert read.op_name == "jit(f)/layer[0]/add"

    def test_text_without_entry(self):
        with pytest.raises(HloError, match="no ENTRY"):
            parse_module("nothing here")


class TestGroups:
    def test_lists(self):
        assert parse_groups("{{0,1},{2,3}}", 4) == ((0, 1), (2, 3))
        assert parse_groups("{}", 3) == ((0, 1, 2),)

    @given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
    def test_iota_is_arange_reshaped_and_transposed(self, dims, random, data):
        order = list(range(len(dims)))
        random.shuffle(order)
        total = int(np.prod(dims))
        size = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
        expected = np.arange(total).reshape(dims).transpose(order).reshape(-1, size)
        text = f"[{total // size},{size}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
        assert np.array_equal(parse_groups(text, total), expected)

    def test_iota_without_transposition(self):
        assert parse_groups("[2,3]<=[6]", 6) == ((0, 1, 2), (3, 4, 5))

    @pytest.mark.parametrize(
        ("axes", "groups"),
        [
            ("{'x'}", ((0, 1, 2), (3, 4, 5))),
            ("{'y'}", ((0, 3), (1, 4), (2, 5))),
            ("{'y','x'}", ((0, 1, 2, 3, 4, 5),)),
            ("{'x','y'}", ((0, 3, 1, 4, 2, 5),)),
        ],
    )
    def test_mesh(self, axes, groups):
        assert parse_groups(f"mesh['y'=2,'x'=3] {axes}", 6) == groups

    def test_part_of_a_mesh_axis(self):
        assert parse_groups("mesh['x'=8] {'x':(1)2}", 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
        assert parse_groups("mesh['x'=8] {'x':(2)4}", 8) == ((0, 1, 2, 3), (4, 5, 6, 7))

    def test_mesh_with_its_own_device_order(self):
        assert parse_groups("mesh['y'=2,'x'=2], device_ids=[3,2,1,0] {'x'}", 4) == ((3, 2), (1, 0))
        # [4, 2] transposed is 0 2 4 6 1 3 5 7, cut into two rows of four: the groups of the first axis are pairs.
        text = "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}"
        assert parse_groups(text, 8) == ((0, 1), (2, 3), (4, 5), (6, 7))
        assert attributes(f"channel_id=1, replica_groups={text}, use_global_device_ids=true") == {
            "channel_id": "1",
            "replica_groups": text,
            "use_global_device_ids": "true",
        }

    def test_notations_agree(self):
        by_list = parse_groups("{{0,2,4,6},{1,3,5,7}}", 8)
        assert parse_groups("[2,4]<=[4,2]T(1,0)", 8) == by_list
        assert parse_groups("mesh['y'=4,'x'=2] {'y'}", 8) == by_list

    def test_unknown_notation(self):
        with pytest.raises(HloError, match="no known notation"):
            parse_groups("rows(4)", 4)
        with pytest.raises(HloError, match="same number"):
            parse_groups("[3,2]<=[4]", 4)
        with pytest.raises(HloError, match="no known notation"):
            parse_pairs("ring(4)")

    def test_pairs(self):
        assert parse_pairs("{{0,3},{1,0}}") == ((0, 3), (1, 0))
        assert parse_pairs("{}") == ()


class TestLoops:
    def count(self, start, step, bound, direction, init="constant({0})", swap=False):
        """Trip count of a loop over a tuple (counter, bound kept in the state, data)."""
        sides = "%b, %i" if swap else "%i, %b"
        extra = f"""
%body (s: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {{
  %s = (s32[], s32[], f32[8]) parameter(0)
  %i0 = s32[] get-tuple-element(%s), index=0
  %kept = s32[] get-tuple-element(%s), index=1
  %d = f32[8] get-tuple-element(%s), index=2
  %one = s32[] constant({step})
  %next = s32[] add(%i0, %one)
  ROOT %t = (s32[], s32[], f32[8]) tuple(%next, %kept, %d)
}}

%cond (c: (s32[], s32[], f32[8])) -> pred[] {{
  %c = (s32[], s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %b = s32[] get-tuple-element(%c), index=1
  ROOT %lt = pred[] compare({sides}), direction={direction}
}}
"""
        body = f"""  %start = s32[] constant({start})
  %copied = s32[] copy(%start)
  %end = s32[] constant({bound})
  %state = (s32[], s32[], f32[8]) tuple(%copied, %end, %p)
  ROOT %w = (s32[], s32[], f32[8]) while(%state), condition=%cond, body=%body"""
        (loop,) = lower(parse_module(module_text(body, extra))).steps
        return loop.num_trips

    @pytest.mark.parametrize(
        ("start", "step", "bound", "direction", "trips"),
        [
            (0, 1, 142, "LT", 142),
            (1, 2, 11, "LT", 5),
            (1, 2, 11, "LE", 6),
            (10, -3, 0, "GT", 4),
            (10, -3, 1, "GE", 4),
            (0, 2, 8, "NE", 4),
            (5, 1, 5, "LT", 0),
            (0, 2, 7, "NE", None),
            (0, -1, 5, "LT", None),
        ],
    )
    def test_count(self, start, step, bound, direction, trips):
        values = range(start, start + 40 * step, step) if trips is not None else []
        holds = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__, "NE": int.__ne__}[direction]
        if trips is not None and trips < 40:
            assert trips == next(n for n, value in enumerate(values) if not holds(value, bound))
        assert self.count(start, step, bound, direction) == trips

    def test_bound_on_the_left(self):
        assert self.count(0, 1, 6, "GT", swap=True) == 6

    def test_count_that_the_compiler_prints_itself(self):
        extra = "%b (s: (f32[8])) -> (f32[8]) {\n  %s = (f32[8]) parameter(0)\n  ROOT %c = (f32[8]) copy(%s)\n}\n"
        body = (
            "  %t = (f32[8]) tuple(%p)\n"
            '  ROOT %w = (f32[8]) while(%t), condition=%b, body=%b, backend_config={"known_trip_count":{"n":"7"}}'
        )
        (loop,) = lower(parse_module(module_text(body, extra))).steps
        assert loop.num_trips == 7

    def test_unreadable_count_is_counted(self):
        extra = (
            "%b (s: (f32[8])) -> (f32[8]) {\n  %s = (f32[8]) parameter(0)\n  ROOT %c = (f32[8]) tuple(%s)\n}\n"
            "%q (s: (f32[8])) -> pred[] {\n  %s = (f32[8]) parameter(0)\n  ROOT %c = pred[] custom-call(%s)\n}\n"
        )
        body = "  %t = (f32[8]) tuple(%p)\n  ROOT %w = (f32[8]) while(%t), condition=%q, body=%b"
        read = lower(parse_module(module_text(body, extra)))
        assert read.steps[0].num_trips is None
        assert read.unknown == {"while loop without a readable trip count (walked once)": 1}


class TestLowering:
    def test_blocking_collectives(self):
        read = program("v4_mlp_blocking")
        assert read.num_partitions == 512
        assert kinds(read, Blocking) == {("all-gather", 8): 1, ("all-gather", 64): 2, ("reduce-scatter", 8): 1}
        gather = next(s.transfer for s in read.steps if isinstance(s, Blocking))
        assert gather.payload_bytes == 32768 * 16384 * 2  # the gathered activations
        assert gather.groups[1] == tuple(range(8, 16))
        assert sum(s.cycles for s in read.steps if isinstance(s, Compute)) == 73016968
        assert not read.unknown

    def test_scan_with_permutes(self):
        read = program("v4_scan_ring")
        (loop,) = [s for s in read.steps if isinstance(s, Loop)]
        assert loop.num_trips == 6
        assert kinds(read, Start) == {("collective-permute", None): 18}
        permute = next(s.transfer for s in loop.body if isinstance(s, Start))
        assert permute.pairs == tuple((4 * y + x, 4 * y + (x - 1) % 4) for y in range(2) for x in range(4))
        assert permute.payload_bytes == 2048 * 512 * 2
        assert {s.kind for s in loop.body if isinstance(s, Compute)} >= {"einsum"}
        assert not read.unknown

    def test_every_start_has_its_wait(self):
        for name in sorted(path.stem for path in DATA.glob("*.txt")):
            read = program(name)
            starts = {s.transfer.name for s, _ in flat(read.steps) if isinstance(s, Start)}
            waits = {s.key for s, _ in flat(read.steps) if isinstance(s, Wait)}
            assert starts == waits, name
            assert not read.unknown, name

    def test_collective_inside_fusions_of_v5e(self):
        read = program("v5e_scan_async_fusions")
        (loop,) = [s for s in read.steps if isinstance(s, Loop)]
        (start,) = [s.transfer for s in loop.body if isinstance(s, Start)]
        assert (start.kind, len(start.groups[0]), start.medium) == ("all-gather", 4, "ici")
        begin = next(n for n, s in enumerate(loop.body) if isinstance(s, Start))
        end = next(n for n, s in enumerate(loop.body) if isinstance(s, Wait) and s.key == start.name)
        # The einsum that carries the gather along is work between its start and its end, not a collective of its own.
        assert [s.kind for s in loop.body[begin + 1 : end] if isinstance(s, Compute)].count("einsum") == 1
        assert kinds(read, Blocking) == {("all-gather", 4): 12, ("reduce-scatter", 4): 6}

    def test_reduce_scatter_in_a_fusion(self):
        read = program("v4_collectives")
        assert kinds(read, Blocking) == {("reduce-scatter", 4): 1, ("all-reduce", 4): 1}
        assert kinds(read, Start) == {("collective-permute", None): 1, ("all-to-all", 2): 1}
        assert read.notes == {"concatenate without estimated cycles (charged by its bytes)": 1}

    def test_gather_offloaded_to_another_core(self):
        read = program("tpu7x_offloaded_gather")
        assert kinds(read, Start) == {("all-gather", 16): 1}
        (start,) = [s for s in read.steps if isinstance(s, Start)]
        assert start.transfer.payload_bytes == 12288 * 12288 * 2
        assert [type(s) for s in read.steps] == [Start, Wait, Compute]

    def test_two_slices(self):
        read = program("v4_two_slices")
        between = [s.transfer for s in read.steps if isinstance(s, Start) and s.transfer.medium == "dcn"]
        assert [(t.kind, t.num_slices, t.payload_bytes) for t in between] == [
            ("all-reduce", 2, 512),
            ("all-reduce", 2, 2048 * 256 * 2),
        ]

    def test_kernels_and_branches(self):
        read = program("v4_kernels_branch_loop")
        kernels = [s for s in read.steps if isinstance(s, Compute) and s.kind == "kernel"]
        assert [(k.num_flops, k.num_bytes) for k in kernels] == [(12345678, 4194304), (0, 2 * 512 * 1024 * 4)]
        (branch,) = [s for s in read.steps if isinstance(s, Branch)]
        assert len(branch.alternatives) == 2
        (loop,) = [s for s in read.steps if isinstance(s, Loop)]
        assert loop.num_trips == 5

    def test_given_kernel_costs_go_first(self):
        text = (DATA / "v4_kernels_branch_loop.txt").read_text()
        read = lower(parse_module(text), {"pallas_call": (5.0, 6.0)})
        kernels = [s for s in read.steps if isinstance(s, Compute) and s.kind == "kernel"]
        assert [(k.num_flops, k.num_bytes) for k in kernels] == [(5, 6), (5, 6)]
        assert "custom kernel without a cost estimate (charged by its bytes)" not in read.notes

    def test_copies_move_memory(self):
        read = program("v4_windowed_einsum")
        moves = [s.transfer for s in read.steps if isinstance(s, Start) and s.transfer.medium == "memory"]
        assert collections.Counter(t.kind for t in moves) == {"slice": 4, "copy": 2}
        assert {t.payload_bytes for t in moves if t.kind == "slice"} == {2048 * 2048 * 2}

    def test_unknown_constructs_are_counted(self):
        body = """  %big = f32[4096] broadcast(%p), dimensions={}
  %odd = f32[4096] frobnicate(%big)
  %call = f32[4096] custom-call(%odd), custom_call_target="Mystery"
  %ag = f32[8192] all-gather(%call), replica_groups=rows(2), dimensions={0}
  garbage that is no instruction
  %done = f32[8] copy-done(%never)
  ROOT %r = f32[8] slice(%ag), slice={[0:8]}"""
        read = lower(parse_module(module_text(body)))
        assert read.unknown["opcode frobnicate"] == 1
        assert read.unknown["custom call Mystery"] == 1
        assert sum(count for what, count in read.unknown.items() if what.startswith("all-gather")) == 1
        assert sum(count for what, count in read.unknown.items() if what.startswith("unreadable line")) == 1
        gather = next(s.transfer for s in read.steps if isinstance(s, Blocking))
        assert gather.groups == ((0, 1, 2, 3),)

    def test_work_offloaded_to_another_core_is_waited_for(self):
        body = """  %big = f32[4096] broadcast(%p), dimensions={}
  %s = ((), (), s32[8]) custom-call-start(), async_execution_thread="sparsecore", custom_call_target="Scatter"
  %s.update = ((f32[4096]), f32[4096], s32[8]) custom-call-update(%s, %big)
  %d = f32[4096] custom-call-done(%s.update)
  %z = f32[4096] custom-call(%d), custom_call_target="ZeroCrop"
  %id = u32[] custom-call(), custom_call_target="SliceId"
  ROOT %r = f32[8] slice(%z), slice={[0:8]}"""
        read = lower(parse_module(module_text(body)))
        (start,) = [s.transfer for s in read.steps if isinstance(s, Start)]
        (wait,) = [s for s in read.steps if isinstance(s, Wait)]
        assert (start.name, start.medium, start.payload_bytes) == (wait.key, "memory", 4096 * 4)
        assert not read.unknown
        assert [s.name for s in read.steps if isinstance(s, Compute)] == ["big", "z"]

    def test_updates_in_place_are_charged_for_what_they_write(self):
        body = """  %base = f32[1024,1024] broadcast(%p), dimensions={}
  %part = f32[64,1024] slice(%base), slice={[0:64]}
  %zero = s32[] constant(0)
  ROOT %u = f32[1024,1024] dynamic-update-slice(%base, %part, %zero, %zero)"""
        steps = lower(parse_module(module_text(body))).steps
        assert [s.num_bytes for s in steps[1:]] == [2 * 64 * 1024 * 4, 2 * 64 * 1024 * 4]

    def test_unscheduled_text_is_refused(self):
        with pytest.raises(ValueError, match="not scheduled"):
            lower(parse_module(module_text("  ROOT %r = f32[8] copy(%p)", header="HloModule m")))
