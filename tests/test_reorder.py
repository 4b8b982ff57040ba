"""Other orders of compiled programs: same instructions, never what memory forbids, the compiler's own where asked."""

from __future__ import annotations

import pathlib
from collections import Counter

import pytest

from overlapfx.aot import hazards, variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.hlo import Module, parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.reorder import Reordered, reorder
from overlapfx.aot.timeline import walk
from overlapfx.chips import TPU_V4
from overlapfx.plan.torus import Torus

DATA = pathlib.Path(__file__).parent / "data"
V4 = Assumptions.for_chip(TPU_V4)
PROGRAMS = sorted(path.name for path in DATA.glob("v*.txt"))
SHAPES = {512: (8, 8, 8), 16: (4, 4), 8: (2, 4)}


def torus_of(module: Module) -> Torus:
    shape = SHAPES[module.num_partitions]
    return Torus(shape, tuple(size % 4 == 0 for size in shape))


def reordered(text: str, scheduler: str) -> tuple[Module, Reordered]:
    module = parse_module(text)
    torus = torus_of(module)
    return module, reorder(module, scheduler, torus, torus.coordinates(), V4)


def hlo(*lines: str) -> str:
    """A scheduled module for 16 devices in a ring of 4 x 4 whose entry holds `lines`."""
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"HloModule m, is_scheduled=true, num_partitions=16\n\nENTRY %main (p: f32[1024]) -> f32[1024] {{\n{body}\n}}\n"
    )


def work(name: str, *operands: str, cycles: int = 1050000, shape: str = "f32[1024]{0}") -> str:
    """A millisecond of work."""
    reads = ", ".join(f"%{operand}" for operand in operands)
    return f'%{name} = {shape} copy({reads}), backend_config={{"estimated_cycles":"{cycles}"}}'


def permute(name: str, source: str, size: int = 1024) -> tuple[str, str]:
    pairs = ",".join(f"{{{i},{i // 4 * 4 + (i + 1) % 4}}}" for i in range(16))
    shape = f"f32[{size}]{{0}}"
    return (
        f"%{name} = ({shape}, {shape}, u32[], u32[]) collective-permute-start(%{source}), "
        f"source_target_pairs={{{pairs}}}",
        f"%{name}.done = {shape} collective-permute-done(%{name})",
    )


@pytest.mark.parametrize("name", PROGRAMS)
class TestPrograms:
    """Every recorded program under every scheduler."""

    def test_same_instructions_and_time_of_the_order_as_compiled(self, name: str) -> None:
        module, found = reordered((DATA / name).read_text(), "as_written")
        torus = torus_of(module)
        assert found.timeline.total_s == walk(lower(module), torus, torus.coordinates(), V4).total_s
        assert found.module.computations == module.computations

    @pytest.mark.parametrize("scheduler", ["bottom_up", "top_down"])
    def test_legal(self, name: str, scheduler: str) -> None:
        module, found = reordered((DATA / name).read_text(), scheduler)
        for before in module.scheduled():
            after = found.module.computations[before.name]
            assert Counter(after.lines) == Counter(line for line in before.lines if line.strip())
            place = {instruction.name: i for i, instruction in enumerate(after.instructions)}
            for instruction, needed in zip(before.instructions, hazards.find(module, before), strict=True):
                first = [*instruction.operands, *(before.instructions[j].name for j in needed)]
                assert all(place[other] < place[instruction.name] for other in first if other in place)
        assert (
            found.timeline.unknown == walk(lower(module), torus_of(module), torus_of(module).coordinates(), V4).unknown
        )
        assert found.timeline.compute_s == pytest.approx(
            walk(lower(module), torus_of(module), torus_of(module).coordinates(), V4).compute_s
        )


