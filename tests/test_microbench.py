"""The microbenchmark: every site runs, tables and records say what was measured, errors are one sentence."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from core_harness import simulated_mesh

from experiments import bench_run, bench_sites, microbench
from experiments.bench_run import Row
from overlapfx.config import Overlap

PROJECT = pathlib.Path(__file__).resolve().parent.parent
TINY = bench_sites.Sizes(tokens=4, width=8, hidden=16, heads=4, head_dim=2)
SMALL = ["--tokens=64", "--width=256", "--hidden=512", "--heads=4", "--head_dim=128"]


def rows_of(results: Any) -> list[Row]:
    return [result for result in results if isinstance(result, Row)]


@pytest.mark.parametrize("site", bench_sites.make_sites(TINY, 2))
def test_every_site_is_timed(site: str) -> None:
    variants = {name: bench_sites.variants()[name] for name in ("blocking", "ring one", "exchange")}
    made = bench_sites.make_sites(TINY, 2)[site]
    mesh = simulated_mesh({"y": 2, "x": 2})
    rows = rows_of(bench_run.time_on_devices(made, mesh, "forward+backward", variants, num_runs=3))
    by_name = {row.variant: row for row in rows}
    assert set(by_name) == set(variants)
    for row in (by_name["blocking"], by_name["ring one"]):
        assert row.total_s is not None and row.total_s > 0
        assert row.plans[0].startswith(f"{site}: {made.spec} [")
        assert len(row.plans) == (2 if "out_scatter" in made.collectives else 3)
    assert bool(by_name["exchange"].skipped) == ("out_scatter" not in made.collectives)


def test_a_program_is_timed_once() -> None:
    site = bench_sites.make_sites(TINY, 2)["mlp_up"]
    mesh = simulated_mesh({"y": 2, "x": 4})
    traced, skipped = bench_run.trace_all(site, mesh, "forward", bench_sites.variants(), "float32")
    assert [t.variant for t in traced] == ["blocking", "ring one", "ring two", "ring two whole", "stripe", "prefetch"]
    assert {row.variant: row.skipped for row in skipped} == {
        "ring one, 2 chains": "the same program as ring one",
        "ring one, parity": "the same program as ring one",
        "ring two, 2 chains": "the same program as ring two",
        "exchange": "exchange needs a scatter: ring instead",
    }


def test_flops_by_hand() -> None:
    sites = bench_sites.make_sites(TINY, 2)
    assert sites["mlp_up"].flops("forward") == 2 * 8 * 8 * 16  # two y shards of 4 tokens
    assert sites["attention_out"].flops("forward+backward") == 3 * 2 * 8 * 4 * 2 * 8


def test_a_mesh_that_does_not_divide_is_refused() -> None:
    site = bench_sites.make_sites(TINY, 1)["attention_out"]
    with pytest.raises(
        ValueError, match="attention_out: label 'n' of size 4 is not a multiple of mesh axis x of size 3"
    ):
        bench_sites.arguments(site, simulated_mesh({"y": 1, "x": 3}), "float32")


def test_table() -> None:
    rows = [
        Row("s", "forward", "blocking", total_s=0.004, spread_s=0.001),
        Row("s", "forward", "ring one", total_s=0.002, spread_s=0.0005),
        Row("s", "forward", "exchange", skipped="no scatter"),
    ]
    assert microbench.table("site", rows).splitlines() == [
        "",
        "site",
        "ms                          median      spread    gain",
        "blocking                     4.000       1.000   1.00x",
        "ring one                     2.000       0.500   2.00x",
        "exchange                left out: no scatter",
    ]
    walked = [Row("s", "forward", "blocking", total_s=0.004, compute_s=0.003, exposed_s=0.0, blocking_s=0.001)]
    assert microbench.table("site", walked, peak_s=0.0025).splitlines()[2:] == [
        "arithmetic at peak 2.500 ms",
        "ms                        estimate     compute     exposed    blocking    gain",
        "blocking                     4.000       3.000       0.000       1.000   1.00x",
    ]


def test_records_are_appended(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "results" / "bench.jsonl"
    setup = microbench.set_up(microbench.parse(["--tokens=4"]))
    for total_s in (0.1, 0.2):
        made = microbench.record(setup, [Row("s", "forward", "blocking", total_s=total_s)])
        microbench.append_record(path, made)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["rows"][0]["total_s"] for record in records] == [0.1, 0.2]
    for record in records:
        assert (record["schema"], record["kind"], record["mesh"]) == (1, "simulated", {"y": 2, "x": 4})
        assert record["sizes"]["tokens"] == 4
        assert {"python", "jax", "jaxlib"} <= set(record["versions"])


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, "-m", "experiments.microbench", *arguments]
    return subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--runs=0"], "--runs is 0; it must be at least 1"),
        (["--option=fast"], "--option 'fast' is not of the form NAME=VALUE"),
        (["--quick"], "unrecognized arguments: --quick"),
    ],
)
def test_wrong_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        microbench.parse(arguments)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"x": 3}, "--x=3 does not divide 8 devices"),
        ({"site": ["mlp"]}, "--site 'mlp' does not exist; choose from mlp_up, mlp_down"),
        ({"variant": ["ring"]}, "--variant 'ring' does not exist; choose from blocking, ring one"),
        ({"width": 0}, "--width is 0; it must be at least 1"),
        ({"topology": "v4:3x3"}, "v4:3x3"),
        ({"heads": 3}, "attention_out: label 'n' of size 3 is not a multiple of mesh axis x of size 4"),
    ],
)
def test_wrong_values(arguments: dict[str, Any], says: str) -> None:
    given = microbench.parse([])
    vars(given).update(arguments)
    with pytest.raises(ValueError, match=says):
        microbench.set_up(given)


@pytest.mark.slow
def test_the_command_on_simulated_devices(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bench.jsonl"
    done = run_command(
        "--devices=4", "--x=2", "--site=mlp_down", "--variant=ring one", "--runs=2", *SMALL, "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    assert "mlp_down forward+backward: tf,fd->td" in done.stdout
    assert "compiled 2 programs" in done.stderr
    (record,) = map(json.loads, path.read_text().splitlines())
    assert [(row["which"], row["variant"]) for row in record["rows"]] == [
        (which, variant) for which in bench_sites.PASSES for variant in ("blocking", "ring one")
    ]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
def test_the_command_for_a_slice(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bench.jsonl"
    done = run_command(
        "--topology=v4:2x2x1", "--x=2", "--site=mlp_up", "--variant=ring one", *SMALL, "--json", str(path)
    )
    assert done.returncode == 0, done.stderr
    assert "arithmetic at peak" in done.stdout
    (record,) = map(json.loads, path.read_text().splitlines())
    assert (record["kind"], record["topology"], record["mesh"]) == ("compiled", "v4:2x2x1", {"y": 2, "x": 2})
    for row in record["rows"]:
        parts = row["compute_s"] + row["exposed_s"] + row["blocking_s"]
        assert row["compute_s"] > 0
        assert parts <= row["total_s"] * (1 + 1e-9)
        assert math.isfinite(row["total_s"])


def test_the_blocking_variant_is_the_baseline() -> None:
    name, overlap = next(iter(bench_sites.variants().items()))
    assert (name, overlap) == ("blocking", Overlap(method="blocking"))
