"""One thing that a figure wants to know, with the task for a worker that finds it out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.paper.applications import Application
from overlapfx.config import Config, to_dict

# The way to run an einsum that the gate chooses, among those that are forced.
GATE = "gate"
# Schedulers of ours.
ORDERS = ("bottom_up", "top_down")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A `task` of plain JSON values for the module `kind` in experiments/paper/work, `name` for people.

    is_quick: it takes less time than most.
    """

    kind: str
    name: str
    task: Mapping[str, Any]
    is_quick: bool = False

    def identity(self) -> str:
        """The same for the same question, whatever the code that answers it."""
        return _digest({"kind": self.kind, "task": self.task})

    def key(self, basis: Mapping[str, Any]) -> str:
        """Names the result: the question, and everything else that decides the answer, which is the `basis`."""
        return _digest({"kind": self.kind, "task": self.task, "basis": basis})


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def plan(one: Application, variant: str, *changes: str) -> Measurement:
    """The step of an application, compiled for its slice as one of the `variants`, with fields changed.

    With ours come other orders of the same instructions, which cost a second.
    """
    name = " ".join((one.name, one.topology, variant, *changes))
    orders = ORDERS if variant == "ours" else ()
    task = {"config": _config(one, changes), "slice": one.topology, "variant": variant, "schedulers": list(orders)}
    return Measurement("plan", name, task, is_quick=variant in ("blocking", "xla-async"))


def count(one: Application) -> Measurement:
    """Parameters and floating-point operations of an application."""
    return Measurement("count", f"{one.name} counted", {"config": _config(one, ())}, is_quick=True)


def einsum(
    site: str, topology: str, mesh: tuple[int, int], sizes: Mapping[str, int], variants: Sequence[str], which: str
) -> Measurement:
    """One collective einsum, compiled for a slice with a mesh (y, x) in every one of the `variants`."""
    y, x = mesh
    task = {
        "site": site,
        "slice": topology,
        "y": y,
        "x": x,
        "sizes": dict(sizes),
        "variants": list(variants),
        "which": which,
    }
    return Measurement("einsum", f"{site} {topology} y={y} x={x} {which}", task)


def rewrite(program: str, topology: str, mesh: tuple[int, int], sizes: Mapping[str, int], mode: str) -> Measurement:
    """One of `experiments.foreign` with its gradient, compiled for a slice with a mesh (y, x): plain and rewritten.

    mode: as `Overlap.mode`, with which it is rewritten.
    """
    y, x = mesh
    task = {"program": program, "slice": topology, "y": y, "x": x, "sizes": dict(sizes), "mode": mode}
    return Measurement("rewrite", f"{program} {topology} y={y} x={x} rewritten", task)


def rounding(num_devices: int, sizes: Mapping[str, int], seed: int) -> Measurement:
    """The error of a ReduceScatter over simulated devices, by method and dtype of the accumulator."""
    task = {"num_devices": num_devices, "sizes": dict(sizes), "seed": seed}
    return Measurement("rounding", f"rounding over {num_devices} devices", task, is_quick=True)


def training(one: Application, mode: str, num_steps: int, *changes: str) -> Measurement:
    """The losses of a real run of the tiny config on simulated devices, with overlap "off" or "on"."""
    settings = [f"train.num_steps={num_steps}", f"overlap.mode={mode}", *changes]
    task = {"config_name": one.tiny, "changes": settings}
    return Measurement("training", f"{one.tiny} overlap {mode}, {num_steps} steps", task)


def _config(one: Application, changes: Sequence[str]) -> dict[str, Any]:
    config: Config = one.config(*changes)
    return to_dict(config)
