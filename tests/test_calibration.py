"""The calibration table: every published size has its model, an error has the right sign, results are kept."""

from __future__ import annotations

import importlib.util

import pytest

from experiments import calibration
from overlapfx.aot import variants
from overlapfx.aot.slices import parse_slice
from overlapfx.train import state

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.parametrize("size", calibration.PUBLISHED)
def test_published_sizes(size):
    config = calibration.config_of(size)
    topology = parse_slice(calibration.PUBLISHED[size].topology)
    assert topology.num_chips == config.mesh.num_devices
    # Parameters follow from the module itself; names are rounded, some of them down.
    family = importlib.import_module(f"models.{config.model.family}")
    num_params = state.describe(family.build(config.model, config.overlap)).num_params()
    assert num_params == pytest.approx(float(size[:-1]) * 1e9, rel=0.05)


@needs_compiler
def test_table_has_the_sign_of_the_error():
    chosen = variants.choose("blocking,ours")
    shares = {"communication_share": 0.25, "repeated_share": 0.125}
    results = {
        # 6 N + 12 L M T is 1 560 662 127 360 FLOPs per token; 2048 x 1024 tokens, 512 chips of 275 TFLOP/s.
        calibration.key_of("256B", chosen[0]): shares
        | {"step_s": 46.49, "num_params": 257_426_000_000, "mfu_published_convention": 0.5},
        calibration.key_of("256B", chosen[1]): {"does_not_fit": "too much"},
        # The encoder's step is what was published: 1 203 183 034 368 FLOPs per token, 4096 x 512 tokens, 1024 chips.
        calibration.key_of("200B", chosen[0]): shares
        | {"step_s": 14.93, "num_params": 199_700_000_000, "mfu_published_convention": 0.6},
        calibration.key_of("200B", chosen[1]): {"does_not_fit": "too much"},
    }
    lines = calibration.table(["256B", "200B"], chosen, results).splitlines()
    assert lines[1].split() == ["256B", "blocking", "46.49", "25.0%", "12.5%", "50.0%", "43.86", "53.0%", "-3.0"]
    assert lines[2].split()[:4] == ["256B", "ours", "does", "not"]
    assert lines[3].split() == ["200B", "blocking", "14.93", "25.0%", "12.5%", "60.0%", "16.80", "53.3%", "+6.7"]


def test_utilization_by_hand():
    config = calibration.config_of("32B")
    # 40 layers of width 8192 over 1024 tokens: 12 L M T = 4 026 531 840; 512 sequences; 64 chips of 275 TFLOP/s.
    flops = (6 * 32_000_000_000 + 4_026_531_840) * 512 * 1024
    found = calibration.utilization(config, parse_slice("v4:4x4x4"), 32_000_000_000, 10.0)
    assert found == pytest.approx(flops / 10 / (64 * 275e12))


@needs_compiler
def test_results_are_told_apart_by_what_they_depend_on(monkeypatch):
    blocking, ours = variants.choose("blocking,ours")
    keys = {calibration.key_of(size, variant) for size in ("32B", "128B") for variant in (blocking, ours)}
    assert len(keys) == 4
    monkeypatch.setattr(calibration, "_source_digest", lambda: "another source")
    assert calibration.key_of("32B", ours) not in keys


def test_unknown_size(capsys):
    with pytest.raises(SystemExit) as stop:
        calibration.main(["--sizes=7B"])
    assert stop.value.code == 2
    assert "--sizes has '7B'; choose from 16B, 32B" in capsys.readouterr().err
