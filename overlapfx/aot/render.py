"""A time line written out: text tables, plain JSON values, a trace file."""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.timeline import Event, Timeline

CATEGORY_NAMES = {
    "compute": "compute",
    "exposed": "exposed asynchronous wait",
    "blocking": "blocking collectives",
    "dcn": "waiting for other slices",
    "memory": "waiting for copies on the device",
    "host": "waiting for the host",
}
KIND_NAMES = {"einsum": "einsums", "kernel": "custom kernels", "other": "all else"}


def breakdown(timeline: Timeline) -> list[tuple[str, float, float]]:
    """(label, seconds, share of the total) per category with its kinds below it, indented; zero rows are left out."""
    rows = [("total", timeline.total_s, 1.0 if timeline.total_s else 0.0)]
    for category, name in CATEGORY_NAMES.items():
        seconds = timeline.seconds(category)
        if seconds == 0 and category not in ("compute", "exposed", "blocking"):
            continue
        rows.append((name, seconds, _share(seconds, timeline.total_s)))
        for kind, part in timeline.by_kind(category).items():
            rows.append((f"  {KIND_NAMES.get(kind, kind)}", part, _share(part, timeline.total_s)))
    return rows


def duration(seconds: float) -> str:
    """A time with three or four digits and a fitting unit."""
    if seconds == 0:
        return "0"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def text_table(timeline: Timeline) -> str:
    """The breakdown, the asynchronous transfers that hide badly, everything not understood, as aligned text."""
    lines = [f"{label:34s} {duration(seconds):>10s} {share:7.1%}" for label, seconds, share in breakdown(timeline)]
    between = [t for t in timeline.transfers if t.medium in ("ici", "dcn") and t.count]
    if between:
        hidden = sum(t.is_overlapped for t in between)
        lines.append(f"asynchronous transfers between chips: {len(between)}, {hidden} of them with work beside them")
    for title, counts in (("not understood", timeline.unknown), ("approximated", timeline.notes)):
        if counts:
            lines.append(f"{title}:")
            lines += [f"  {count} x {what}" for what, count in sorted(counts.items())]
    return "\n".join(lines)


def assumptions_table(assumptions: Assumptions) -> str:
    """Every assumed figure with unit and source, as aligned text."""
    return "\n".join(f"{name:18s} {value:12.4g} {unit:8s} {source}" for name, value, unit, source in assumptions.rows())


def as_dict(timeline: Timeline) -> dict[str, Any]:
    """Totals, breakdown, transfers, counts and assumptions as plain JSON values; seconds and bytes."""
    return {
        "total_s": timeline.total_s,
        "compute_s": timeline.compute_s,
        "exposed_s": timeline.exposed_s,
        "blocking_s": timeline.blocking_s,
        "repeated_s": timeline.repeated_s,
        "communication_share": timeline.communication_share,
        "breakdown": {c: timeline.by_kind(c) for c in CATEGORY_NAMES if timeline.seconds(c)},
        "transfers": [
            {
                "name": t.name,
                "op_name": t.op_name,
                "kind": t.kind,
                "medium": t.medium,
                "payload_bytes": t.payload_bytes,
                "count": t.count,
                "transfer_s": t.transfer_s,
                "work_s": t.work_s,
                "exposed_s": t.exposed_s,
            }
            for t in timeline.transfers
        ],
        "unknown": dict(timeline.unknown),
        "notes": dict(timeline.notes),
        "assumptions": [{"name": n, "value": v, "unit": u, "source": s} for n, v, u, s in timeline.assumptions.rows()],
    }


def trace_events(timeline: Timeline) -> list[dict[str, Any]]:
    """Events in the Trace Event Format, which Perfetto and chrome://tracing open; times in microseconds."""
    threads = {row: number for number, row in enumerate(timeline.rows)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "one device of the slice (predicted)"}}
    ]
    for row, number in threads.items():
        name = row if row in ("compute", "memory", "dcn", "host") else f"link {row}"
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
    for event in timeline.events:
        begin, end = (round(seconds * 1e9) for seconds in (event.start_s, event.end_s))
        args: dict[str, Any] = {"instruction": event.name, "op_name": event.op_name, "kind": event.kind}
        if event.payload_bytes:
            args["payload_bytes"] = event.payload_bytes
        if event.trips:
            args["more_iterations"] = event.trips
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": threads[event.row],
                "name": _trace_label(event),
                "cat": event.category,
                # Whole nanoseconds, or rounding would make neighbours overlap, which Perfetto does not draw.
                "ts": begin / 1e3,
                "dur": (end - begin) / 1e3,
                "args": args,
            }
        )
    return events


def _trace_label(event: Event) -> str:
    if event.category == "repeat":
        return event.name
    return short_label(event) if event.category == "compute" else f"{event.category} {event.kind}"


def write_trace(timeline: Timeline, path: str | pathlib.Path) -> None:
    """Write a trace file for Perfetto."""
    document = {"displayTimeUnit": "ms", "traceEvents": trace_events(timeline)}
    pathlib.Path(path).write_text(json.dumps(document), encoding="utf-8")


def short_label(event: Event) -> str:
    """A few characters that name an event: the einsum of its scope, else the last part, else the kind of transfer."""
    if event.category in ("exposed", "blocking", "dcn"):
        return event.kind
    einsum = re.search(r"[A-Za-z,.]+->[A-Za-z]*", event.op_name)
    text = einsum[0] if einsum else event.op_name.rsplit("/", 1)[-1] or event.name
    return text if len(text) <= 18 else text[:17] + "…"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