class TestByHand:
    def ring(self) -> str:
        start, done = permute("send", "a", 45_000_000 // 4)  # 45 MB over one link: a millisecond
        return hlo(
            "%p = f32[1024]{0} parameter(0)",
            work("a", "p", shape="f32[11250000]{0}"),
            start,
            done,
            work("b", "send.done"),
            work("c", "p"),
            "ROOT %t = (f32[1024]{0}, f32[1024]{0}) tuple(%b, %c)",
        )

    def test_independent_work_moves_beside_the_transfer(self) -> None:
        _, own = reordered(self.ring(), "as_written")
        assert own.timeline.total_s == pytest.approx(4e-3, rel=1e-2)
        for scheduler in ("bottom_up", "top_down"):
            _, found = reordered(self.ring(), scheduler)
            names = [i.name for i in found.module.computations["main"].instructions]
            assert names.index("send") < names.index("c") < names.index("send.done") < names.index("b")
            assert found.timeline.total_s == pytest.approx(3e-3, rel=1e-2)
            assert (own.most_in_flight, found.most_in_flight) == (1, 1)

    def test_memory_by_hand(self) -> None:
        _, own = reordered(self.ring(), "as_written")
        # a and what arrives at once, 45 MB each; the parameter is not the program's own.
        assert own.peak_bytes == 2 * 45_000_000
        _, found = reordered(self.ring(), "top_down")
        assert found.peak_bytes == 2 * 45_000_000 + 4096  # and c beside them
        assert found.as_dict()["peak_bytes"] == found.peak_bytes

    def test_memory_on_the_chip_is_counted_apart(self) -> None:
        text = hlo(
            "%p = f32[1024]{0} parameter(0)",
            work("a", "p", shape="f32[1024]{0:S(3)}"),
            work("b", "p", shape="f32[1024]{0:S(1)}"),
            "ROOT %t = (f32[1024]{0}, f32[1024]{0}) tuple(%a, %b)",
        )
        _, found = reordered(text, "as_written")
        assert (found.peak_bytes, found.chip_bytes) == (0, 8192)

    def test_nothing_is_overwritten_before_it_is_read(self) -> None:
        text = hlo(
            "%p = f32[1024]{0} parameter(0)",
            "%i = s32[] constant(0)",
            work("buffer", "p"),
            work("reader", "buffer"),
            "%update = f32[8]{0} slice(%p), slice={[0:8]}",
            "%written = f32[1024]{0} dynamic-update-slice(%buffer, %update, %i)",
            "ROOT %t = (f32[1024]{0}, f32[1024]{0}) tuple(%written, %reader)",
        )
        module = parse_module(text)
        here = module.computations["main"]
        found = hazards.find(module, here)
        assert found[5] == {3, 5} - {5}  # the update waits for the reader of what it overwrites
        assert hazards.shares(module, here.by_name["written"]) == ("buffer",)

    def test_control_dependencies_hold(self) -> None:
        start, done = permute("send", "a", 45_000_000 // 4)
        text = hlo(
            "%p = f32[1024]{0} parameter(0)",
            work("a", "p", shape="f32[11250000]{0}"),
            start,
            done,
            work("b", "send.done"),
            f"{work('c', 'p')}, control-predecessors={{%send.done}}",
            "ROOT %t = (f32[1024]{0}, f32[1024]{0}) tuple(%b, %c)",
        )
        for scheduler in ("bottom_up", "top_down"):
            _, found = reordered(text, scheduler)
            assert found.timeline.total_s == pytest.approx(4e-3, rel=1e-2)


class TestChoice:
    def test_the_compilers_own_comes_first(self) -> None:
        assert variants.choose_schedulers("") == ()
        assert variants.choose_schedulers("compiler") == ()
        assert variants.choose_schedulers("top_down, bottom_up") == ("as_written", "top_down", "bottom_up")

    def test_unknown_names_are_refused(self) -> None:
        with pytest.raises(ValueError, match="--scheduler has 'best'; choose from compiler, as_written, bottom_up"):
            variants.choose_schedulers("best")
