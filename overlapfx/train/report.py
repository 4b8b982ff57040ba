"""The picture of a run: loss and utilization over steps, drawn from its metrics file."""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from overlapfx.train.metrics import read_metrics

# Dark enough on white, and told apart by people with any colour vision.
_BLUE, _ORANGE, _GRAY = "#0072B2", "#D55E00", "#666666"


def write_report(
    metrics_file: str | pathlib.Path,
    picture_file: str | pathlib.Path,
    *,
    name: str,
    num_params: int,
    mesh: Mapping[str, int],
    chip: str | None,
) -> None:
    """Draws loss (training and evaluation) above utilization, both over steps, as a PNG; replaces an earlier one.

    Args:
      metrics_file: the metrics.jsonl of the run.
      picture_file: where the picture goes.
      name: of the run, for the title.
      num_params: number of parameters.
      mesh: axis name -> size.
      chip: its name, None if unknown.

    Raises:
      ValueError: the file has no finished step.
    """
    records = read_metrics(metrics_file)
    train = [record for record in records if record["kind"] == "train"]
    if not train:
        raise ValueError(f"{metrics_file} holds no finished step to draw; train at least one step.")
    # The object interface draws without a window system, and leaves no global state behind.
    figure = Figure(figsize=(9, 6.5), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    figure.suptitle(_title(name, num_params, mesh, chip), fontsize=12)
    _draw_loss(above, train, [record for record in records if record["kind"] == "eval"])
    _draw_utilization(below, train)
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        for record in records:
            if record["kind"] == "start" and record["step"] > 0:
                axes.axvline(record["step"], color=_GRAY, linestyle=":", linewidth=1)
    below.set_xlabel("step" + (" (dotted: resumed)" if _resumed(records) else ""))
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(picture_file, format="png")


def _resumed(records: list[dict[str, Any]]) -> bool:
    return any(record["kind"] == "start" and record["step"] > 0 for record in records)


def _title(name: str, num_params: int, mesh: Mapping[str, int], chip: str | None) -> str:
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.items())
    return f"{name}: {count(num_params)} parameters, mesh {axes}, {chip or 'unknown chip'}"


def count(number: int) -> str:
    """1234567 -> `1.23M`."""
    for unit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{suffix}"
    return str(number)


def _draw_loss(axes: Axes, train: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    steps, losses = [record["step"] for record in train], [record["loss"] for record in train]
    axes.plot(steps, losses, color=_BLUE, linewidth=1.2, label=f"training (last {losses[-1]:.3f})")
    if evals:
        steps, losses = [record["step"] for record in evals], [record["loss"] for record in evals]
        label = f"evaluation (last {losses[-1]:.3f})"
        axes.plot(steps, losses, color=_ORANGE, marker="o", markersize=4, linewidth=1.2, label=label)
    axes.set_ylabel("loss (nats per token)")
    axes.legend(frameon=False)


def _draw_utilization(axes: Axes, train: list[dict[str, Any]]) -> None:
    """MFU and HFU in percent where the chip is known, else the plain rate."""
    known = [record for record in train if record.get("mfu_percent") is not None]
    if known:
        steps = [record["step"] for record in known]
        # HFU is the wider line below: without recomputation the two are the same.
        for name, key, color, width in (("HFU", "hfu_percent", _ORANGE, 3.0), ("MFU", "mfu_percent", _BLUE, 1.2)):
            percents = [record[key] for record in known]
            label = f"{name} (median {statistics.median(percents):.1f} %)"
            axes.plot(steps, percents, color=color, linewidth=width, label=label)
        axes.set_ylabel("utilization (% of peak)")
        axes.legend(frameon=False)
    else:
        steps = [record["step"] for record in train]
        axes.plot(steps, [record["model_tflops_per_device"] for record in train], color=_BLUE, linewidth=1.2)
        axes.set_ylabel("model TFLOP/s per device\n(chip unknown: MFU n/a)")
    axes.set_ylim(bottom=0)
