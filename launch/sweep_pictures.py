"""The results of a sweep as pictures: a heat map over mesh shapes, step time against memory."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from launch.sweep_points import mesh_text
from launch.sweep_rank import FITS, TOO_LARGE, Row, best_by_target, duration, pareto

GIB, MIB = 2**30, 2**20
# Told apart by people with any colour vision, and by their marks without any colour.
_MARKS = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
_EMPTY = "#e4e4e4"
_NAMED_ON_FRONT = 6


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    buffer = io.BytesIO()
    # No date in it: the same results make the same file.
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def heat_map(rows: Sequence[Row], title: str) -> Figure:
    """One panel per slice: mesh shapes from left to right, settings from top to bottom, speed as colour."""
    panels = _by_target(rows)
    settings = {name: list(dict.fromkeys(map(_setting, found))) for name, found in panels.items()}
    meshes = {name: list(dict.fromkeys(row.point.mesh for row in found)) for name, found in panels.items()}
    heights = [0.75 * len(names) + 0.9 for names in settings.values()]
    width = 3.2 + 1.25 * max(map(len, meshes.values()))
    figure = Figure(figsize=(max(7.5, width), sum(heights) + 1.0), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    axes = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    best = best_by_target(rows)
    for panel, (name, found) in zip(axes, panels.items(), strict=True):
        _draw_cells(panel, found, settings[name], meshes[name], best[name])
        panel.set_title(name, fontsize=10, loc="left")
    figure.supxlabel(
        "time per step and MFU; darker is faster (tokens per second and chip), framed is the best, hatched does not "
        "fit",
        fontsize=8,
    )
    return figure


def _draw_cells(axes: Axes, rows: Sequence[Row], settings: list[str], meshes: list[Any], best: Row | None) -> None:
    speeds = [row["tokens_per_s_per_chip"] for row in rows if row["step_s"] is not None]
    colours = matplotlib.colormaps["YlGnBu"]
    # Never from the very bottom of the map: that is as pale as an empty cell.
    scale = Normalize(min(speeds, default=0) * 0.8, max(speeds, default=1))
    for row in rows:
        at = (meshes.index(row.point.mesh), settings.index(_setting(row)))
        share = float(scale(row["tokens_per_s_per_chip"])) if row["step_s"] is not None else 0.0
        face = colours(share) if row["step_s"] is not None else _EMPTY
        hatch = "///" if row.state == TOO_LARGE else ""
        axes.add_patch(Rectangle((at[0] - 0.5, at[1] - 0.5), 1, 1, facecolor=face, edgecolor="white", hatch=hatch))
        box = {"facecolor": face, "edgecolor": "none", "pad": 1.0} if hatch else None
        ink = "white" if share > 0.6 else "black"
        axes.text(*at, _cell_text(row), ha="center", va="center", fontsize=9, color=ink, bbox=box)
        if row is best:
            axes.add_patch(
                Rectangle((at[0] - 0.47, at[1] - 0.47), 0.94, 0.94, fill=False, edgecolor="#D55E00", linewidth=2.5)
            )
    axes.set_xlim(-0.5, len(meshes) - 0.5)
    axes.set_ylim(len(settings) - 0.5, -0.5)
    axes.set_xticks(range(len(meshes)), [mesh_text(mesh).replace(" ", "\n") for mesh in meshes], fontsize=8)
    axes.set_yticks(range(len(settings)), settings, fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _cell_text(row: Row) -> str:
    if row["step_s"] is None:
        return row.state.replace(" not ", " not\n")
    return duration(row["step_s"], 3) + ("" if row["mfu"] is None else f"\n{row['mfu']:.1%}")


def pareto_picture(rows: Sequence[Row], title: str) -> Figure:
    """One panel per slice: step time over the memory of a device, and the front of what nothing else beats in both."""
    panels = _by_target(rows)
    figure = Figure(figsize=(7.5, 4.6 * len(panels) + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    kinds = list(dict.fromkeys(map(_setting, rows)))
    for panel, (name, found) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True):
        _draw_front(panel, found, kinds)
        panel.set_title(name, fontsize=10, loc="left")
    return figure


def _draw_front(axes: Axes, rows: Sequence[Row], kinds: list[str]) -> None:
    timed = [row for row in rows if row["step_s"] and row["memory_bytes"]]
    front = pareto([row for row in timed if row.state == FITS])
    largest = max((row["memory_bytes"] for row in timed), default=GIB)
    unit, unit_name = (GIB, "GiB") if largest >= GIB / 2 else (MIB, "MiB")
    slowest = max((row["step_s"] for row in timed), default=1.0)
    scale, time_name = (1.0, "seconds") if slowest >= 0.5 else (1e3, "milliseconds")
    sizes, times = [row["memory_bytes"] / unit for row in front], [row["step_s"] * scale for row in front]
    axes.step(sizes, times, where="post", color="#999999", zorder=1, label="nothing else is as fast and as small")
    for number, kind in enumerate(kinds):
        colour, mark = _MARKS[number % len(_MARKS)]
        for fits in (True, False):
            here = [row for row in timed if _setting(row) == kind and (row.state == FITS) == fits]
            axes.scatter(
                [row["memory_bytes"] / unit for row in here],
                [row["step_s"] * scale for row in here],
                marker=mark,
                s=42,
                facecolors=colour if fits else "none",
                edgecolors=colour,
                zorder=2,
                label=f"{kind}{'' if fits else ', does not fit'}" if here else None,
            )
    for row in front[:: max(1, len(front) // _NAMED_ON_FRONT)]:
        at = (row["memory_bytes"] / unit, row["step_s"] * scale)
        axes.annotate(mesh_text(row.point.mesh), at, xytext=(6, 6), textcoords="offset points", fontsize=8)
    limit = next((row["hbm_bytes"] for row in timed if row["hbm_bytes"]), None)
    if limit is not None and limit < 3 * largest:  # farther off it would only squeeze the rest
        label = f"memory of a device, {limit / unit:.0f} {unit_name}"
        axes.axvline(limit / unit, color="#C8323C", linestyle="--", linewidth=1.2, label=label)
    axes.set_xlabel(f"memory of one device, {unit_name}")
    axes.set_ylabel(f"{time_name} per step")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.12)
    if timed:
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.text(0.5, 0.5, "no step time", ha="center", va="center", transform=axes.transAxes)


def _by_target(rows: Sequence[Row]) -> dict[str, list[Row]]:
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.point.target.name, []).append(row)
    return panels


def _setting(row: Row) -> str:
    return f"overlap {row.mode}" + (f"\n{row.others}" if row.others else "")
