"""The command trains, resumes exactly, moves to another mesh, and refuses what does not fit; each run is a process."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from overlapfx.train.metrics import read_metrics

PROJECT = pathlib.Path(__file__).resolve().parent.parent
SMALL = {
    "model.d_model": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.d_ff": 48,
    "model.seq_len": 32,
    "model.dropout": 0.1,
    "data.global_batch": 8,
    "optimizer.warmup_steps": 2,
    "train.num_steps": 6,
    "train.eval_every": 3,
    "train.eval_batches": 2,
    "train.checkpoint_every": 3,
    "sample.num_tokens": 5,
}


def command(run_dir: pathlib.Path, **changes: object) -> list[str]:
    fields = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return [
        sys.executable,
        "-m",
        "launch.train",
        "--config=configs/gpt.py:tiny",
        f"--run_dir={run_dir}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


def environment() -> dict[str, str]:
    """The launcher has to set up the devices by itself; only what makes compilation quick is kept."""
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return kept | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}


def train(run_dir: pathlib.Path, **changes: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(run_dir, **changes),
        cwd=PROJECT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def losses(run_dir: pathlib.Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "train"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of six steps with checkpoints after three and six."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    done = train(run_dir)
    assert done.returncode == 0, done.stderr[-3000:]
    return run_dir, done.stdout


@pytest.fixture
def half(whole, tmp_path):
    """The same run as it was after three steps, killed before the next checkpoint."""
    copy = tmp_path / "run"
    shutil.copytree(whole[0], copy)
    shutil.rmtree(copy / "checkpoints" / "6")
    return copy


@pytest.mark.slow
def test_a_run_leaves_everything_behind(whole):
    run_dir, output = whole
    for name in ("config.json", "versions.json", "metrics.jsonl", "report.png", "checkpoints/3", "checkpoints/6"):
        assert (run_dir / name).exists(), name
    assert list((run_dir / "tb").glob("events*"))
    assert json.loads((run_dir / "config.json").read_text())["model"]["d_model"] == 32
    records = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    wanted = {"loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "model_tflops_per_device"}
    for record in records:
        assert wanted | {"mfu_percent", "hfu_percent"} <= record.keys()
        assert 0 < record["mfu_percent"] <= record["hfu_percent"] < 100
    assert "compiled the training step in" in output
    assert "MFU counts model FLOPs" in output
    assert "CPU (measured)" in output
    assert "Sample at temperature" in output
    assert "\x1b" not in output, "plain lines where the output is not a terminal"


@pytest.mark.slow
def test_resumed_losses_are_bit_equal(whole, half):  # C22
    done = train(half)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumes after step 3" in done.stdout
    assert losses(half) == losses(whole[0])


@pytest.mark.slow
def test_resumes_on_another_mesh_and_number_of_devices(whole, half):  # C18
    done = train(half, mesh__y=1, mesh__x=2)
    assert done.returncode == 0, done.stderr[-3000:]
    resumed, uninterrupted = losses(half), losses(whole[0])
    assert resumed.keys() == uninterrupted.keys()
    for step in (4, 5, 6):
        assert resumed[step] == pytest.approx(uninterrupted[step], rel=1e-5)


@pytest.mark.slow
def test_another_config_is_refused_and_nothing_lost(half):
    before = sorted((p, p.stat().st_mtime_ns) for p in half.rglob("*") if p.is_file() and p.name != ".lock")
    done = train(half, optimizer__learning_rate=0.5)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "optimizer.learning_rate" in done.stderr
    assert "0.5" in done.stderr
    assert "Traceback" not in done.stderr
    assert before == sorted((p, p.stat().st_mtime_ns) for p in half.rglob("*") if p.is_file() and p.name != ".lock")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.num_kv_heads": 1}, ["model.num_kv_heads", "1", "2"]),
        ({"model.d_model": 33}, ["model.d_model", "33"]),
        ({"data.name": "no_such_set"}, ["no_such_set"]),
        ({"data.data_dir": "README.md/data"}, ["README.md/data", "data.data_dir"]),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_written(tmp_path, changes, words):
    run_dir = tmp_path / "run"
    done = train(run_dir, **{name.replace(".", "__"): value for name, value in changes.items()})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words)
    assert not run_dir.exists()


def test_a_run_directory_that_cannot_be_made_is_refused():
    done = train(pathlib.Path("README.md/run"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "README.md/run" in done.stderr
    assert "--run_dir" in done.stderr


@pytest.mark.slow
def test_terminated_run_saves_and_resumes(tmp_path, whole):
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir, train__num_steps=2000, train__checkpoint_every=2000, train__eval_every=2000),
        cwd=PROJECT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and '"train"' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output[-3000:]
    last = max(losses(run_dir))
    assert (run_dir / "checkpoints" / str(last)).is_dir()
