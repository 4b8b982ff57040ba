"""What the paper's figures make of results: which ones count, findings that can go either way, markup that is safe."""

from __future__ import annotations

import paper_stub
import pytest

from experiments import fig12, fig13, fig14, fig15, fig16, fig_gate, fig_goals, fig_rewrite, fig_training, foreign
from experiments.paper.__main__ import FIGURES
from experiments.paper.applications import applications, gpt_sizes
from experiments.paper.figure import Content, Table
from experiments.paper.measurement import plan
from experiments.paper.pages import as_html, markdown
from experiments.paper.programs import XLA, all_programs, best_of_xla
from experiments.paper.results import Results
from overlapfx.aot.slices import parse_slice


def records(measurements, make, basis="now", unix_s=1.0):
    return [
        {
            "key": m.key({"code": basis}),
            "identity": m.identity(),
            "unix_s": unix_s,
            "outcome": "ok",
            "result": make({"kind": m.kind, **m.task}),
        }
        for m in measurements
    ]


def test_results_of_older_code_count_only_when_asked():
    one = plan(applications(True)[0], "ours")
    made = [
        *records([one], lambda task: {"step_s": 1.0}, "old", 1.0),
        *records([one], lambda task: {"step_s": 2.0}, "older", 0.5),
    ]
    now = {"code": "now"}
    assert Results(made, now).find(one) is None
    assert Results(made, now).why(one) == "not computed yet"
    assert Results(made, now, any_code=True).find(one) == {"step_s": 1.0}
    assert not Results(made, now, any_code=True).is_current(one)
    made += records([one], lambda task: {"step_s": 3.0}, "now", 0.1)
    assert Results(made, now, any_code=True).find(one) == {"step_s": 3.0}, "the present code comes first"


def test_keys_depend_on_the_question_and_on_the_basis():
    one, other = applications(True)[:2]
    asked = [plan(one, "ours"), plan(one, "blocking"), plan(other, "ours"), plan(one, "ours", "overlap.unroll=1")]
    assert len({m.key({}) for m in asked}) == len({m.identity() for m in asked}) == len(asked)
    assert plan(one, "ours").key({"code": 1}) != plan(one, "ours").key({"code": 2})
    assert plan(one, "ours", "overlap.unroll=2").key({}) == plan(one, "ours").key({}), "the same config, computed once"


@pytest.mark.parametrize("quick", [True, False])
def test_every_measurement_fills_its_slice(quick):
    seen = set()
    for figure in FIGURES:
        for measurement in figure.measurements(quick):
            task = measurement.task
            if measurement.kind == "plan":
                mesh = task["config"]["mesh"]
                assert mesh["replica"] * mesh["y"] * mesh["x"] == parse_slice(task["slice"]).num_devices
            elif measurement.kind in ("einsum", "rewrite"):
                assert task["y"] * task["x"] == parse_slice(task["slice"]).num_devices
            seen.add(measurement.kind)
    assert seen == {"plan", "count", "einsum", "rewrite", "rounding", "training"}
    assert len({one.name for one in applications(quick)}) == (5 if quick else 6)


def test_the_best_of_xla_is_the_quickest():
    one = applications(False)[0]
    times = {"xla-auto": 3.0, "xla-windowed": 1.0, "xla-async": 2.0}
    made = records([plan(one, name) for name in times], lambda task: {"step_s": times[task["variant"]]})
    assert set(XLA) == set(times)
    assert best_of_xla(one, Results(made, {"code": "now"})) == {"step_s": 1.0}
    assert best_of_xla(one, Results([], {"code": "now"})) is None
    assert {m.task["variant"] for m in all_programs([one], XLA)} == {"blocking", "ours", *times}


# ---- findings, which must be able to go either way ----


def findings(figure, make) -> dict[str, bool | None]:
    made = records(figure.measurements(True), make)
    content: Content = figure.content(True, Results(made, {"code": "now"}))
    return {finding.claim: finding.agrees for finding in content.findings}


def found(figure, make, words: str) -> bool | None:
    return next(agrees for claim, agrees in findings(figure, make).items() if words in claim)


@pytest.mark.parametrize(("sign", "agrees"), [(1, True), (-1, False)])
def test_gain_against_communication(sign, agrees):
    names = [one.config().name for one in applications(True)]

    def make(task):
        place = names.index(task["config"]["name"])
        step_s = 1.0 if task["variant"] == "ours" else 1.3 + sign * 0.01 * place
        return {**paper_stub._plan(task), "step_s": step_s, "communication_share": 0.2 + 0.02 * place}

    assert found(fig12.FIGURE, make, "larger where communication is larger") is agrees
    assert found(fig12.FIGURE, make, "as fast as blocking") is True


