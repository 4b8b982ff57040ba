"""Which point of a sweep is the best, by how much, over what."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from launch.sweep_points import MODE, Point

# Estimates of programs that differ by less are not told apart.
TIE = 0.02
FITS, TOO_LARGE, FAILED, ILLEGAL = "fits", "does not fit", "failed", "illegal"


@dataclasses.dataclass(frozen=True)
class Row:
    """A point with what became of it: `result` is the record of the store, None for an illegal point."""

    point: Point
    result: Mapping[str, Any] | None

    @property
    def state(self) -> str:
        """FITS, TOO_LARGE, FAILED or ILLEGAL."""
        if self.result is None:
            return ILLEGAL
        if self.result["outcome"] == "ok":
            return FITS if self.result["fits"] else TOO_LARGE
        return TOO_LARGE if self.result["outcome"] == "does not fit" else FAILED

    @property
    def why(self) -> str:
        """The reason of anything but FITS."""
        if self.result is None:
            return self.point.why
        if self.state == TOO_LARGE and "why" not in self.result:
            return f"{gib(self['memory_bytes'])} needed on a device that has {gib(self['hbm_bytes'])}."
        return self.result.get("why", "")

    @property
    def mode(self) -> str:
        """The overlap mode, as given where the config was refused."""
        config = self.point.config
        return dict(self.point.settings).get(MODE, "") if config is None else config.overlap.mode

    @property
    def others(self) -> str:
        """The other swept fields with their values."""
        return ", ".join(f"{name}={text}" for name, text in self.point.swept if name != MODE)

    def __getitem__(self, name: str) -> Any:
        """A figure of the result; None where there is none."""
        return None if self.result is None else self.result.get(name)

    def about(self) -> str:
        """Mesh and settings in words."""
        others = f", {self.others}" if self.others else ""
        return f"{self.point}" if self.result is None else f"mesh {_mesh(self)} with overlap {self.mode}{others}"


def _mesh(row: Row) -> str:
    mesh = row.point.mesh
    replica = f"replica={mesh.replica}, " if mesh.replica > 1 else ""
    return f"{replica}y={mesh.y}, x={mesh.x}"


def gib(size: float | None) -> str:
    """Bytes as GiB; MiB where there is less than a tenth."""
    if size is None:
        return "n/a"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def duration(seconds: float, digits: int = 4) -> str:
    """A time with so many digits and a fitting unit: `12.68 s`, `625.4 us`."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.{digits}g} {unit}"
    return f"{seconds * 1e6:.{digits}g} us"


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Those that fit before all others, then by tokens per second and chip, which on one slice is by step time."""
    order = (FITS, TOO_LARGE, FAILED, ILLEGAL)
    return sorted(rows, key=lambda row: (order.index(row.state), -(row["tokens_per_s_per_chip"] or 0.0)))


def over_off(row: Row, rows: Sequence[Row]) -> float | None:
    """How many times as fast as the same point with overlap off, below 1 if slower; None if that has no step time."""
    off = [other for other in rows if other.mode == "off" and other["step_s"] and _alike(other, row)]
    if not off or not row["step_s"]:
        return None
    own = [pair for pair in row.point.settings if pair[0] != MODE]
    exact = [other for other in off if [pair for pair in other.point.settings if pair[0] != MODE] == own]
    return (exact or off)[0]["step_s"] / row["step_s"]


def _alike(one: Row, other: Row) -> bool:
    """Whether two points differ in nothing but overlap."""

    def rest(row: Row) -> tuple[Any, ...]:
        fields = tuple(pair for pair in row.point.settings if not pair[0].startswith("overlap."))
        return (row.point.target, row.point.mesh, fields)

    return rest(one) == rest(other)


def best_by_target(rows: Sequence[Row]) -> dict[str, Row | None]:
    """For every slice, in the order of `rows`, the best point that fits; None if none does."""
    names = dict.fromkeys(row.point.target.name for row in rows)
    return {name: _best([row for row in rows if row.point.target.name == name]) for name in names}


def _best(rows: Sequence[Row]) -> Row | None:
    first = next(iter(ranked(rows)), None)
    return first if first is not None and first.state == FITS else None


def answer(config_name: str, best: Row, rows: Sequence[Row], measured: bool) -> str:
    """Which mesh and which overlap setting to use on the best row's slice, how sure that is.

    rows: all of the sweep.
    """
    here = [row for row in ranked(rows) if row.point.target == best.point.target and row.state == FITS]
    verb = "measured" if measured else "predicted"
    figures = [f"{duration(best['step_s'])} per step {verb}"]
    if best["mfu"] is not None:
        figures.append(f"MFU {best['mfu']:.1%}")
    memory = f"{gib(best['memory_bytes'])} of memory per device"
    figures.append(memory + (f" of {gib(best['hbm_bytes'])}" if best["hbm_bytes"] else ""))
    gains = []
    gain = over_off(best, rows)
    if best.mode != "off" and gain is not None:
        gains.append(f"{gain:.3f}x the speed of overlap off on this mesh")
    elsewhere = next((row for row in here if row.point.mesh != best.point.mesh), None)
    if elsewhere is not None:
        ratio = best["tokens_per_s"] / elsewhere["tokens_per_s"]
        gains.append(f"{ratio:.3f}x the best of any other mesh ({_mesh(elsewhere)}, overlap {elsewhere.mode})")
    text = f"For {config_name} on {best.point.target.name}, use {best.about()}: {', '.join((*figures, *gains))}."
    close = [row for row in here[1:] if _is_close(best, row)]
    if close:
        names = "; ".join(row.about() for row in close[:3]) + ("; ..." if len(close) > 3 else "")
        text += f" Too close behind to be told apart: {names}."
    return text if measured else text + _sensitivity(best, here)


def _is_close(best: Row, row: Row) -> bool:
    """Less than TIE behind, or a measurement whose steps overlap with those of the best."""
    if best["tokens_per_s"] / row["tokens_per_s"] < 1 + TIE:
        return True
    if best["step_s_max"] is None:
        return False
    tokens = best["tokens_per_s"] * best["step_s"], row["tokens_per_s"] * row["step_s"]
    return tokens[1] / row["step_s_min"] >= tokens[0] / best["step_s_max"]


def _sensitivity(best: Row, here: Sequence[Row]) -> str:
    """Whether slower or faster links would change the choice."""
    changes = []
    factors = best["step_s_by_link_factor"] or {}
    for factor in factors:

        def rate(row: Row, factor: str = factor) -> float:
            return row["tokens_per_s"] * row["step_s"] / row["step_s_by_link_factor"][factor]

        first = max(here, key=rate)
        if first is not best and rate(first) > rate(best):
            changes.append(f"with links {factor}x as fast, {first.about()} would be the best")
    if not factors or changes:
        return f" But {'; '.join(changes)}." if changes else ""
    return f" The choice is the same with links {' or '.join(f'{factor}x' for factor in factors)} as fast."


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Rows with a time than which no other is both as fast and as small, the smallest memory first."""
    timed = [row for row in rows if row["step_s"] and row["memory_bytes"]]
    front: list[Row] = []
    for row in sorted(timed, key=lambda row: (row["memory_bytes"], row["step_s"])):
        if not front or row["step_s"] < front[-1]["step_s"]:
            front.append(row)
    return front
