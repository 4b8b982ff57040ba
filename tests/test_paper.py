"""The command behind the paper's figures: pages show what is stored, nothing is computed twice, failures are told."""

from __future__ import annotations

import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from experiments import fig01, fig12, fig16, fig_rewrite, fig_training
from experiments.paper import code, command
from experiments.paper.__main__ import FIGURES
from experiments.paper.applications import applications
from launch.sweep_store import Store
from overlapfx.ops import order

PROJECT = pathlib.Path(__file__).resolve().parent.parent
STUB = str(PROJECT / "tests" / "paper_stub.py")
QUICK = ("--quick", "--workers=2")


def environment(**more: object) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{PROJECT}{os.pathsep}{PROJECT / 'tests'}",
        "XLA_FLAGS": "",
        **{name: str(value) for name, value in more.items()},
    }


def call(out: pathlib.Path, *arguments: str, program: tuple[str, ...] = (STUB,), **variables: object):
    """The command in a process of its own."""
    words = [sys.executable, *program, *QUICK, f"--out={out}", *arguments]
    return subprocess.run(
        words, cwd=PROJECT, env=environment(**variables), capture_output=True, text=True, timeout=580, check=False
    )


def stored(out: pathlib.Path) -> dict[str, dict]:
    """Records by name."""
    with Store(out / "results") as store:
        return {record["name"]: record for record in store.results.values()}


def rows(page: str, title: str) -> dict[str, list[str]]:
    """Cells of the first table below a heading, by the first one."""
    section = page.split(f"## {title}")[1].split("\n## ")[0]
    first = section[section.index("\n| ") + 1 :].split("\n\n")[0]
    lines = [line.strip("| \n").split(" | ") for line in first.splitlines()]
    table = {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines[2:]}
    assert table, title
    return table