@pytest.mark.parametrize(("ours_s", "agrees"), [(1.0, True), (1.2, False)])
def test_speed_up_and_utilization(ours_s, agrees):
    def make(task):
        step_s = ours_s if task["variant"] == "ours" else 1.25
        return {**paper_stub._plan(task), "step_s": step_s, "hfu": 0.7 / step_s}

    assert found(fig12.FIGURE, make, "as fast as blocking") is agrees
    assert found(fig12.FIGURE, make, "utilization") is agrees


@pytest.mark.parametrize(("factor", "agrees"), [(0.9, True), (1.1, False), (1.0, None)])
def test_unrolling(factor, agrees):
    def make(task):
        if task["kind"] == "plan":
            return {**paper_stub._plan(task), "step_s": factor if task["config"]["overlap"]["unroll"] == 2 else 1.0}
        made = paper_stub._einsum(task)
        for row in made["rows"]:
            row["total_s"] = factor if "2 chains" in row["variant"] else 1.0
        return made

    assert found(fig14.FIGURE, make, "unrolling") is agrees


@pytest.mark.parametrize(("at_two", "at_four", "agrees"), [(1.0, 0.8, True), (0.8, 1.0, False)])
def test_the_second_direction(at_two, at_four, agrees):
    def make(task):
        made = paper_stub._einsum(task)
        for row in made["rows"]:
            row["total_s"] = {2: at_two, 4: at_four}[task["x"]] if "two" in row["variant"] else 1.0
        return made

    assert found(fig15.FIGURE, make, "second direction") is agrees


@pytest.mark.parametrize(("up", "down", "agrees"), [(1.0, 1.1, True), (1.1, 1.0, False), (1.0, 1.0, None)])
def test_schedulers(up, down, agrees):
    def make(task):
        scheduler = task["config"]["overlap"]["scheduler"]
        step_s = {"bottom_up": up, "top_down": down}.get(scheduler, 1.05)
        return {**paper_stub._plan(task), "step_s": step_s, "orders": []}

    assert found(fig16.FIGURE, make, "bottom-up") is agrees


def test_orders_of_every_size_with_what_imposed_them():
    measurements = fig16.FIGURE.measurements(False)
    assert [m.name.split()[0] for m in measurements[:6]] == [one.name for one in gpt_sizes(False)]
    imposed = {(m.task["config"]["name"], m.task["config"]["overlap"]["scheduler"]) for m in measurements[6:]}
    assert imposed == {(f"gpt_{size}", order) for size in ("32B", "64B") for order in ("bottom_up", "top_down")}
    made = records(measurements, lambda task: {**paper_stub._plan(task), "step_s": 1.1, "fits": True})
    (table,) = fig16.FIGURE.content(False, Results(made, {"code": "now"})).tables
    rows = [dict(enumerate(row)) for row in table.rows]
    assert [row[0] for row in rows if row[0]] == [one.name for one in gpt_sizes(False)]
    assert rows[0][4] == ""
    assert [row[4] for row in rows[1:3]] == ["planted barriers"] * 2
    assert [row[2:6] for row in table.rows[7:9]] == [("",) * 4] * 2, "128B is only reordered"
    assert [row[8] for row in table.rows[6:9]] == ["2.0 GiB", "4.0 GiB", "6.0 GiB"]
    assert table.rows[0][5] == "8.0 GiB"


@pytest.mark.parametrize(("asynchronous_s", "gain"), [(1.25, "1.250x"), (1.75, "1.500x")])
def test_rewritten_code_is_held_against_the_better_plain_program(asynchronous_s, gain):
    def make(task):
        found = paper_stub._rewrite(task)
        found["programs"]["plain, asynchronous"]["step_s"] = asynchronous_s
        return found

    made = records(fig_rewrite.FIGURE.measurements(False), make)
    table, lines = fig_rewrite.FIGURE.content(False, Results(made, {"code": "now"})).tables
    assert [row[0] for row in table.rows] == list(foreign.PROGRAMS)
    for row in table.rows:
        assert row[1] == "1.5 s"
        assert row[3:] == ("1 s", gain, "46.7 %", "20.0 %", "3 of 4")
    assert ("flax", "not rewritten: AllReduce over y, planted.py:2: a reason") in lines.rows


