"""Plans of a step: what becomes of every site, what is compared, what is printed, what is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import re
import types

import pytest

from launch import cli
from overlapfx.aot import device_order, plan_files, plan_text, sites, slices, variants
from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.program import Compute, Program, Start, Transfer, Wait
from overlapfx.aot.slices import make_slice_mesh, parse_slice
from overlapfx.aot.timeline import walk
from overlapfx.chips import TPU_V4
from overlapfx.config import MeshConfig, Overlap
from overlapfx.plan.decide import CallSite, Plan, Slot
from overlapfx.plan.torus import Torus

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
TINY = ["plan", "--config=configs/gpt.py:tiny"]
GATHER = Slot("gather", 0, "d", ("x",), 4, 32, 3_000_000)
OTHER = Slot("gather", 1, "d", ("y",), 2, 32, 1_000_000)


# ---- sites: planned, scheduled ----


RING = Plan(GATHER, "ring", "two", unroll=2, reason="most bytes of 2 collectives")


def call(name="mlp.up", plan=RING, ways=()):
    return CallSite(name, ("btd,df->btf",), (GATHER, OTHER), plan, ways=ways, flops=1e6)


def permute(name, scope):
    pairs = tuple((i, (i + 1) % 4) for i in range(4))
    return Transfer(name, f"jit(step)/jvp({scope})/send", "collective-permute", "ici", 1000, pairs=pairs)


def gather(name, scope, size):
    groups = tuple(tuple(range(start, start + size)) for start in range(0, 4, size))
    return Transfer(name, f"jit(step)/{scope}/all_gather", "all-gather", "ici", 1000, groups=groups)


def reported(calls, *steps, products=()):
    program = Program("p", steps, 4, {}, {})
    torus = Torus((4,), (True,))
    timeline = walk(program, torus, torus.coordinates(), Assumptions.for_chip(TPU_V4))
    return {site.name: site for site in sites.report_sites(calls, program, timeline, dict(products))}


def work(scope, cycles=1000):
    return Compute(f"fusion.{scope}", f"jit(step)/{scope}/dot_general", "einsum", cycles, 0.0, 0.0)


def overlapped(transfer, *between):
    return (Start(transfer), *between, Wait(transfer.name, f"{transfer.name}-done"))


class TestSites:
    def test_nothing_between_start_and_done(self):  # C13
        found = reported([call()], *overlapped(permute("p", "mlp.up")), work("mlp.up"))["mlp.up"]
        assert (found.state, found.transfers, found.hidden) == ("planned, not scheduled", 1, 0)
        assert found.exposed_s > 0
        assert "planned, not scheduled (0 of 1 transfers have work beside them)" in plan_text.sites_table([found])

    def test_no_start_at_all(self):
        found = reported([call()], work("mlp.up"))["mlp.up"]
        assert (found.state, found.transfers) == ("planned, not scheduled", 0)

    def test_work_between(self):
        found = reported([call()], *overlapped(permute("p", "mlp.up"), work("elsewhere")))["mlp.up"]
        assert (found.state, found.transfers, found.hidden) == ("scheduled", 1, 1)
        assert found.compute_s == 0.0  # the work beside the transfer belongs to another scope

    def test_some_of_them(self):
        steps = overlapped(permute("p", "mlp.up"), work("mlp.up")) + overlapped(permute("q", "mlp.up"))
        found = reported([call()], *steps)["mlp.up"]
        assert (found.state, found.transfers, found.hidden) == ("scheduled in part", 2, 1)
        assert found.compute_s == pytest.approx(1000 / 1.05e9)

    def test_what_was_not_planned_does_not_count(self):
        blocking = call(plan=Plan(None, reason="mode off"))
        found = reported([blocking], *overlapped(gather("g", "mlp.up", 4), work("mlp.up")))["mlp.up"]
        assert (found.state, found.transfers, found.decision) == ("not planned", 0, "blocking")
        assert found.reasons == ("mode off",)

    def test_other_collectives_of_a_striped_site_do_not_count(self):
        striped = call(plan=Plan(GATHER, "stripe", stripe_label="t", stripes=4))
        weights = overlapped(gather("weights", "mlp.up", 2), work("mlp.up"))
        assert reported([striped], *weights)["mlp.up"].state == "planned, not scheduled"
        pieces = overlapped(gather("piece", "mlp.up", 4), work("mlp.up"))
        assert reported([striped], *weights, *pieces)["mlp.up"].transfers == 1

    def test_names_are_matched_whole(self):
        gradient = call("mlp.up.dlhs")
        steps = overlapped(permute("p", "mlp.up.dlhs"), work("mlp.up.dlhs"))
        found = reported([call(), call(), gradient], *steps)
        assert [site.state for site in found.values()] == ["planned, not scheduled", "scheduled"]
        assert len(found["mlp.up"].calls) == 1  # traced twice, decided once

    def test_prediction_beside_the_schedule(self):
        ring = dataclasses.replace(RING, seconds=2e-6)
        products = {"/jit(step)/jvp(mlp.up)": 3e6, "/jit(step)/rematted/mlp.up": 2e6, "/jit(step)/mlp.up.drhs": 9e9}
        steps = (work("mlp.up", 2100), *overlapped(permute("p", "mlp.up")), work("mlp.up.drhs"))
        found = reported([call(plan=ring, ways=(ring,)), call("mlp.up.drhs")], *steps, products=products)
        site = found["mlp.up"]
        assert site.executions == 5
        assert site.predicted_s == pytest.approx(1e-5)
        assert site.scheduled_s == pytest.approx(2e-6 + site.exposed_s)
        assert site.error == pytest.approx(1e-5 / site.scheduled_s - 1)
        assert found["mlp.up.drhs"].predicted_s is None  # the gate had nothing to choose
        text = plan_text.sites_table(list(found.values()))
        assert re.search(rf"10\.0 us +{re.escape(f'{site.error:+.0%}')} ", text)
        assert f"within {abs(site.error):.0%} at half of the 1 sites that it decided" in text

    def test_no_prediction_where_executions_are_not_known(self):
        site = reported([call(ways=(RING,))], work("mlp.up"), products={"/mlp.up": math.nan})["mlp.up"]
        assert site.predicted_s is None and site.as_dict()["executions"] is None

    def test_table_shows_candidates_with_reasons(self):
        text = plan_text.sites_table(list(reported([call()], work("mlp.up")).values()))
        assert "ring, gather d, two, unroll 2" in text
        assert "gather d over x=4, 3 MB; gather d over y=2, 1 MB: most bytes of 2 collectives" in text


# ---- what is compared ----


class TestVariants:
    def test_config_alone_by_default(self):
        assert variants.choose("") == (variants.OURS,)

    def test_groups_keep_their_order(self):
        names = [variant.name for variant in variants.choose("blocking, xla,ours")]
        assert names == ["blocking", "xla-auto", "xla-windowed", "xla-async", "ours"]
        assert [variant.name for variant in variants.choose("ours,blocking")] == ["ours", "blocking"]
        names = [variant.name for variant in variants.choose("xla-async,xla")]
        assert names == ["xla-async", "xla-auto", "xla-windowed"]

    def test_unknown_group(self):
        with pytest.raises(ValueError, match="--compare has 'theirs'; choose from blocking, xla, xla-auto, "):
            variants.choose("blocking,theirs")

    def test_blocking_moves_the_same_dtype(self):
        configured = Overlap(accum_dtype="bfloat16", method="ring")
        blocking, ours = (variants.choose(name)[0].overlap(configured) for name in ("blocking", "ours"))
        assert (blocking.mode, blocking.accum_dtype) == ("off", "bfloat16")
        assert ours == configured

    def test_given_options_go_before(self):
        options = variants.options_of(variants.OURS, {"xla_enable_async_all_gather": "false", "xla_other": "1"})
        assert options["xla_enable_async_all_gather"] == "false"
        assert options["xla_tpu_enable_latency_hiding_scheduler"] == "true"
        assert options["xla_other"] == "1"

    @pytest.mark.parametrize(
        ("texts", "sentence"),
        [
            (["xla_a"], "--flag 'xla_a' is not of the form NAME=VALUE"),
            (["xla_a="], "--flag 'xla_a=' is not of the form NAME=VALUE"),
            (["xla_a=1", "xla_a=2"], "--flag sets xla_a to 1 and to 2"),
        ],
    )
    def test_wrong_settings(self, texts, sentence):
        with pytest.raises(ValueError, match=sentence):
            variants.parse_settings("--flag", texts)

    def test_figures(self):
        assert variants.parse_figures("--assume", ["link_bytes_per_s=50e9"]) == {"link_bytes_per_s": 50e9}
        with pytest.raises(ValueError, match="--assume link_bytes_per_s=fast is not a number"):
            variants.parse_figures("--assume", ["link_bytes_per_s=fast"])


# ---- the order of real devices ----


def fakes(kind, shape, *, corner=(0, 0, 0), slice_index=None, cores=1):
    """Devices as JAX shows them, in an order that is of no use."""
    places = itertools.product(*(range(size) for size in shape))
    made = []
    for place, core in itertools.product(places, range(cores)):
        coords = [at + offset for at, offset in zip(place, corner, strict=False)] + [0] * (3 - len(shape))
        made.append(types.SimpleNamespace(device_kind=kind, coords=coords, core_on_chip=core, slice_index=slice_index))
    return made[1::2] + made[::2]


def steps(ordered, torus, corner=(0, 0, 0)):
    """Hops from each device to the next one along x."""
    at = [tuple(c - o for c, o in zip(device.coords, corner, strict=True))[: len(torus.shape)] for device in ordered]
    return [torus.distance(a, b) for a, b in itertools.pairwise(at)]


def place(device):
    return getattr(device, "slice_index", None), tuple(device.coords), device.core_on_chip


class TestDeviceOrder:
    @pytest.mark.parametrize("corner", [(0, 0, 0), (4, 8, 2)])
    def test_x_runs_over_a_physical_cycle(self, corner):
        ordered = device_order.physical_order(fakes("TPU v4", (2, 2, 4), corner=corner), MeshConfig(y=1, x=16))
        torus = Torus((2, 2, 4), (False, False, True))
        assert steps(ordered, torus, corner) == [1] * 15
        assert steps([ordered[-1], ordered[0]], torus, corner) == [1]

    def test_no_permute_crosses_the_wrap_around_of_v5e(self):
        ordered = device_order.physical_order(fakes("TPU v5 lite", (16, 16)), MeshConfig(y=16, x=16))
        line = Torus((16, 16), (False, False))
        rings = [ordered[start : start + 16] for start in range(0, 256, 16)]
        assert max(hops for ring in rings for hops in steps([*ring, ring[0]], line)) <= 2

    def test_replicas_are_laid_over_slices(self):
        devices = fakes("TPU v4", (2, 2, 1), slice_index=1) + fakes("TPU v4", (2, 2, 1), slice_index=0)
        ordered = device_order.physical_order(devices, MeshConfig(y=2, x=2, replica=2))
        assert [device.slice_index for device in ordered] == [0] * 4 + [1] * 4
        assert device_order.physical_order(devices, MeshConfig(y=4, x=2)) is None

    @pytest.mark.parametrize(
        ("devices", "mesh"),
        [
            (fakes("cpu", (2, 2, 1)), MeshConfig(y=2, x=2)),
            (fakes("TPU v4", (2, 2, 1))[:3], MeshConfig(y=3, x=1)),
            (fakes("TPU v4", (2, 2, 1)), MeshConfig(y=2, x=4)),
            (fakes("TPU v4", (2, 1, 1)) + fakes("TPU v5p", (2, 1, 1), corner=(0, 1, 0)), MeshConfig(y=2, x=2)),
        ],
        ids=["no TPU", "no box", "other number", "two kinds"],
    )
    def test_nothing_to_decide_by(self, devices, mesh):
        assert device_order.physical_order(devices, mesh) is None

    @needs_compiler
    @pytest.mark.parametrize(
        ("topology", "axes"),
        [
            ("v4:2x2x4", {"y": 4, "x": 4}),
            ("v5e:4x4", {"y": 2, "x": 8}),
            ("tpu7x:2x2x1", {"y": 2, "x": 4}),
            ("v5p:2x2x2,slices=2", {"replica": 2, "y": 2, "x": 4}),
        ],
    )
    def test_same_as_in_a_plan(self, topology, axes):
        mesh, _ = make_slice_mesh(parse_slice(topology), axes)
        shuffled = slices.describe(parse_slice(topology))[::-1]
        ordered = device_order.physical_order(shuffled, MeshConfig(**axes))
        assert list(map(place, ordered)) == list(map(place, mesh.devices.flat))


# ---- refusals ----


def refused(capsys, *arguments):
    """The one sentence on standard error of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main([*TINY, *arguments])
    assert stop.value.code == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("overlapfx plan: ") and sentence.count("\n") == 1
    return sentence