def check_pages(out: pathlib.Path) -> None:
    """Every page and picture is there; the numbers of both pages are those of the store."""
    page, html, records = (out / "paper.md").read_text(), (out / "paper.html").read_text(), stored(out)
    for figure in FIGURES:
        assert f"## {figure.title}\n" in page
        assert figure.title in html
        if figure.name.startswith("fig"):
            assert (out / f"{figure.name}.png").read_bytes().startswith(b"\x89PNG")
            assert f"]({figure.name}.png)" in page
    speeds = rows(page, fig12.FIGURE.title)
    parts = rows(page, fig01.FIGURE.title)
    for one in applications(quick=True):
        blocking, ours, best = (
            records[f"{one.name} {one.topology} {name}"]["result"] for name in ("blocking", "ours", "xla-async")
        )
        cells = speeds[one.name]
        shares = [f"{100 * result['mfu']:.1f} %" for result in (blocking, best, ours)]
        assert cells[3] == " / ".join(shares)
        assert cells[4] == f"{100 * ours['hfu']:.1f} %"
        gains = [f"{slow['step_s'] / ours['step_s']:.3f}x" for slow in (blocking, best)]
        assert cells[5:7] == gains
        assert f"<td>{gains[0]}</td><td>{gains[1]}</td><td>{best['name']}</td>" in html
        computing = sum(blocking["breakdown"]["compute"].values()) / blocking["step_s"]
        assert parts[one.name][1] == f"{100 * computing:.1f} %"
        assert sum(float(cell.removesuffix(" %")) for cell in parts[one.name][1:]) == pytest.approx(100, abs=0.4)
    losses = rows(page, fig_training.FIGURE.title)["configs/bert.py:tiny"]
    runs = {
        mode: next(r for name, r in records.items() if name.startswith(f"configs/bert.py:tiny overlap {mode}"))
        for mode in ("off", "on")
    }
    off, on = (runs[mode]["result"]["losses"] for mode in ("off", "on"))
    assert losses[2:4] == [f"{off[-1]:.6f}", f"{on[-1]:.6f}"]
    assert float(losses[4]) == pytest.approx(max(abs(a - b) for a, b in zip(off, on, strict=True)), rel=1e-2, abs=1e-12)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All figures with made-up results."""
    out = tmp_path_factory.mktemp("paper")
    done = call(out)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done


def test_pages_show_what_is_stored(whole):
    out, done = whole
    check_pages(out)
    assert "Without a result" not in (out / "paper.md").read_text()
    assert re.search(r"\[\d+/\d+\] .*: 1\.\d+ s per step", done.stderr)
    records = stored(out).values()
    assert {r["commit"] for r in records} == {"abc123"}
    assert all(r["basis"]["versions"]["jax"] and r["basis"]["code"] == code.code_hash() for r in records)


def test_a_second_call_computes_nothing_and_makes_the_same_pages(whole, tmp_path):
    out, _ = whole
    before = {path.name: path.read_bytes() for path in out.glob("*.*")}
    worked = tmp_path / "worked"
    again = call(out, PAPER_STUB_WORKED=worked)
    assert again.returncode == 0
    assert "0 to compute" in again.stdout
    assert not worked.exists()
    assert {path.name: path.read_bytes() for path in out.glob("*.*")} == before


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_every_figure_alone(whole, tmp_path, figure):
    module = __import__(f"experiments.{figure.name}", fromlist=["FIGURE"])
    assert module.FIGURE is figure
    arguments = ["--quick", "--stored", f"--results={whole[0] / 'results'}", f"--out={tmp_path}"]
    with Store(whole[0] / "results"):  # as by a process that is still adding to them
        assert command.main(figure.name, (figure,), arguments) == 0
    page = (tmp_path / f"{figure.name}.md").read_text()
    assert "Without a result" not in page
    table = next(iter(rows(page, figure.title).values()))
    assert table == next(iter(rows((whole[0] / "paper.md").read_text(), figure.title).values()))


def test_killed_and_called_again_it_computes_nothing_twice(tmp_path):
    worked = tmp_path / "worked"
    words = [sys.executable, STUB, *QUICK, f"--out={tmp_path}", "--figures=fig12,fig_chips"]
    variables = environment(PAPER_STUB_WORKED=worked, PAPER_STUB_SLEEP_S=0.1)
    process = subprocess.Popen(words, cwd=PROJECT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    store = tmp_path / "results" / "results.jsonl"
    deadline = time.monotonic() + 120
    while not store.exists() or store.read_bytes().count(b"\n") < 6:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    finished = {json.dumps(record["task"], sort_keys=True) for record in stored(tmp_path).values()}
    again = call(tmp_path, "--figures=fig12,fig_chips", PAPER_STUB_WORKED=worked)
    assert again.returncode == 0, again.stderr
    wanted = {m.identity() for f in FIGURES if f.name in ("fig12", "fig_chips") for m in f.measurements(True)}
    assert {record["identity"] for record in stored(tmp_path).values()} == wanted
    times = collections.Counter(worked.read_text().splitlines())
    assert len(times) == len(wanted)
    # A task in hand when the command was killed may be done again, one that was stored may not.
    for text, count in times.items():
        task = json.dumps({k: v for k, v in json.loads(text).items() if k != "kind"}, sort_keys=True)
        assert count == 1 or task not in finished


def test_failures_are_told_and_stop_nothing(tmp_path):
    planted = '"family": "t5":no room;"family": "moe":error;"family": "bert":kill'
    done = call(tmp_path, "--figures=fig12", PAPER_STUB_MISBEHAVE=planted)
    assert done.returncode == 0, done.stderr
    page, html = (tmp_path / "paper.md").read_text(), (tmp_path / "paper.html").read_text()
    assert "- T5_300B v4:2x2x1 ours: the compiler finds <no> room" in page
    assert "the compiler finds &lt;no&gt; room" in html
    assert "<no>" not in html
    assert "- GLaM_1T v4:2x2x1 blocking: ValueError: planted | here" in page
    assert re.search(r"- MLPerf_200B v4:2x2x1 ours: the worker was killed by SIGKILL", page)
    table = rows(page, fig12.FIGURE.title)
    assert table["GPT_1T"][5].endswith("x")
    for name in ("T5_300B", "GLaM_1T", "MLPerf_200B"):
        assert table[name][5] == "n/a"
    again = call(tmp_path, "--figures=fig12", "--retry")
    assert "6 to compute" in again.stdout, "what died or failed is tried again, what does not fit is not"
    assert rows((tmp_path / "paper.md").read_text(), fig12.FIGURE.title)["GLaM_1T"][5].endswith("x")


def test_without_any_result_it_fails(tmp_path):
    done = call(tmp_path, "--figures=fig_training", PAPER_STUB_MISBEHAVE="tiny:error")
    assert done.returncode == command.FAILED
    assert "ValueError: planted | here" in (tmp_path / "paper.md").read_text()


def test_code_that_changes_meanwhile_is_noticed(tmp_path):
    done = call(tmp_path, "--figures=fig_training", PAPER_STUB_CODE="another")
    assert done.returncode == command.FAILED
    assert "the code changed" in done.stderr
    assert stored(tmp_path) == {}
    assert not (tmp_path / "paper.md").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--figures=fig99"], ["fig99", "fig12"]), (["--workers=0"], ["--workers"]), (["--nonsense"], ["--nonsense"])],
)
def test_bad_arguments_are_one_sentence(tmp_path, capsys, arguments, words):
    with pytest.raises(SystemExit) as left:
        command.main("paper", FIGURES, ["--quick", f"--out={tmp_path / 'out'}", *arguments])
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert all(word in said for word in words)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        command.main("paper", FIGURES, ["--stored", f"--out={tmp_path / 'file' / 'out'}"])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "cannot be made (Not a directory); choose another folder." in said


def test_a_page_of_somebody_else_is_not_overwritten(tmp_path, capsys):
    mine = tmp_path / "paper.md"
    mine.write_text("my own notes")
    with pytest.raises(SystemExit):
        command.main("paper", FIGURES, ["--quick", "--stored", f"--out={tmp_path}"])
    assert str(mine) in capsys.readouterr().err
    assert mine.read_text() == "my own notes"


@pytest.mark.slow
def test_the_quick_variant_for_real(tmp_path):
    pytest.importorskip("libtpu")
    program = ("-m", "experiments.paper")
    done = call(tmp_path, program=program)
    assert done.returncode == 0, done.stderr[-3000:]
    check_pages(tmp_path)
    page = (tmp_path / "paper.md").read_text()
    assert "Without a result" not in page, page.split("Without a result")[1][:2000]
    assert rows(page, fig_rewrite.FIGURE.title)["flax"][6] == "6 of 8", "AllReduces of gradients stay"
    assert rows(page, fig16.FIGURE.title)["bottom_up"][2] in order.MECHANISMS
    rounding = rows(page, "Beyond the paper: accuracy of ring accumulation")
    assert float(rounding["ring one, bfloat16"][2]) > 100 * float(rounding["ring one, float32"][2])
    again = call(tmp_path, program=program)
    assert "0 to compute" in again.stdout
    assert (tmp_path / "paper.md").read_text() == page
