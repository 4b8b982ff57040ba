"""The kinds of pictures that figures need: bars side by side, stacked bars, lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Told apart by people with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5c5c5c", "#B8A200", "#7a4b9d", "#8c3b2a")
_MARKS = "os^DvP*X"
Values = Mapping[str, Sequence[float | None]]  # name of a series -> a value for every label, None where there is none


def _axes(title: str, y_label: str, width: float = 8.0) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_ylabel(y_label)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    else:
        axes.text(0.5, 0.5, "no results", ha="center", va="center", transform=axes.transAxes)


def bars(
    title: str,
    y_label: str,
    labels: Sequence[str],
    values: Values,
    band: tuple[float, float, str] | None = None,
    points: tuple[str, Sequence[float | None]] | None = None,
) -> Figure:
    """One group of bars per label. band: (from, to, name) across the picture. points: (name, values) marked on top."""
    figure, axes = _axes(title, y_label, width=max(8.0, 1.1 * len(labels) + 3))
    if band is not None:
        axes.axhspan(band[0], band[1], color="#000000", alpha=0.08, label=band[2])
    width = 0.8 / max(1, len(values))
    for place, (name, series) in enumerate(values.items()):
        at = [(i + (place - (len(values) - 1) / 2) * width, v) for i, v in enumerate(series) if v is not None]
        if at:
            axes.bar([x for x, _ in at], [v for _, v in at], width, label=name, color=COLOURS[place % len(COLOURS)])
    if points is not None:
        known = [(i, v) for i, v in enumerate(points[1]) if v is not None]
        if known:
            axes.scatter(*zip(*known, strict=True), marker="D", color="black", zorder=3, label=points[0])
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    _legend(axes)
    return figure


def stacked(
    title: str, y_label: str, labels: Sequence[str], values: Values, band: tuple[float, float, str] | None = None
) -> Figure:
    """One bar per label, its parts on top of each other; a label without all parts stays empty."""
    figure, axes = _axes(title, y_label, width=max(8.0, 1.1 * len(labels) + 3))
    bottom = [0.0] * len(labels)
    for place, (name, series) in enumerate(values.items()):
        heights = [value or 0.0 for value in series]
        if any(heights):
            axes.bar(range(len(labels)), heights, 0.6, bottom, label=name, color=COLOURS[place % len(COLOURS)])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if band is not None:
        axes.axhspan(band[0], band[1], color="#000000", alpha=0.08, label=band[2])
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    _legend(axes)
    return figure


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    log: str = "",
    ticks: Sequence[float] = (),
    level: float | None = None,
) -> Figure:
    """One line per series of (x, y). log: "x", "y" or "xy". ticks: on the x axis. level: a dotted line across."""
    figure, axes = _axes(title, y_label, width=9.0)
    for place, (name, points) in enumerate(series.items()):
        if points:
            style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "label": name}
            if len(points) <= 20:
                style["marker"] = _MARKS[place % len(_MARKS)]
            axes.plot(*zip(*points, strict=True), linestyle="--" if place % 2 else "-", **style)
    if level is not None:
        axes.axhline(level, color="black", linestyle=":", linewidth=1)
    if "x" in log:
        axes.set_xscale("log", base=2)
    if "y" in log:
        axes.set_yscale("log")
    axes.set_xlabel(x_label)
    if ticks:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    _legend(axes)
    return figure