class TestRefusals:
    def test_unknown_topology_lists_the_legal_ones(self, capsys):
        sentence = refused(capsys, "--topology=v9:4x4")
        assert all(name in sentence for name in ("'v9:4x4'", "v4: 2x2x1", "v5e:", "v5p:", "v6e:", "tpu7x:"))

    @needs_compiler
    def test_mesh_that_does_not_fill_the_slice(self, capsys):
        assert "mesh y=4, x=2 has 8 devices but v4:4x4x4 has 64" in refused(capsys, "--topology=v4:4x4x4")

    @needs_compiler
    def test_devices_of_tpu7x_are_counted_by_cores(self, capsys):
        assert "has 8 devices but tpu7x:2x2x2 has 16" in refused(capsys, "--topology=tpu7x:2x2x2")

    def test_more_devices_than_the_batch_can_feed(self, capsys):
        sentence = refused(capsys, "--topology=v4:4x4x8", "--config.mesh.y=64", "--config.data.global_batch=32")
        assert "data.global_batch is 32" in sentence and "64" in sentence

    def test_missing_compiler(self, capsys, monkeypatch):
        monkeypatch.setattr(slices.importlib.util, "find_spec", lambda name: None)
        assert "pip install 'overlapfx[plan]'" in refused(capsys, "--topology=v4:2x2x2")

    @needs_compiler
    def test_option_that_the_compiler_refuses(self, capsys):
        sentence = refused(capsys, "--topology=v4:2x2x2", "--flag=xla_no_such_flag=1")
        assert "refuses an option" in sentence and "xla_no_such_flag" in sentence

    @needs_compiler
    def test_unknown_assumption(self, capsys):
        sentence = refused(capsys, "--topology=v4:2x2x2", "--assume=warp=9")
        assert "no assumption is called 'warp'" in sentence and "link_bytes_per_s" in sentence

    def test_unknown_program(self, capsys):
        assert "choose from blocking, xla, xla-auto, xla-windowed, xla-async, ours" in refused(
            capsys, "--topology=v4:2x2x2", "--compare=mine"
        )

    @needs_compiler
    @pytest.mark.parametrize(
        ("argument", "there"),
        [("--json={}/a.json", "a.json"), ("--png={}/a.png", "a.blocking.png"), ("--dump={}", "ours.hlo.txt")],
    )
    def test_files_are_never_overwritten(self, capsys, tmp_path, argument, there):
        (tmp_path / there).write_text("precious")
        given = argument.format(tmp_path)
        sentence = refused(capsys, "--topology=v4:2x2x2", "--compare=blocking,ours", given)
        assert f"{tmp_path / there} exists" in sentence
        assert (tmp_path / there).read_text() == "precious"

    @needs_compiler
    def test_folder_that_is_a_file(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        sentence = refused(capsys, "--topology=v4:2x2x2", f"--trace={tmp_path}/file/t.json")
        assert f"{tmp_path}/file/t.json cannot be written since {tmp_path}/file is a file" in sentence

    @needs_compiler
    def test_folder_without_permission(self, capsys, tmp_path, monkeypatch):
        # The superuser, as whom tests may run, is never refused by the file system.
        def refuse(**_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(plan_files.tempfile, "TemporaryFile", refuse)
        sentence = refused(capsys, "--topology=v4:2x2x2", f"--dump={tmp_path}/new/folder")
        assert f"ours.hlo.txt cannot be written (Permission denied in {tmp_path})" in sentence
        assert list(tmp_path.iterdir()) == []

    @needs_compiler
    def test_one_file_for_two_things(self, capsys, tmp_path):
        sentence = refused(capsys, "--topology=v4:2x2x2", f"--json={tmp_path}/a", f"--trace={tmp_path}/a")
        assert f"{tmp_path}/a is asked for twice" in sentence


@needs_compiler
@pytest.mark.slow
def test_what_does_not_fit_has_its_own_exit_code(capsys, tmp_path):
    arguments = ["--topology=v4:2x2x1", "--config.mesh.y=2", "--config.model.seq_len=65536"]
    assert cli.main([*TINY, *arguments, f"--json={tmp_path}/p.json"]) == 3
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "model.remat" in text
    (program,) = json.loads((tmp_path / "p.json").read_text())["programs"]
    assert program["fits"] is False and "T of temporaries" in program["why"]
