"""The picture of a run: loss, what evaluations found, utilization over steps, drawn from its metrics file."""

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
# What evaluations find besides the loss that is a share of something, so that it can be drawn in percent.
_SHARES = ("accuracy", "label_error")


def write_report(
    metrics_file: str | pathlib.Path,
    picture_file: str | pathlib.Path,
    *,
    name: str,
    num_params: int,
    mesh: Mapping[str, int],
    chip: str | None,
) -> None:
    """Draws loss (training and evaluation), shares that evaluations found if they did, and utilization, over steps, as
    a PNG; replaces an earlier one.

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
    evals = [record for record in records if record["kind"] == "eval"]
    shares = [share for share in _SHARES if any(share in record for record in evals)]
    figure = Figure(figsize=(9, 6.5 + 2 * bool(shares)), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    above, *between, below = figure.subplots(
        2 + bool(shares), 1, sharex=True, height_ratios=[3, *([2] if shares else []), 2]
    )
    figure.suptitle(_title(name, num_params, mesh, chip), fontsize=12)
    _draw_loss(above, train, evals)
    for axes in between:
        _draw_shares(axes, evals, shares)
    _draw_utilization(below, train)
    for axes in (above, *between, below):
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


def _draw_shares(axes: Axes, evals: list[dict[str, Any]], shares: list[str]) -> None:
    for share, color in zip(shares, (_ORANGE, _BLUE), strict=False):
        points = [(record["step"], 100 * record[share]) for record in evals if share in record]
        label = f"{share.replace('_', ' ')} (last {points[-1][1]:.1f} %)"
        axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=4, linewidth=1.2, label=label)
    axes.set_ylabel("evaluation (%)")
    axes.set_ylim(bottom=0)
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
