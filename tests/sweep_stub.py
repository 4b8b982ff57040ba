"""A worker of sweeps that makes figures up, and misbehaves where its environment says so.

As a script it is `overlapfx sweep` with such workers.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from multiprocessing.connection import Connection

from launch import sweep, sweep_basis
from launch.sweep_worker import start

GIB = 2**30
# "y=4 x=2 off:kill": what happens at that point, instead of a result.
MISBEHAVE = "SWEEP_STUB_MISBEHAVE"
# A file to which the name of every point is appended when its work ends.
WORKED = "SWEEP_STUB_WORKED"
SLEEP_S = "SWEEP_STUB_SLEEP_S"
# The hash of the code that the worker claims to run.
CODE = "SWEEP_STUB_CODE"
# A file; "kill-once" removes it, and does nothing where there is none.
ONCE = "SWEEP_STUB_ONCE"


def serve(connection: Connection, log: str) -> None:
    """Takes the place of `launch.sweep_worker.serve`."""
    start(log)
    connection.send("ready")
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(answer(task))


def broken(connection: Connection, log: str) -> None:
    """A worker that cannot start."""
    start(log)
    raise ModuleNotFoundError("planted")


def answer(task):
    mesh, mode = task["config"]["mesh"], task["config"]["overlap"]["mode"]
    name = f"y={mesh['y']} x={mesh['x']} {mode}"
    print(f"begins {name}", flush=True)
    time.sleep(float(os.environ.get(SLEEP_S, "0")))
    for planted in os.environ.get(MISBEHAVE, "").split(","):
        where, _, what = planted.partition(":")
        if where == name:
            _misbehave(what)
    if what := os.environ.get(WORKED):
        with pathlib.Path(what).open("a") as file:
            file.write(f"{name}\n")
    if mesh["y"] == 1 and mode == "on":
        return {"outcome": "does not fit", "fits": False, "why": "<b>no room</b> & more", "peak_rss_bytes": 1}
    if mesh["x"] == 1 and mode == "on":
        return {"outcome": "error", "why": "XlaRuntimeError: planted", "peak_rss_bytes": 1}
    return figures(mesh, mode, task["config"])


def figures(mesh, mode, config):
    """The rules: x=2 is best; overlap helps where x > 2 and hurts elsewhere; x=1 needs more memory than there is."""
    devices = mesh["y"] * mesh["x"] * mesh["replica"]
    blocking_s = 2.0 + 0.5 * abs(mesh["x"] - 2)
    step_s = blocking_s * {"off": 1.0, "auto": 0.8 if mesh["x"] > 2 else 1.05, "on": 0.9}[mode]
    tokens_per_s = config["data"]["global_batch"] * config["model"]["seq_len"] / step_s
    memory = 40 * GIB if mesh["x"] == 1 else (10 + mesh["y"]) * GIB
    return {
        "outcome": "ok",
        "fits": memory <= 32 * GIB,
        "step_s": step_s,
        "mfu": 1 / step_s,
        "hfu": 1.2 / step_s,
        "communication_s": 0.1 * step_s,
        "communication_share": 0.1,
        "memory_bytes": memory,
        "hbm_bytes": 32 * GIB,
        "num_chips": devices,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_chip": tokens_per_s / devices,
        "step_s_by_link_factor": {"0.8": step_s * 1.05, "1.25": step_s * 0.97},
        "code": os.environ.get(CODE) or sweep_basis.code_hash(),
        "peak_rss_bytes": 1,
    }


def _misbehave(what):
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "kill-once":
        if (once := pathlib.Path(os.environ[ONCE])).exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return
    if what == "raise":
        raise RuntimeError("planted in the middle of a point")
    if what == "hang":
        time.sleep(1000)
    raise AssertionError(what)


if __name__ == "__main__":
    sys.exit(sweep.main(sys.argv[1:], serve=serve))
