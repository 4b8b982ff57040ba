"""Real training runs, made as small as they get, each in a process forked from one that has imported everything."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable

from launch import environment

NUM_DEVICES = 2
FIELDS = {
    "model.d_model": 16,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.d_ff": 16,
    "model.seq_len": 16,
    "model.dropout": 0.1,
    "mesh.y": 2,
    "mesh.x": 1,
    "data.global_batch": 4,
    "optimizer.warmup_steps": 2,
    "train.num_steps": 12,
    "train.eval_every": 4,
    "train.eval_batches": 2,
    "train.checkpoint_every": 2,
    "train.checkpoint_keep": 2,
    "sample.num_tokens": 0,
}
NUM_DOCUMENTS = 7  # of them every epoch has few batches, so that runs are stopped at its end, too


def prepare() -> None:
    """Sets the environment of a process that will fork runs, then imports all they need; nothing may start JAX here."""
    assert "jax" not in sys.modules
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = environment.simulated(NUM_DEVICES, "--xla_backend_optimization_level=0")
    os.environ.setdefault("MPLBACKEND", "Agg")
    os.environ.setdefault(
        "JAX_COMPILATION_CACHE_DIR", str(pathlib.Path.home() / ".cache" / "overlapfx" / "tests-faults")
    )
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    import launch.session
    import launch.train
    import models.gpt  # noqa: F401
    from overlapfx import chips
    from overlapfx.train import data, documents

    text = [bytes(range(1, 200)) + bytes([65 + i]) * (50 + 7 * i) for i in range(NUM_DOCUMENTS)]
    source = documents.TextSource("toy", [{"text": document} for document in text])
    # What takes seconds and cannot go wrong on the way from a checkpoint to a loss.
    data.make_source = lambda *_: source
    chips.measure_cpu_peak = lambda dtype, devices: chips.Chip("toy", 1e15, None, None, None, None, 0, "made up")
    launch.session.report = lambda *_: None
    launch.train.prepare = lambda *_: {}


def arguments(run_dir: pathlib.Path, **changes: object) -> list[str]:
    """The command line of a run; `train__num_steps=3` changes a field."""
    fields = FIELDS | {name.replace("__", "."): value for name, value in changes.items()}
    return [
        "--config=configs/gpt.py:tiny",
        f"--run_dir={run_dir}",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


def start(argv: list[str], log: pathlib.Path, plant: Callable[[], None] = lambda: None) -> int:
    """Forks a process that plants a fault, then runs `overlapfx train` with its output in `log`; returns its number."""
    number = os.fork()
    if number:
        return number
    code = 70
    try:
        with log.open("a") as out:
            for descriptor in (1, 2):
                os.dup2(out.fileno(), descriptor)
        import launch.train

        plant()
        code = launch.train.main(argv)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:  # whatever it is, this copy of the process must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(number: int, limit_s: float = 300) -> int:
    """Exit code of a process, minus the signal that ended it; one that takes too long is killed."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(number, 9)
    os.waitpid(number, 0)
    raise TimeoutError(f"A run took more than {limit_s} s.")


def command(module: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of this folder in a process of its own, in which JAX has not started."""
    project = pathlib.Path(__file__).resolve().parent.parent.parent
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, "-m", f"tests.faults.{module}", *argv],
        cwd=project,
        env=kept | {"PYTHONPATH": os.pathsep.join([str(project), str(project / "tests")])},
        capture_output=True,
        text=True,
        check=False,
    )
