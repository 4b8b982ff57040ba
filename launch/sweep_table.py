"""The results of a sweep as aligned text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from launch.sweep_points import mesh_text
from launch.sweep_rank import FAILED, FITS, ILLEGAL, TOO_LARGE, Row, best_by_target, duration, gib, over_off, ranked

MAX_ROWS = 40
COLUMNS = ("slice", "mesh", "overlap", "settings", "step", "MFU", "HFU", "exposed", "memory", "fits", "over off")
PER_CHIP = "tokens/s/chip"
# How to read the figures.
_BOTH_NOTES = (
    "Over off: how many times as fast as the same point with overlap off; below 1 is slower. Both have the compiler "
    "options of a run on TPUs, with which the compiler makes some collectives asynchronous by itself.",
    "MFU counts model FLOPs, HFU adds recomputation. Memory is what the compiler reserves on one device.",
)
PLANNED_NOTES = (
    "All figures are estimates: the real step is compiled for the slice, and the compiled program is walked with "
    "published figures of the chip (overlapfx plan prints them, with every site of the program).",
    "Exposed is communication beside which nothing is computed, seconds per step and share of it.",
    *_BOTH_NOTES,
)
MEASURED_NOTES = (
    "Step times are medians of real steps on made-up tokens, each from the end of the one before to its own end.",
    *_BOTH_NOTES,
)


def cells(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """What the table shows of one row, by column."""
    gain = over_off(row, rows)
    step_s, share = row["step_s"], row["communication_share"]
    return {
        "slice": row.point.target.name,
        "mesh": mesh_text(row.point.mesh),
        "overlap": row.mode,
        "settings": row.others,
        "step": "" if step_s is None else duration(step_s),
        "MFU": _percent(row["mfu"]),
        "HFU": _percent(row["hfu"]),
        "exposed": "" if share is None else f"{duration(row['communication_s'], 3)} {share:.0%}",
        "memory": "" if row["memory_bytes"] is None else gib(row["memory_bytes"]),
        "fits": {FITS: "yes", TOO_LARGE: "NO"}.get(row.state, ""),
        "over off": "" if gain is None else f"{gain:.3f}x",
        PER_CHIP: "" if row["tokens_per_s_per_chip"] is None else f"{row['tokens_per_s_per_chip']:,.0f}",
    }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def ranking(rows: Sequence[Row]) -> str:
    """One line per point that has a result, the best first; columns that say nothing are left out."""
    shown = [row for row in ranked(rows) if row.state in (FITS, TOO_LARGE)]
    if not shown:
        return "no point has a result"
    lines = [cells(row, rows) for row in shown[:MAX_ROWS]]
    one_slice = len({row.point.target for row in rows}) == 1
    names = [
        name
        for name in (*COLUMNS, PER_CHIP)
        if any(line[name] for line in lines) and not (name == "slice" and one_slice)
    ]
    widths = {name: max(len(name), *(len(line[name]) for line in lines)) for name in names}
    text_columns = ("slice", "mesh", "overlap", "settings", "fits")

    def joined(line: dict[str, str], rank: str) -> str:
        parts = [f"{line[n]:{widths[n]}s}" if n in text_columns else f"{line[n]:>{widths[n]}s}" for n in names]
        return f"{rank:>4s}  " + "  ".join(parts).rstrip()

    text = [joined({name: name for name in names}, "rank")]
    text += [joined(line, str(number)) for number, line in enumerate(lines, start=1)]
    if len(shown) > MAX_ROWS:
        text.append(f"      and {len(shown) - MAX_ROWS} more in the files")
    return "\n".join(text)


def reasons(rows: Sequence[Row]) -> str:
    """Every point without a step time, with the reason; "" if there is none. Settings of one mesh share a line."""
    texts = []
    titles = {TOO_LARGE: "do not fit", FAILED: "failed", ILLEGAL: "illegal by the checks of the config"}
    for state, title in titles.items():
        found: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if row.state == state and row["step_s"] is None:
                where = f"{row.point.target.name} {mesh_text(row.point.mesh)}"
                setting = ", ".join(filter(None, (row.mode, row.others)))
                found.setdefault((where, row.why), []).append(setting)
        if found:
            texts.append(f"{title}: {sum(map(len, found.values()))}")
            texts += [f"  {where} ({'; '.join(settings)}): {why}" for (where, why), settings in found.items()]
    return "\n".join(texts)


def slices(rows: Sequence[Row]) -> str:
    """The best of every slice side by side; "" for one slice."""
    best = best_by_target(rows)
    if len(best) < 2:
        return ""
    lines = ["the best of every slice:"]
    width = max(map(len, best))
    for name, row in best.items():
        if row is None:
            lines.append(f"  {name:{width}s}  nothing fits")
            continue
        rates = f"{row['tokens_per_s_per_chip']:>10,.1f} {PER_CHIP}  {row['tokens_per_s']:>12,.0f} tokens/s"
        mfu = _percent(row["mfu"]) or "n/a"
        lines.append(f"  {name:{width}s}  {rates}  {row['num_chips']:>5d} chips  MFU {mfu}  {row.about()}")
    return "\n".join(lines)


def counts(rows: Sequence[Row]) -> str:
    """`14 points: 12 fit, 2 failed`."""
    found = Counter(row.state for row in rows)
    words = {FITS: "fit", TOO_LARGE: "do not fit", FAILED: "failed", ILLEGAL: "illegal"}
    return f"{len(rows)} points: " + ", ".join(
        f"{found[state]} {word}" for state, word in words.items() if found[state]
    )