@pytest.mark.parametrize(("shift", "agrees"), [(1e-5, True), (0.5, False)])
def test_training_curves(shift, agrees):
    def make(task):
        return {"losses": [5.0, 4.0 + (shift if "overlap.mode=on" in task["changes"] else 0.0)]}

    assert found(fig_training.FIGURE, make, "does not change") is agrees


def test_findings_without_results_say_that_they_cannot_be_told():
    for figure in FIGURES:
        content = figure.content(False, Results([], {}))
        assert {finding.agrees for finding in content.findings} <= {None}
        assert len(figure.failures(False, Results([], {}))) == len(figure.measurements(False))


def test_published_points_are_those_of_the_calibration():
    known = {one.name: fig13.published_mfu(one) for one in gpt_sizes(False)}
    assert known.pop("64B") is None
    assert known == pytest.approx({"32B": 0.422, "128B": 0.483, "256B": 0.53, "512B": 0.488, "1024B": 0.535})
    assert all(fig13.published_mfu(one) is None for one in gpt_sizes(True)), "nobody published the tiny ones"


def test_markup_escapes_what_comes_from_outside():
    blocks = [("h1", "a & <b>"), Table(("x|y", "z"), [("1|2", "<script>")], "c < d"), ("li", "one"), ("li", "**two**")]
    html, text = as_html(blocks), markdown(blocks)
    assert "<script>" not in html
    assert "<h1>a &amp; &lt;b&gt;</h1>" in html
    assert "<b>two</b>" in html
    assert "| 1\\|2 | <script> |" in text
    assert "- one\n- **two**" in text


# ---- the gate, the goals ----


@pytest.mark.parametrize(("gate_s", "agrees"), [(1.01, True), (1.1, False)])
def test_gate_against_the_fastest_of_all_ways(gate_s, agrees):
    def make(task):
        found = paper_stub._einsum(task)
        times = {"ring two": 1.0, "gate": gate_s}
        return {**found, "rows": [{**row, "total_s": times.get(row["variant"], 2.0)} for row in found["rows"]]}

    assert found(fig_gate.FIGURE, make, "the gate is right") is agrees


def test_a_choice_that_is_one_of_the_forced_ways_has_its_time():
    def row(way, total_s, skipped=""):
        plans = [f"mlp: td,df->tf [gather d over x=4 (8 B)] -> {way}, gather d, one (1 ms predicted)"]
        return {"variant": way, "total_s": total_s, "skipped": skipped, "plans": [] if skipped else plans}

    ways = [row("blocking", 3.0), row("ring one", 1.0), row("gate", None, "the same program as ring one")]
    chosen, best = fig_gate.chosen_and_best(ways)
    assert (chosen["total_s"], chosen["decided"], best["variant"]) == (1.0, "ring one, gather d, one", "ring one")


def test_every_goal_can_be_missed():
    blocking = {"step_s": 1.3, "compute_s": 1.0, "memory_bytes": {"temporaries": 100}}
    good = {"step_s": 1.05, "communication_share": 0.03, "hfu": 0.79, "memory_bytes": {"temporaries": 110}}
    bad = {"step_s": 1.25, "communication_share": 0.05, "hfu": 0.74, "memory_bytes": {"temporaries": 120}}
    xla = {"step_s": 1.2}
    assert [reached for _, reached, _ in fig_goals.measure("256B", blocking, xla, good).values()] == [True] * 6
    assert [reached for _, reached, _ in fig_goals.measure("256B", blocking, xla, bad).values()] == [False] * 6
    between = {**good, "hfu": 0.76}
    assert fig_goals.measure("256B", blocking, xla, between)["HFU"][1] is False
    assert fig_goals.measure("32B", blocking, xla, between)["HFU"][1] is True
    assert fig_goals.measure("32B", blocking, None, good)["over XLA"][:2] == (None, None)


@pytest.mark.parametrize(("ours_s", "agrees"), [(1.0, True), (1.2, False)])
def test_mean_gains(ours_s, agrees):
    def make(task):
        return {**paper_stub._plan(task), "step_s": ours_s if task["variant"] == "ours" else 1.25}

    assert found(fig_goals.FIGURE, make, "over blocking") is agrees
    assert found(fig_goals.FIGURE, make, "over XLA") is agrees
