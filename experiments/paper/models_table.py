"""A table of models: sizes, parameters counted from the real module, devices, memory."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.paper.applications import Application
from experiments.paper.figure import Table
from experiments.paper.measurement import Measurement, count, plan
from experiments.paper.programs import OURS
from experiments.paper.results import Results
from experiments.paper.text import NONE, gib, number
from overlapfx.aot.slices import parse_slice

_COLUMNS = ("model", "sizes", "parameters", "layers", "M", "F", "heads", "batch x tokens", "recomputation", "chips")
_LAST = ("slice", "mesh [y, x]", "memory per device")


def measurements(ones: Sequence[Application]) -> list[Measurement]:
    """The counts, and the plans that know the memory."""
    return [measurement for one in ones for measurement in (count(one), plan(one, OURS))]


def table(ones: Sequence[Application], results: Results) -> Table:
    """One row per model."""
    return Table((*_COLUMNS, *_LAST), [_row(one, results) for one in ones])


def _row(one: Application, results: Results) -> list[str]:
    config = one.config()
    model, counted, planned = config.model, results.find(count(one)), results.find(plan(one, OURS))
    decoder = getattr(model, "num_decoder_layers", None)
    memory = NONE
    if planned is not None:
        memory = f"{gib(planned['memory_bytes']['total'])} of {gib(planned['hbm_bytes_per_device'])}"
    return [
        one.name,
        one.source,
        NONE if counted is None else number(counted["num_params"]),
        str(model.num_layers) if decoder is None else f"{model.num_layers} + {decoder}",
        str(model.d_model),
        str(model.d_ff),
        str(model.num_heads),
        f"{config.data.global_batch} x {model.seq_len}",
        model.remat,
        str(parse_slice(one.topology).num_chips),
        one.topology,
        f"[{config.mesh.y}, {config.mesh.x}]",
        memory,
    ]
