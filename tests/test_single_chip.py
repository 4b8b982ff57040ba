"""Utilization of one chip: what a run on CPU stores, which steps count, what is refused."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import types

import jax
import pytest

from experiments import single_chip
from launch.config_file import load_config
from overlapfx import chips
from overlapfx.config import from_config_dict, to_dict
from overlapfx.train.metrics import Utilization

PROJECT = pathlib.Path(__file__).resolve().parent.parent
TINY = ["--config=configs/gpt.py:tiny", "--config.model.num_layers=1", "--config.data.global_batch=2"]
H100 = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu")


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "experiments.single_chip", *arguments],
        cwd=PROJECT,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def results(out):
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def records(times_s, tokens=1000):
    steps = [
        {"kind": "train", "step": number, "step_s": step_s, "tokens": tokens, "loss": 1.0}
        for number, step_s in enumerate(times_s, start=1)
    ]
    return [{"kind": "compile", "step": 0, "compile_s": 7.0}, *steps]


@pytest.fixture
def tiny():
    return from_config_dict(load_config("configs/gpt.py:tiny", single_chip.ONE_DEVICE))


@pytest.mark.slow
def test_runs_on_cpu_and_keeps_what_was_there(tmp_path):
    out = tmp_path / "out"
    done = command(*TINY, "--steps=6", "--skip=2", f"--out={out}")
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stdout
    assert "MFU n/a: a CPU shows that the command works" in done.stdout
    (record,) = first = results(out)
    assert (record["device_kind"], record["attention"]) == ("cpu", single_chip.PLAIN)
    assert len(record["step_times_s"]) == len(record["losses"]) == 6
    assert record["step_s"] == statistics.median(record["step_times_s"][2:])
    assert record["tokens_per_s"] == pytest.approx(2 * 128 / record["step_s"], rel=0.05)
    assert (record["mfu_percent"], record["peak_flops"]) == (None, None)
    assert record["versions"]["jax"] == jax.__version__
    assert (record["config"]["mesh"]["y"], record["config"]["mesh"]["x"]) == (1, 1)

    # With a peak there is a share of it; an impossible one is refused, what was stored stays.
    done = command(*TINY, "--steps=5", "--skip=1", f"--out={out}", "--peak-flops=1e15")
    assert done.returncode == 0, done.stderr
    second = results(out)
    assert second[:1] == first
    assert second[1]["mfu_percent"] == pytest.approx(second[1]["model_tflops"] / 1000 * 100)
    assert "of 1000 TFLOP/s (given as --peak-flops)" in done.stdout
    done = command(*TINY, "--steps=5", "--skip=1", f"--out={out}", "--peak-flops=1000")
    assert done.returncode == 2
    assert "correct the FLOPs per step or the peak." in done.stderr and "Traceback" not in done.stderr
    assert results(out) == second


def test_warm_up_does_not_count():
    utilization = Utilization(2e12, 3e12, 1, chips.H100)
    found = single_chip.summarise(records([9.0, 8.0, 1.0, 1.2, 1.4, 1.6, 1.8]), 2, utilization)
    assert (found["skipped_steps"], found["counted_steps"]) == (2, 5)
    assert (found["step_s"], found["step_s_quartiles"]) == (1.4, [1.2, 1.6])
    assert found["tokens_per_s"] == 1000 / 1.4
    assert found["mfu_percent"] == pytest.approx(100 * 2e12 / 1.4 / 989.4e12)
    assert found["hfu_percent"] == pytest.approx(1.5 * found["mfu_percent"])
    assert found["step_times_s"][:2] == [9.0, 8.0]
    assert found["compile_s"] == 7.0


@pytest.mark.parametrize(
    ("kind", "given", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", None, 989.4e12),
        ("NVIDIA H200", None, 989.4e12),
        ("NVIDIA A100-SXM4-80GB", None, 312e12),
        ("TPU v4", None, 275e12),
        ("NVIDIA H200", 5e14, 5e14),
        ("new", 1e15, 1e15),
        ("new", None, None),
        ("cpu", None, None),
    ],
)
def test_peak(kind, given, peak):
    chip = single_chip.chip_of(types.SimpleNamespace(device_kind=kind), given)
    assert (None if chip is None else chip.peak_bf16_flops) == peak


def test_says_that_a_peak_is_unknown(tiny):
    record = single_chip.summarise(records([1.0] * 8), 2, Utilization(2e12, 3e12, 1, None)) | {
        "config": to_dict(tiny),
        "num_params": 1_100_000,
        "attention": "cuDNN's kernels",
        "device_kind": "NVIDIA X1",
        "platform": "gpu",
    }
    text = single_chip.describe(record)
    assert (
        "MFU n/a: the peak of NVIDIA X1 is not known; give its dense FLOP/s in float32 as --peak-flops=FLOPS." in text
    )
    assert "attention: cuDNN's kernels" in text


@pytest.mark.parametrize(
    ("stats", "needed", "fits"),
    [
        ({"bytes_limit": 60e9, "bytes_in_use": 20e9}, 39e9, True),
        ({"bytes_limit": 60e9, "bytes_in_use": 20e9}, 41e9, False),
        (None, 9e9, True),  # a CPU: the memory of this machine
        (None, 11e9, False),
    ],
)
def test_room(monkeypatch, tiny, stats, needed, fits):
    device = types.SimpleNamespace(**vars(H100), memory_stats=lambda: stats)
    monkeypatch.setattr(single_chip, "this_machine", lambda: types.SimpleNamespace(free_bytes=10e9))
    if fits:
        single_chip.require_room(tiny, device, needed, "temporaries")
        return
    with pytest.raises(
        ValueError, match="16 sequences of 128 tokens .* recomputation none does not fit .* lower"
    ) as no:
        single_chip.require_room(tiny, device, needed, "temporaries")
    assert f"(temporaries take {needed / 1e9:.3g} GB, {40 if stats else 10} GB are free)" in str(no.value)


def test_out_of_memory_is_one_sentence(monkeypatch, tiny, tmp_path):
    def train(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes.\nat 0x1")

    arguments = types.SimpleNamespace(steps=6, skip=2, peak_flops=None, out=tmp_path)
    monkeypatch.setattr(single_chip, "_train", train)
    with pytest.raises(ValueError, match=r"of one cpu \(RESOURCE_EXHAUSTED: .* allocate 7 bytes\.\); lower"):
        single_chip.measure(tiny, arguments)


@pytest.mark.parametrize(
    ("program", "attention"),
    [
        ("stablehlo.custom_call @__cudnn$fmhaScaleBiasSoftmax(%1)", "cuDNN's kernels"),
        ("stablehlo.custom_call @tpu_custom_call(%1)", "Pallas kernels"),
        ("stablehlo.dot_general", single_chip.PLAIN),
    ],
)
def test_names_the_attention_that_runs(program, attention):
    assert single_chip.attention_in(program) == attention


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--skip=0"], "--skip is 0; skip at least 1 step"),
        (["--steps=8"], "--steps=8 leaves 3 steps after --skip=5; train at least 9 steps."),
        (["--peak-flops=-1"], "--peak-flops is -1; give FLOP/s"),
        (["--peak-flops=nan"], "--peak-flops is nan; give FLOP/s"),
        (["--config.mesh.x=2"], "the mesh has 2 devices but one chip is measured; leave it at 1 x 1."),
        (["--config=configs/gpt.py:16B"], "no config '16B'; choose one of tiny, 1B, "),
        (["--out=README.md"], "--out is README.md, which is a file; give a directory."),
    ],
)
def test_bad_arguments_are_one_sentence(monkeypatch, capsys, arguments, why):
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(single_chip.environment, "prepare", lambda num: None)
    with pytest.raises(SystemExit) as left:
        single_chip.main(arguments)
    assert left.value.code == 2
    printed = capsys.readouterr()
    assert why in printed.err and printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_the_default_is_the_model_of_one_chip():
    arguments, config = single_chip.parse([])
    assert (config.name, config.model.compute_dtype, config.mesh.num_devices) == ("gpt_1B", "bfloat16", 1)
    assert (arguments.steps, arguments.skip) == (30, 5)
