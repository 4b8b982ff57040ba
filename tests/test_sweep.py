"""Sweeps: which points there are, which is best, what is printed and written about them."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import re

import pytest
import sweep_stub

from launch import sweep, sweep_page, sweep_pictures, sweep_rank, sweep_table
from launch.sweep_files import Reports, document, table
from launch.sweep_machine import Machine, fitting_workers
from launch.sweep_points import Target, expand, split_values
from launch.sweep_rank import Row
from overlapfx.config import to_dict

TINY = "configs/gpt.py:tiny"
EIGHT = Target("v5e:2x4", 8)
MODES = "overlap.mode=off,auto"


def meshes(points):
    return list(dict.fromkeys((p.mesh.replica, p.mesh.y, p.mesh.x) for p in points))


class TestPoints:
    def test_every_shape_of_64_chips(self):
        points = expand("configs/gpt.py:32B", [MODES], "all", [Target("v4:4x4x4", 64)])
        assert meshes(points) == [(1, 64 // x, x) for x in (1, 2, 4, 8, 16, 32, 64)]
        assert len(points) == 14 and all(p.config is not None for p in points)
        assert [p.config.overlap.mode for p in points[:3]] == ["off", "auto", "off"]

    def test_shapes_need_not_be_powers_of_two(self):
        points = expand(TINY, [], "all", [Target("odd", 12)])
        assert [(y, x) for _, y, x in meshes(points)] == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]
        assert {p.mesh.x for p in points if p.config is None} == {1, 2, 3, 4, 6, 12}  # 16 sequences over 12, 6, 3; ...

    def test_illegal_ones_carry_the_reason_of_the_config(self):
        points = expand(TINY, [MODES], "all", [EIGHT])
        refused = [p for p in points if p.config is None]
        assert {p.mesh.x for p in refused} == {8} and len(refused) == 2
        assert "model.num_heads is 4" in refused[0].why and "legal value is 8" in refused[0].why

    def test_any_field_takes_a_list(self):
        points = expand(TINY, ["overlap.unroll=1,2", "data.global_batch=16,32", MODES], "4x2", [EIGHT])
        found = [(p.config.overlap.unroll, p.config.data.global_batch, p.config.overlap.mode) for p in points]
        assert found == [(u, b, m) for u in (1, 2) for b in (16, 32) for m in ("off", "auto")]
        assert str(points[0]) == "v5e:2x4 y=4 x=2 overlap.unroll=1 data.global_batch=16 off"
        assert points[-1].overrides() == [
            "mesh.y=4",
            "mesh.x=2",
            "overlap.unroll=2",
            "data.global_batch=32",
            "overlap.mode=auto",
        ]

    def test_overrides_are_no_shell_text_but_the_point_itself(self):
        override = "sample.prompt=a b"
        (point,) = expand(TINY, [override], "4x2", [EIGHT])
        assert point.config.sample.prompt == "a b" and override in point.overrides()

    def test_explicit_meshes(self):
        points = expand(TINY, [], "8x1, 2x2x2,4x4", [EIGHT])
        assert meshes(points) == [(1, 8, 1), (2, 2, 2), (1, 4, 4)]
        assert points[2].config is None and "needs 16 devices but v5e:2x4 has 8" in points[2].why

    def test_slices_are_told_apart_by_replicas(self):
        points = expand(TINY, [], "all", [Target("v4:2x2x1,slices=2", 8, 2)])
        assert meshes(points) == [(2, 4, 1), (2, 2, 2), (2, 1, 4)]
        (point,) = expand(TINY, ["mesh.replica=4"], "2x1", [Target("v4:2x2x1,slices=2", 8, 2)])
        assert point.mesh.replica == 4
        (point,) = expand(TINY, [], "3x2x1", [Target("three of two", 6, 2)])
        assert "2 slices; use a multiple" in point.why

    def test_values_with_commas(self):
        assert split_values("1,2") == ("1", "2")
        assert split_values('["a,b", 3, {"x": 1}]') == ("a,b", "3", '{"x": 1}')
        assert split_values('{"a": 1, "b": 2}') == ('{"a": 1, "b": 2}',)
        assert split_values("") == ("",)  # an empty text is a value: data.data_dir

    @pytest.mark.parametrize(
        ("overrides", "mesh", "sentence"),
        [
            (["overlap.mode=of,on"], "all", "overlap.mode is 'of'; choose one of auto, on, off"),
            (["overlap.unrol=1"], "all", "overlap.unrol is not a field"),
            (["overlap.unroll=1,x"], "all", "must be an integer"),
            (["mesh.x=2,4"], "all", "contradicts --mesh"),
            ([MODES, "overlap.mode=on"], "all", "overlap.mode is given twice"),
            ([], "4by2", "--mesh has '4by2'; write all, or YxX"),
            ([], "8x0", "--mesh has '8x0'"),
            (["seed=1,,2"], "all", "empty value between its commas"),
            (["seed=[1"], "all", "is not a JSON list"),
        ],
    )
    def test_slips_are_refused_before_anything_runs(self, overrides, mesh, sentence):
        with pytest.raises(ValueError, match=re.escape(sentence)):
            expand(TINY, overrides, mesh, [EIGHT])

    def test_key_depends_on_everything_that_decides(self):
        points = expand(TINY, [MODES], "4x2,8x1", [EIGHT, Target("v4:2x2x2", 8)])
        basis = {"code": "c", "versions": {"jax": "1"}}
        keys = [p.key(basis) for p in points]
        assert len(set(keys)) == len(points) == 8
        assert keys == [p.key(dict(basis)) for p in expand(TINY, [MODES], "4x2,8x1", [EIGHT, Target("v4:2x2x2", 8)])]
        for other in ({**basis, "code": "d"}, {**basis, "versions": {"jax": "2"}}):
            assert set(keys).isdisjoint(p.key(other) for p in points)

    def test_slices_in_a_list(self):
        text = "v4:4x4x4,v5p:4x4x4,slices=2,v5e:4x4"
        assert sweep._slice_names(text) == ["v4:4x4x4", "v5p:4x4x4,slices=2", "v5e:4x4"]


class TestMachine:
    @pytest.mark.parametrize(
        ("cores", "free_gib", "points", "workers"),
        [(2, 20, 14, 2), (16, 20, 14, 5), (16, None, 14, 14), (16, 200, 3, 3), (4, 1, 14, 1), (2, 20, 0, 1)],
    )
    def test_cores_memory_and_points_limit_workers(self, cores, free_gib, points, workers):
        free = None if free_gib is None else free_gib * 2**30
        assert fitting_workers(Machine(cores, free), points, 4 * 2**30) == workers


# ---- planted results ----


def planted(modes="off,on,auto", target=EIGHT, extra=()):
    """Rows with the stub's figures: x=2 is the best mesh, x=1 does not fit, x=8 is illegal for the tiny config."""
    points = expand(TINY, [f"overlap.mode={modes}", *extra], "all", [target])
    return [Row(p, None if p.config is None else {**sweep_stub.answer({"config": to_dict(p.config)})}) for p in points]


