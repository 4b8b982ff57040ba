"""A time line as a picture."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from overlapfx.aot.render import breakdown, duration, short_label
from overlapfx.aot.timeline import Event, Timeline

# Colours that stay apart in print and for most colour-blind readers; what costs time is warm, what is hidden is cool.
_COLOURS = {
    ("compute", "einsum"): "#2f5d8c",
    ("compute", "kernel"): "#4f9d9d",
    ("compute", "other"): "#a8c3de",
    ("exposed", ""): "#f28e2b",
    ("blocking", ""): "#c8323c",
    ("dcn", ""): "#8e5ea2",
    ("memory", ""): "#8a8a8a",
    ("host", ""): "#5c5c5c",
    ("transfer", "collective-permute"): "#59a14f",
    ("transfer", "all-gather"): "#76b7b2",
    ("transfer", "reduce-scatter"): "#b07aa1",
    ("transfer", "all-reduce"): "#9c755f",
    ("transfer", "all-to-all"): "#d4a72c",
    ("transfer", ""): "#9e9e9e",
    ("repeat", ""): "#f2f2f2",
}
_PROCESSOR = (
    ("einsum", ("compute", "einsum")),
    ("kernel", ("compute", "kernel")),
    ("other compute", ("compute", "other")),
    ("exposed wait", ("exposed", "")),
    ("blocking collective", ("blocking", "")),
    ("wait for other slices", ("dcn", "")),
    ("wait for copies", ("memory", "")),
    ("wait for the host", ("host", "")),
)
_MOVING = (
    ("permute", ("transfer", "collective-permute")),
    ("all-gather", ("transfer", "all-gather")),
    ("reduce-scatter", ("transfer", "reduce-scatter")),
    ("all-reduce", ("transfer", "all-reduce")),
    ("all-to-all", ("transfer", "all-to-all")),
    ("copy or other transfer", ("transfer", "")),
)
_Legend = tuple[tuple[str, tuple[str, str]], ...]
# Iterations that were multiplied, not walked, get this part of the width, whatever they last.
_REPEAT_WIDTH = 0.05
_HATCH = {"exposed": "////"}


@dataclasses.dataclass(frozen=True)
class _Scale:
    """Maps seconds to picture positions in milliseconds, with the repeats squeezed."""

    squeezed: tuple[tuple[float, float, float], ...]  # (start_s, end_s, shown_s)

    def __call__(self, seconds: float) -> float:
        shift = 0.0
        for start, end, shown in self.squeezed:
            if seconds <= start:
                break
            inside = min(seconds, end) - start
            shift += inside - inside / (end - start) * shown
        return (seconds - shift) * 1e3


def draw(timeline: Timeline, path: str | pathlib.Path, title: str = "") -> None:
    """Write the picture of `make_figure` as a PNG file."""
    make_figure(timeline, title).savefig(path, dpi=110, format="png")


def make_figure(timeline: Timeline, title: str = "") -> Figure:
    """The breakdown as one bar, all rows over the step, one iteration of the longest loop enlarged.

    Repeated iterations are squeezed and marked with their number. An empty time line gives empty panels.
    """
    zoom = _longest_loop(timeline)
    heights = [0.9, 0.45 * len(timeline.rows) + 0.8]
    if zoom is not None:
        heights.append(heights[1])
    figure = Figure(figsize=(15, sum(heights) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(title or _headline(timeline), fontsize=13, fontweight="bold")
    _draw_bar(axes[0], timeline)
    _draw_rows(axes[1], timeline, timeline.events, 0.0, timeline.total_s)
    axes[1].set_title("the whole program, repeated iterations squeezed" if zoom else "the whole program", fontsize=10)
    if zoom is not None:
        start, end, label = zoom
        inside = [e for e in timeline.events if e.category != "repeat" and e.end_s > start and e.start_s < end]
        _draw_rows(axes[2], timeline, inside, start, end)
        axes[2].set_title(f"one iteration of {label}, enlarged", fontsize=10)
        _mark(axes[1], timeline, start, end)
    used = {_colour_key(event) for event in timeline.events}
    _add_legend(figure, "row compute, what the processor does:", _PROCESSOR, used, "outside lower left")
    _add_legend(figure, "rows below it, what moves over each link of the torus:", _MOVING, used, "outside lower right")
    return figure


def _add_legend(figure: Figure, title: str, entries: _Legend, used: set[tuple[str, str]], place: str) -> None:
    handles = [
        Patch(facecolor=_COLOURS[key], label=label, hatch=_HATCH.get(key[0], ""), edgecolor="white")
        for label, key in entries
        if key in used
    ]
    if handles:
        # Two legends stand side by side, each in half of the width: four entries fit.
        style: dict[str, Any] = {"loc": place, "ncols": min(len(handles), 4), "frameon": False, "alignment": "left"}
        figure.legend(handles=handles, title=title, fontsize=9, title_fontsize=9, **style)


def _headline(timeline: Timeline) -> str:
    return (
        f"estimate: {duration(timeline.total_s)}, {timeline.communication_share:.1%} of it communication that is "
        f"not hidden"
    )


def _mark(axes: Axes, timeline: Timeline, start_s: float, end_s: float) -> None:
    """Frames what the panel below enlarges."""
    scale = _scale(timeline.events, 0.0, timeline.total_s)
    axes.axvspan(scale(start_s), scale(end_s), facecolor="none", edgecolor="black", linewidth=1.2, zorder=5)
    axes.text((scale(start_s) + scale(end_s)) / 2, -0.55, "enlarged below", ha="center", va="bottom", fontsize=8)


def _longest_loop(timeline: Timeline) -> tuple[float, float, str] | None:
    """Start, end and label of the last walked iteration of the loop whose repeats last longest."""
    repeats = [event for event in timeline.events if event.category == "repeat"]
    if not repeats:
        return None
    longest = max(repeats, key=lambda event: event.end_s - event.start_s)
    iteration = (longest.end_s - longest.start_s) / longest.trips
    loop = longest.name.split(":")[0]
    # What autodiff made has this word in its scope.
    which = "the backward loop" if "transpose(" in longest.op_name else "the loop"
    return longest.start_s - iteration, longest.start_s, f"{which} {loop} ({duration(iteration)})"


def _colour_key(event: Event) -> tuple[str, str]:
    key = (event.category, event.kind)
    return key if key in _COLOURS else (event.category, "")


def _draw_bar(axes: Axes, timeline: Timeline) -> None:
    """Where the time goes, as one horizontal bar with a label on every part that has room for it."""
    position = 0.0
    for label, seconds, share in breakdown(timeline)[1:]:
        if label.startswith("  ") or seconds == 0:
            continue
        category = _BAR_CATEGORY[label]
        colour = _COLOURS[category]
        axes.barh(0, share, left=position, color=colour, edgecolor="white", hatch=_HATCH.get(category[0], ""))
        if share > 0.04:
            text = f"{label}\n{duration(seconds)}, {share:.1%}" if share > 0.15 else f"{label.split()[0]}\n{share:.1%}"
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1.5}
            axes.text(position + share / 2, 0, text, ha="center", va="center", color="white", fontsize=9, bbox=box)
        position += share
    axes.set_xlim(0, 1)
    axes.set_axis_off()


_BAR_CATEGORY = {
    "compute": ("compute", "einsum"),
    "exposed asynchronous wait": ("exposed", ""),
    "blocking collectives": ("blocking", ""),
    "waiting for other slices": ("dcn", ""),
    "waiting for copies on the device": ("memory", ""),
    "waiting for the host": ("host", ""),
}


def _draw_rows(axes: Axes, timeline: Timeline, events: Sequence[Event], start_s: float, end_s: float) -> None:
    """All rows between two moments, in milliseconds from the first."""
    scale = _scale(events, start_s, end_s)
    left, right = scale(start_s), scale(end_s)
    places = {row: len(timeline.rows) - 1 - number for number, row in enumerate(timeline.rows)}
    bars: dict[tuple[str, tuple[str, str]], list[tuple[float, float]]] = {}
    for event in events:
        begin, end = max(left, scale(event.start_s)), min(right, scale(event.end_s))
        if end > begin:
            bars.setdefault((event.row, _colour_key(event)), []).append((begin - left, end - begin))
    for (row, key), spans in bars.items():
        style: dict[str, Any] = {"facecolors": _COLOURS[key], "hatch": _HATCH.get(key[0], ""), "edgecolor": "white"}
        axes.broken_barh(spans, (places[row] - 0.4, 0.8), linewidth=0.3 if len(spans) < 400 else 0.0, **style)
    for event in events:
        begin, end = scale(event.start_s) - left, scale(event.end_s) - left
        if event.category == "repeat":
            axes.axvspan(begin, end, color=_COLOURS["repeat", ""], zorder=0)
            middle = ((begin + end) / 2, len(places) / 2 - 0.5)
            axes.text(*middle, f"{event.trips} more iterations", rotation=90, **_CENTRE)
        elif event.row == "compute" and end - begin > 0.07 * (right - left):
            key = _colour_key(event)
            box = {"facecolor": _COLOURS[key], "edgecolor": "none", "pad": 1.0} if key[0] in _HATCH else None
            ink = "black" if key == ("compute", "other") else "white"
            axes.text(
                (begin + end) / 2, places["compute"], short_label(event), color=ink, bbox=box, clip_on=True, **_CENTRE
            )
    axes.set_yticks(list(places.values()), [_row_label(row) for row in places])
    axes.set_ylim(-0.6, len(places) - 0.4)
    axes.set_xlim(0, max(right - left, 1e-12))
    repeats = any(event.category == "repeat" for event in events)
    axes.set_xlabel("milliseconds, repeated iterations left out" if repeats else "milliseconds")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


_CENTRE: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}


def _scale(events: Sequence[Event], start_s: float, end_s: float) -> _Scale:
    repeats = [event for event in events if event.category == "repeat"]
    shown = (end_s - start_s) - sum(event.end_s - event.start_s for event in repeats)
    # Nested repeats lie inside no other, since a repeated body is not walked again.
    width = shown * _REPEAT_WIDTH
    return _Scale(tuple((e.start_s, e.end_s, min(width, e.end_s - e.start_s)) for e in repeats))


def _row_label(row: str) -> str:
    return row if row in ("compute", "memory", "dcn", "host") else f"link {row}"
