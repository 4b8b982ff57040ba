"""Plans that are really compiled: the tiny config with everything the command makes of it, one host of every family."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from overlapfx.aot.slices import make_slice_mesh, parse_slice

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
PROJECT = pathlib.Path(__file__).resolve().parent.parent
TINY = ["plan", "--config=configs/gpt.py:tiny"]


def in_a_process_of_its_own(*arguments):
    """Runs Python: inside this process every function of the reader is checked against its annotations, which takes
    longer than compiling."""
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Everything that the command makes of the tiny config on a small slice."""
    folder = tmp_path_factory.mktemp("plan")
    files = [f"--{kind}={folder}/{name}" for kind, name in (("json", "p.json"), ("png", "p.png"), ("trace", "t.json"))]
    given = ["--compare=blocking,xla,ours", "--assume=hop_latency_s=2e-6", f"--dump={folder}/text"]
    done = in_a_process_of_its_own("-m", "launch.cli", *TINY, "--topology=v4:2x2x2", *given, *files)
    return folder, done.returncode, done.stdout + done.stderr


@needs_compiler
@pytest.mark.slow
class TestRealPlan:
    def test_prints_what_matters(self, planned):
        _, code, text = planned
        assert code == 0
        for words in ("mesh axis y=4: a physical cycle", "MFU", "HFU", "the paper's figure 1", "optimizer", ": fits, "):
            assert words in text
        assert "compiling ours for v4:2x2x2: " in text
        assert "link bandwidth   the step takes" in text
        assert "hop_latency_s             2e-06 s        given by the user" in text
        assert "* the best of XLA" in text
        assert "not understood" not in text
        assert "planned in " in text

    def test_document_is_complete(self, planned):
        folder, _, _ = planned
        document = json.loads((folder / "p.json").read_text())
        assert document["config"]["model"]["d_model"] == 128
        assert sorted(map(tuple, document["coords"])) == list(itertools.product(range(2), repeat=3))
        _, placement = make_slice_mesh(parse_slice("v4:2x2x2"), document["mesh"])
        assert [tuple(coord) for coord in document["coords"]] == list(placement.order)
        assert {"jax", "libtpu", "commit"} <= document["versions"].keys()
        assert all(row["source"] for row in document["assumptions"])
        programs = {program["name"]: program for program in document["programs"]}
        assert list(programs) == ["blocking", "xla-auto", "xla-windowed", "xla-async", "ours"]
        assert document["best_of_xla"] == min(list(programs)[1:4], key=lambda name: programs[name]["total_s"])
        for program in programs.values():
            assert not program["unknown"]
            assert program["fits"]
            assert 0 < program["mfu"] <= program["hfu"] < 1
            assert 0 < program["optimizer_s"] < program["compute_s"] + program["blocking_s"]
            slow, fast = (program["step_s_by_link_factor"][factor] for factor in ("0.8", "1.25"))
            assert slow > program["total_s"] > fast
            parts = sum(seconds for kinds in program["breakdown"].values() for seconds in kinds.values())
            assert parts == pytest.approx(program["total_s"])

    def test_every_site_of_both_passes(self, planned):
        folder, _, _ = planned
        programs = {p["name"]: p for p in json.loads((folder / "p.json").read_text())["programs"]}
        assert programs["xla-auto"]["sites"] == []
        sites_of = {name: {s["name"]: s for s in programs[name]["sites"]} for name in ("blocking", "ours")}
        forward = {"attention.qkv", "attention.out", "mlp.up", "mlp.down", "logits"}
        backward = {"attention.qkv.dlhs", "mlp.up.drhs", "mlp.down.bwd", "attention.out.bwd"}
        for found in sites_of.values():
            assert forward | backward <= found.keys()
            assert all(site["compute_s"] > 0 for site in found.values())
        assert {site["state"] for site in sites_of["blocking"].values()} == {"not planned"}
        for site in sites_of["ours"].values():
            assert site["state"] == "not planned" or site["transfers"] > 0, site["name"]

    def test_files(self, planned):
        folder, _, _ = planned
        for name in ("blocking", "xla-auto", "xla-windowed", "xla-async", "ours"):
            assert (folder / f"p.{name}.png").read_bytes().startswith(b"\x89PNG")
            assert json.loads((folder / f"t.{name}.json").read_text())["traceEvents"]
            assert "is_scheduled=true" in (folder / "text" / f"{name}.hlo.txt").read_text()


# One host of every family, and two slices; `v4` is planned in full above.
HOSTS = {
    "v5e:2x4": [],
    "v6e:2x4": [],
    "v5p:2x2x2": [],
    "tpu7x:2x2x1": [],
    "v5e:2x2,slices=2": ["--config.mesh.replica=2", "--config.mesh.y=2"],
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """The documents of the tiny config on HOSTS, planned in one process of their own."""
    folder = tmp_path_factory.mktemp("families")
    calls = [
        [*TINY, f"--topology={name}", f"--json={folder}/{number}.json", *given]
        for number, (name, given) in enumerate(HOSTS.items())
    ]
    script = f"from launch import cli\nfor call in {calls!r}:\n    assert cli.main(call) == 0, call"
    done = in_a_process_of_its_own("-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: json.loads((folder / f"{number}.json").read_text()) for number, name in enumerate(HOSTS)}


@needs_compiler
@pytest.mark.slow
class TestFamilies:
    @pytest.mark.parametrize("name", HOSTS)
    def test_is_understood(self, families, name):
        (program,) = families[name]["programs"]
        assert not program["unknown"]
        assert program["fits"]
        assert 0 < program["mfu"] < 1
        assert program["blocking_s"] + program["exposed_s"] > 0
        slow, fast = (program["step_s_by_link_factor"][factor] for factor in ("0.8", "1.25"))
        assert slow > program["total_s"] > fast
        assert {site["name"] for site in program["sites"]} >= {"attention.qkv", "mlp.up", "mlp.down.bwd"}

    def test_only_slices_wait_for_each_other(self, families):
        waits = {name: "dcn" in document["programs"][0]["breakdown"] for name, document in families.items()}
        assert [name for name, waiting in waits.items() if waiting] == ["v5e:2x2,slices=2"]
        figures = {row["name"] for row in families["tpu7x:2x2x1"]["assumptions"]}
        assert "core_links" in figures
