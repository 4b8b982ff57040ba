"""The calibration table: every published size has its model, an error has the right sign, results are kept."""

from __future__ import annotations

import importlib.util

import pytest

from experiments import calibration
from models import gpt
from overlapfx.aot import variants
from overlapfx.aot.slices import parse_slice
from overlapfx.train import state

needs_compiler = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.mark.parametrize("size", calibration.PUBLISHED)
def test_published_sizes(size):
    config = calibration.config_of(size)
    topology = parse_slice(calibration.PUBLISHED[size][2])
    assert topology.num_chips == config.mesh.num_devices
    # Parameters follow from the module itself; names are rounded, some of them down.
    num_params = state.describe(gpt.build(config.model, config.overlap)).num_params()
    assert num_params == pytest.approx(float(size[:-1]) * 1e9, rel=0.05)


@needs_compiler
def test_table_has_the_sign_of_the_error():
    chosen = variants.choose("blocking,ours")
    result = {"step_s": 10.0, "communication_share": 0.25, "mfu_published_convention": 0.5}
    results = {
        calibration.key_of("256B", chosen[0]): result,
        calibration.key_of("256B", chosen[1]): {"does_not_fit": "too much"},
    }
    lines = calibration.table(["256B"], chosen, results).splitlines()
    assert lines[1].split() == ["256B", "blocking", "10.00", "25.0%", "50.0", "%", "53.0", "%", "-3.0"]
    assert lines[2].split()[:4] == ["256B", "ours", "does", "not"]
    assert "models/bert.py" in lines[3] and "16.8 s" in lines[3]


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