def named(rows):
    return [(row.point.mesh.x, row.mode) for row in rows]


class TestRank:
    def test_fits_first_then_speed(self):
        ordered = sweep_rank.ranked(planted())
        assert named(ordered[:4]) == [(2, "on"), (2, "off"), (2, "auto"), (4, "auto")]
        assert [row.state for row in ordered[6:9]] == ["does not fit", "does not fit", "failed"]
        assert ordered[6]["step_s"] < ordered[5]["step_s"]  # faster than what fits, and still behind it
        assert {row.state for row in ordered[9:]} == {"illegal"}

    def test_ratios_below_one_are_shown_as_they_are(self):
        rows = planted("off,auto")
        gains = {(r.point.mesh.x, r.mode): sweep_rank.over_off(r, rows) for r in rows if r["step_s"]}
        assert gains[2, "auto"] == pytest.approx(1 / 1.05) and gains[4, "auto"] == pytest.approx(1.25)
        assert gains[2, "off"] == 1.0
        assert "0.952x" in sweep_table.ranking(rows)

    def test_gain_is_over_the_same_batch_and_mesh(self):
        rows = planted("off,auto", extra=["data.global_batch=16,32"])
        for row in rows:
            if row["step_s"] and row.mode == "off":
                assert sweep_rank.over_off(row, rows) == 1.0
        only = [row for row in rows if not (row.mode == "off" and "32" in row.others)]
        lonely = next(r for r in only if r.mode == "auto" and "32" in r.others and r["step_s"])
        assert sweep_rank.over_off(lonely, only) is None

    def test_gain_with_overlap_fields_swept(self):
        rows = planted("off,auto", extra=["overlap.unroll=1,2"])
        one_off = [r for r in rows if not (r.mode == "off" and "unroll=2" in r.others)]
        row = next(r for r in one_off if r.mode == "auto" and "unroll=2" in r.others and r.point.mesh.x == 4)
        assert sweep_rank.over_off(row, one_off) == pytest.approx(1.25)

    def test_answer_names_mesh_setting_and_reasons(self):
        rows = planted("off,auto")
        best = sweep_rank.best_by_target(rows)["v5e:2x4"]
        text = sweep_rank.answer(TINY, best, rows, measured=False)
        assert "on v5e:2x4, use mesh y=4, x=2 with overlap off: 2 s per step predicted, MFU 50.0%" in text
        assert "14.0 GiB of memory per device of 32.0 GiB" in text
        assert "1.200x the best of any other mesh (y=2, x=4, overlap auto)" in text
        assert "The choice is the same with links 0.8x or 1.25x as fast." in text
        assert "told apart" not in text

    def test_answer_says_what_is_close_and_what_links_change(self):
        rows = planted("off,auto")
        second = next(r for r in rows if named([r]) == [(4, "auto")])
        second.result.update(step_s=2.02, tokens_per_s=rows[2]["tokens_per_s"] * 2 / 2.02)
        second.result["step_s_by_link_factor"] = {"0.8": 2.0, "1.25": 2.0}
        best = sweep_rank.best_by_target(rows)["v5e:2x4"]
        assert named([best]) == [(2, "off")]
        text = sweep_rank.answer(TINY, best, rows, measured=False)
        assert "Too close behind to be told apart: mesh y=2, x=4 with overlap auto." in text
        assert "with links 0.8x as fast, mesh y=2, x=4 with overlap auto would be the best" in text
        assert "1.25x as fast" not in text

    def test_measurements_that_overlap_are_close(self):
        rows = planted("off,auto")
        for row in rows:
            if row["step_s"]:
                row.result.update(step_s_min=row["step_s"] * 0.9, step_s_max=row["step_s"] * 1.1)
        best = sweep_rank.best_by_target(rows)["v5e:2x4"]
        text = sweep_rank.answer(TINY, best, rows, measured=True)
        assert text.endswith("to be told apart: mesh y=4, x=2 with overlap auto; mesh y=2, x=4 with overlap auto.")
        assert "measured" in text and "links" not in text

    def test_units(self):
        durations = [sweep_rank.duration(seconds) for seconds in (12.684, 1.0, 0.03125, 0.0006254)]
        assert durations == ["12.68 s", "1 s", "31.25 ms", "625.4 us"]
        assert [sweep_rank.gib(size) for size in (26.1 * 2**30, 52.4 * 2**20, None)] == ["26.1 GiB", "52.4 MiB", "n/a"]

    def test_nothing_fits(self):
        rows = [row for row in planted("off") if row.point.mesh.x == 1]
        assert sweep_rank.best_by_target(rows) == {"v5e:2x4": None}
        assert "NO" in sweep_table.ranking(rows)
        assert rows[0].why == "40.0 GiB needed on a device that has 32.0 GiB."

    def test_front_of_time_and_memory(self):
        rows = [row for row in planted("off,on") if row.state == "fits"]
        assert named(sweep_rank.pareto(rows)) == [(4, "on"), (2, "on")]

    def test_slices_side_by_side(self):
        small = planted("off", Target("v5e:2x4", 8))
        large = planted("off", Target("v4:2x2x4", 16))
        text = sweep_table.slices([*small, *large])
        assert re.search(r"v5e:2x4 +128\.0 tokens/s/chip +1,024 tokens/s +8 chips", text)
        assert re.search(r"v4:2x2x4 +64\.0 tokens/s/chip +1,024 tokens/s +16 chips", text)
        assert sweep_table.slices(small) == ""


