"""What a reader sees of a time line: the table, the picture, the trace file."""

from __future__ import annotations

import itertools
import json
import pathlib

import pytest

from overlapfx.aot import picture, render
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.hlo import parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.program import Compute, Loop, Program
from overlapfx.aot.slices import parse_slice
from overlapfx.aot.timeline import Event, walk
from overlapfx.chips import TPU_V4
from overlapfx.plan.placement import place
from overlapfx.plan.torus import Torus

DATA = pathlib.Path(__file__).parent / "data"


@pytest.fixture(scope="module")
def timeline():
    target = parse_slice("v4:2x2x2")
    program = lower(parse_module((DATA / "v4_scan_ring.txt").read_text()))
    order = place(target.torus, {"y": 2, "x": 4}).order
    return walk(program, target.torus, order, Assumptions.for_chip(target.chip))


class TestTable:
    def test_parts_add_up_to_the_total(self, timeline):
        rows = render.breakdown(timeline)
        assert rows[0] == ("total", timeline.total_s, 1.0)
        parts = [seconds for label, seconds, _ in rows[1:] if not label.startswith(" ")]
        assert sum(parts) == pytest.approx(timeline.total_s)
        kinds = [seconds for label, seconds, _ in rows if label.startswith(" ")]
        assert sum(kinds) == pytest.approx(timeline.total_s)

    def test_text(self, timeline):
        text = render.text_table(timeline)
        assert text.startswith(f"{'total':34s} {render.duration(timeline.total_s):>10s}  100.0%")
        assert "collective-permute" in text
        assert "asynchronous transfers between chips: 3, 3 of them with work beside them" in text

    def test_unknown_constructs_are_shown(self):
        work = Compute("w", "", "other", 10, 0.0, 0.0)
        program = Program("p", (work,), 1, {"opcode frobnicate": 3}, {"guess": 2})
        t = walk(program, Torus((1,), (False,)), [(0,)], Assumptions.for_chip(TPU_V4))
        text = render.text_table(t)
        assert "not understood:\n  3 x opcode frobnicate" in text
        assert "approximated:\n  2 x guess" in text

    def test_assumptions(self, timeline):
        text = render.assumptions_table(timeline.assumptions)
        assert len(text.splitlines()) == len(timeline.assumptions.rows())
        assert "hop_latency_s" in text and "1 us per hop" in text

    @pytest.mark.parametrize(("seconds", "text"), [(48.07, "48.07 s"), (0.0125, "12.50 ms"), (3.2e-6, "3.2 us")])
    def test_duration(self, seconds, text):
        assert render.duration(seconds) == text


class TestTrace:
    def test_opens_as_json_with_one_thread_per_row(self, timeline, tmp_path):
        render.write_trace(timeline, tmp_path / "trace.json")
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        assert list(names.values()) == ["compute", "link X+", "link Y+", "link Z+", "memory"]
        spans = [e for e in events if e["ph"] == "X"]
        assert len(spans) == len(timeline.events)
        busy = sum(e["dur"] for e in spans if e["tid"] == 0)
        assert busy == pytest.approx(timeline.total_s * 1e6, abs=1e-3)
        assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.total_s * 1e6, abs=1e-3)
        for row in names:
            places = sorted((round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in spans if e["tid"] == row)
            assert all(begin + length <= after for (begin, length), (after, _) in itertools.pairwise(places))
        assert {"instruction", "op_name", "kind"} <= set(spans[0]["args"])
        assert any(e["args"].get("more_iterations") == 4 for e in spans)

    def test_dict_is_json(self, timeline):
        read = json.loads(json.dumps(render.as_dict(timeline)))
        assert read["total_s"] == timeline.total_s
        assert sum(sum(kinds.values()) for kinds in read["breakdown"].values()) == pytest.approx(timeline.total_s)
        assert len(read["transfers"]) == len(timeline.transfers)


class TestPicture:
    def test_panels_rows_and_repeats(self, timeline):
        figure = picture.make_figure(timeline)
        bar, whole, zoom = figure.axes
        assert [t.get_text() for t in whole.get_yticklabels()] == ["compute", "link X+", "link Y+", "link Z+", "memory"]
        assert "4 more iterations" in [t.get_text() for t in whole.texts]
        assert zoom.get_title().startswith("one iteration of the loop while")
        assert f"{timeline.communication_share:.1%}" in figure.get_suptitle()
        shares = [patch.get_width() for patch in bar.patches]
        assert sum(shares) == pytest.approx(1)
        processor, moving = ({t.get_text() for t in legend.get_texts()} for legend in figure.legends)
        assert {"einsum", "exposed wait", "blocking collective"} <= processor
        assert "permute" in moving
        assert "enlarged below" in [t.get_text() for t in whole.texts]

    def test_repeats_are_squeezed(self):
        loop = Loop("loop", "", 1000, (Compute("w", "a/bd,df->bf/dot", "einsum", 1050, 0.0, 0.0),))
        t = walk(Program("p", (loop,), 1, {}, {}), Torus((1,), (False,)), [(0,)], Assumptions.for_chip(TPU_V4))
        figure = picture.make_figure(t)
        # Two walked iterations of 1 us, and the other 998 in a twentieth of that.
        assert figure.axes[1].get_xlim()[1] == pytest.approx(2.1e-3)
        assert figure.axes[2].get_xlim()[1] == pytest.approx(1e-3)
        assert "bd,df->bf" in [text.get_text() for text in figure.axes[2].texts]

    def test_program_without_loops_has_no_enlargement(self):
        work = Compute("w", "", "other", 10, 0.0, 0.0)
        t = walk(Program("p", (work,), 1, {}, {}), Torus((1,), (False,)), [(0,)], Assumptions.for_chip(TPU_V4))
        assert len(picture.make_figure(t, "a title").axes) == 2

    def test_file(self, timeline, tmp_path):
        picture.draw(timeline, tmp_path / "line.png")
        assert (tmp_path / "line.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("category", "op_name", "label"),
        [
            ("compute", "jit(f)/layer/td,df->tf/dot_general", "td,df->tf"),
            ("compute", "jit(f)/layer/gelu", "gelu"),
            ("compute", "", "fusion.1"),
            ("blocking", "jit(f)/td,df->tf", "all-gather"),
        ],
    )
    def test_labels(self, category, op_name, label):
        assert picture.short_label(Event("compute", 0.0, 1.0, category, "all-gather", "fusion.1", op_name)) == label
