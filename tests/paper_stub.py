"""A worker of the paper's figures that makes results up; as a script it is the whole command with such workers."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import sys
import time
from multiprocessing.connection import Connection

from experiments.paper import command
from experiments.paper.__main__ import FIGURES
from launch.sweep_worker import start

# A kind of task, or part of a JSON task: what happens there instead of a result, "kill", "error" or "no room".
MISBEHAVE = "PAPER_STUB_MISBEHAVE"
# A file to which a line is appended for every task that is worked on.
WORKED = "PAPER_STUB_WORKED"
SLEEP_S = "PAPER_STUB_SLEEP_S"
# The hash of the code that the worker claims to run.
CODE = "PAPER_STUB_CODE"


def serve(connection: Connection, log: str) -> None:
    """Takes the place of `experiments.paper.compute.serve`."""
    start(log)
    connection.send("ready")
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(answer(task))


def answer(task):
    text = json.dumps(task, sort_keys=True)
    if worked := os.environ.get(WORKED):
        with pathlib.Path(worked).open("a") as file:
            file.write(text + "\n")
    time.sleep(float(os.environ.get(SLEEP_S, "0")))
    about = {"commit": "abc123", "peak_rss_bytes": 1}
    if CODE in os.environ:
        about["code"] = os.environ[CODE]
    for planted in filter(None, os.environ.get(MISBEHAVE, "").split(";")):
        where, _, what = planted.rpartition(":")
        if where in text:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "no room":
                return {**about, "outcome": "ok", "result": {"fits": False, "why": "the compiler finds <no> room"}}
            return {**about, "outcome": "error", "why": "ValueError: planted | here"}
    return {**about, "outcome": "ok", "result": _MADE_UP[task["kind"]](task)}


def _unit(task) -> float:
    """From 0 to 1, another for every task."""
    return int(hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:8], 16) / 2**32


def _plan(task):
    """Ours takes 1 to 1.1 s, every other program 1.2 to 1.3 s."""
    step_s = (1.0 if task["variant"] == "ours" else 1.2) + 0.1 * _unit(task)
    parts = {"compute": {"einsum": 0.6 * step_s, "other": 0.1 * step_s}, "blocking": {"all-gather": 0.2 * step_s}}
    orders = [
        {"scheduler": name, "step_s": step_s * (1 + 0.01 * n), "peak_bytes": (n + 1) * 2**31}
        for n, name in enumerate(("as_written", *task["schedulers"]))
    ]
    scheduler = task["config"]["overlap"]["scheduler"]
    return {
        "name": task["variant"],
        "fits": True,
        "topology": task["slice"],
        "chip": "TPU v4",
        "hbm_bytes_per_device": 2**35,
        "num_params": 123_456_789,
        "assumptions": [{"name": "clock_hz", "value": 1.05e9, "unit": "Hz", "source": "planted source"}],
        "step_s": step_s,
        "mfu": 0.5 / step_s,
        "hfu": 0.6 / step_s,
        "communication_share": 0.3,
        "compute_s": 0.7 * step_s,
        "exposed_s": 0.1 * step_s,
        "blocking_s": 0.2 * step_s,
        "breakdown": {**parts, "exposed": {"reduce-scatter": 0.1 * step_s}},
        "memory_bytes": {"total": 2**34, "temporaries": 2**33},
        "sites": [
            {"name": f"site.{n}", "decision": "ring", "exposed_s": 0.01 * n, "blocking_s": 0.02, "compute_s": 0.1}
            for n in range(4)
        ],
        "mechanism": "" if scheduler == "compiler" else "planted barriers",
        "lower_s": 1.0,
        "compile_s": 2.0,
        "links": {"0.5": 1.5 * step_s, "1": step_s, "2": 0.9 * step_s},
        "orders": orders,
    }


def _einsum(task):
    def row(way):
        skip = "stripe" in way
        total_s = None if skip else 1e-3 * (1 + _unit([task, way]))
        parts = {"compute_s": 1e-3, "exposed_s": 1e-4, "blocking_s": 0.0}
        plans = [f"site: td,df->tf [gather d over x=2 (8 B)] -> {way} (1 ms predicted, 2 ms whole)"]
        return {
            **parts,
            "variant": way,
            "total_s": total_s,
            "skipped": "planted reason" if skip else "",
            "plans": plans,
        }

    rows = [row(way) for way in task["variants"]]
    return {"rows": rows, "is_physical_cycle": {"x": task["x"] < 4}, "max_hops": {"x": 3}}


def _rewrite(task):
    def program(step_s):
        waits = {"exposed_s": 0.1, "blocking_s": step_s - 0.9, "communication_share": (step_s - 0.8) / step_s}
        return {**waits, "step_s": step_s, "compute_s": 0.8, "fits": True, "temporary_bytes": 2**33}

    times = {"plain": 1.5, "plain, asynchronous": 1.25, "rewritten": 1.0}
    lines = ["rewritten: AllGather over x, planted.py:1", "not rewritten: AllReduce over y, planted.py:2: a reason"]
    return {
        "programs": {way: program(step_s) for way, step_s in times.items()},
        "num_rewritten": 3,
        "num_left": 1,
        "report": lines,
    }


def _rounding(task):
    ways = ("blocking, float32", "ring one, bfloat16")
    return {"errors": {way: {"rms": 1e-7 * n, "max": 1e-6 * n} for n, way in enumerate(ways, start=1)}}


def _training(task):
    shift = 1e-4 if "overlap.mode=on" in task["changes"] else 0.0
    return {"losses": [5.0 - 0.1 * k + k * shift for k in range(5)]}


_MADE_UP = {
    "plan": _plan,
    "count": lambda task: {"num_params": 123_456_789, "model_flops": 1e15, "hardware_flops": 1.2e15},
    "einsum": _einsum,
    "rewrite": _rewrite,
    "rounding": _rounding,
    "training": _training,
}

if __name__ == "__main__":
    sys.exit(command.main("paper", FIGURES, sys.argv[1:], serve=serve))