class TestTable:
    def test_settings_of_a_mesh_share_a_reason(self):
        text = sweep_table.reasons(planted())
        assert text.count("model.num_heads is 4") == 1 and "y=1 x=8 (off; on; auto)" in text
        assert "failed: 1\n  v5e:2x4 y=8 x=1 (on): XlaRuntimeError: planted" in text

    def test_long_tables_are_cut(self, monkeypatch):
        monkeypatch.setattr(sweep_table, "MAX_ROWS", 3)
        text = sweep_table.ranking(planted())
        assert text.count("\n") == 4 and text.endswith("and 5 more in the files")

    def test_counts(self):
        assert sweep_table.counts(planted()) == "12 points: 6 fit, 2 do not fit, 1 failed, 3 illegal"


class Tags(html.parser.HTMLParser):
    """Every start tag, and the text of all cells."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data):
        if self.cells:
            self.cells[-1] += data


class TestFiles:
    def test_page_escapes_what_it_shows(self):
        evil = '<script>alert("1")</script>'
        rows = planted("off,on", extra=[f'sample.prompt=["{"<img src=x onerror=boom>"}", "b"]'])
        rows[0].result["why"] = evil
        rows[0].result["outcome"] = "error"
        text = sweep_page.page(evil, [evil], [evil], rows, {"caption <b>": b"png"}, [evil])
        parsed = Tags(text)
        assert [tag for tag, _ in parsed.tags].count("script") == 1
        assert [tag for tag, _ in parsed.tags].count("img") == 1
        assert not [tag for tag, _ in parsed.tags if tag == "b"]
        assert any("onerror=boom" in cell for cell in parsed.cells)  # shown as text
        assert evil in [cell.strip() for cell in parsed.cells]

    def test_page_needs_nothing_else(self):
        text = sweep_page.page("t", [], [], planted(), {"c": b"png"}, [])
        tags = Tags(text).tags
        assert not [name for _, attrs in tags for name in attrs if name == "href"]
        assert all(attrs["src"].startswith("data:image/png;base64,") for _, attrs in tags if "src" in attrs)
        assert "http" not in text

    def test_page_sorts_by_figures(self):
        rows = planted()
        cells = [
            attrs.get("data-value")
            for tag, attrs in Tags(sweep_page.page("t", [], [], rows, {}, [])).tags
            if tag == "td"
        ]
        first = sweep_rank.ranked(rows)[0]
        assert cells[0] == "1" and str(first["step_s"]) in cells[:13] and str(first["memory_bytes"]) in cells[:13]

    def test_csv(self):
        lines = list(csv.DictReader(io.StringIO(table(planted()))))
        assert len(lines) == 12 and lines[0]["y"] == "4" and lines[0]["overlap"] == "on"
        assert float(lines[0]["step_s"]) == pytest.approx(1.8) and float(lines[0]["over_off"]) == pytest.approx(1 / 0.9)
        assert lines[-1]["state"] == "illegal" and lines[-1]["step_s"] == "" and "num_heads" in lines[-1]["why"]

    def test_document(self):
        rows = planted()
        found = json.loads(document(rows, {"how": "planned"}, ["a"], ["c"]))
        assert found["format"] == 1 and found["how"] == "planned" and found["answers"] == ["a"]
        first = found["points"][0]
        assert first["config"]["mesh"] == {"y": 4, "x": 2, "replica": 1} and first["result"]["step_s"] == 1.8
        assert found["points"][-1]["config"] is None and found["points"][-1]["result"] is None

    def test_reports_are_numbered_never_replaced(self, tmp_path):
        reports = Reports(tmp_path)
        (tmp_path / ".report.tmp").mkdir()  # of one that was killed
        (tmp_path / ".report.tmp" / "old").write_text("torn")
        first = reports.write("one", {"a.txt": b"1"})
        second = reports.write("two", {"a.txt": b"2"})
        assert (first.name, second.name) == ("report-1", "report-2")
        assert (first / "a.txt").read_text() == "1" and not (first / "old").exists()
        assert reports.find("one") == first and reports.find("two") == second and reports.find("three") is None

    def test_pictures_show_every_point(self):
        rows = [*planted(), *planted(target=Target("v4:2x2x2", 8))]
        heat = sweep_pictures.heat_map(rows, "title")
        assert [axes.get_title("left") for axes in heat.axes] == ["v5e:2x4", "v4:2x2x2"]
        texts = [text.get_text() for text in heat.axes[0].texts]
        assert len(texts) == 12 and "1.8 s\n55.6%" in texts and texts.count("illegal") == 3 and "failed" in texts
        hatched = [patch for patch in heat.axes[0].patches if patch.get_hatch()]
        assert len(hatched) == 2
        framed = [patch for patch in heat.axes[0].patches if not patch.get_fill()]
        assert [(round(p.get_x() + 0.47), round(p.get_y() + 0.47)) for p in framed] == [(1, 1)]  # y=4 x=2, on
        front = sweep_pictures.pareto_picture(rows, "title")
        labels = front.axes[0].get_legend_handles_labels()[1]
        assert "overlap off, does not fit" in labels and "memory of a device, 32 GiB" in labels
        assert sweep_pictures.png(front).startswith(b"\x89PNG")
        assert sweep_pictures.png(heat) == sweep_pictures.png(sweep_pictures.heat_map(rows, "title"))
