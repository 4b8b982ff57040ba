"""Queues for everything that moves data: each link between chips, the memory's copy engine, the network of slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.program import Transfer
from overlapfx.plan.torus import Coord, Link, Torus, Traffic, collective_traffic, permute_traffic

_LETTERS = "XYZ"
_MEDIA = ("dcn", "memory", "host")
_NO_LINKS = Traffic({}, 0)


@dataclasses.dataclass(frozen=True)
class Passage:
    """When a transfer is over, with the time that it occupies each row of the watched device."""

    end_s: float
    rows: tuple[tuple[str, float, float], ...]


@dataclasses.dataclass(frozen=True)
class _Pattern:
    """Load per class of links, the rows of the watched device that it uses (row, class), the latency in hops."""

    load: tuple[tuple[int, float], ...]
    rows: tuple[tuple[str, int], ...]
    hops: int


class Network:
    """Hands out the links to transfers in the order in which they are issued.

    All devices run the same program in lockstep, so a transfer of all of them is issued at once, and it is over when
    the slowest part has arrived. Links that every transfer of the program loads alike are one class with one queue.
    """

    def __init__(
        self,
        torus: Torus,
        coords: Sequence[Coord],
        transfers: Iterable[Transfer],
        assumptions: Assumptions,
        watched: int = 0,
    ) -> None:
        self._torus = torus
        self._coords = coords
        self._assumptions = assumptions
        traffic: dict[tuple[str, int], Traffic] = {}
        self._keep: list[Transfer] = []  # patterns are known by the identity of their groups or pairs
        for transfer in transfers:
            if transfer.medium == "ici" and _key(transfer) not in traffic:
                traffic[_key(transfer)] = self._traffic(transfer)
                self._keep.append(transfer)
        self._patterns = self._classify(traffic, watched)
        num_classes = 1 + max((c for p in self._patterns.values() for c, _ in p.load), default=-1)
        self._busy_until = [0.0] * num_classes
        self._medium_until: dict[str, float] = {}

    def send(self, transfer: Transfer, now_s: float) -> Passage:
        """Queue `transfer`, issued at `now_s`."""
        if transfer.medium != "ici":
            return self._queue(transfer, now_s)
        pattern = self._patterns[_key(transfer)]
        wire_s = transfer.payload_bytes / self._assumptions.link_bytes_per_s
        end = now_s
        spans: dict[int, tuple[float, float]] = {}
        for link_class, load in pattern.load:
            begin = max(now_s, self._busy_until[link_class])
            self._busy_until[link_class] = begin + load * wire_s
            spans[link_class] = (begin, begin + load * wire_s)
            end = max(end, begin + load * wire_s)
        rows = tuple((row, *spans[link_class]) for row, link_class in pattern.rows)
        return Passage(end + pattern.hops * self._assumptions.hop_latency_s, rows)

    def loads(self, transfer: Transfer) -> tuple[tuple[tuple[int, float], ...], float]:
        """Seconds by queue that `transfer` occupies, and the latency that it pays once; queues have numbers."""
        figures = self._assumptions
        if transfer.medium != "ici":
            seconds, latency = self._passage(transfer)
            return ((-1 - _MEDIA.index(transfer.medium), seconds),), latency
        pattern = self._patterns[_key(transfer)]
        wire_s = transfer.payload_bytes / figures.link_bytes_per_s
        return tuple((c, load * wire_s) for c, load in pattern.load), pattern.hops * figures.hop_latency_s

    def _queue(self, transfer: Transfer, now_s: float) -> Passage:
        """Copies and transfers between slices: one queue per medium."""
        begin = max(now_s, self._medium_until.get(transfer.medium, 0.0))
        seconds, latency = self._passage(transfer)
        free = begin + seconds
        self._medium_until[transfer.medium] = free
        return Passage(free + latency, ((transfer.medium, begin, free),))

    def _passage(self, transfer: Transfer) -> tuple[float, float]:
        """Seconds in the queue of a medium other than the links, latency after it."""
        figures = self._assumptions
        if transfer.medium == "dcn":
            crossing = _dcn_share(transfer.kind, transfer.num_slices) * transfer.payload_bytes
            return crossing / figures.dcn_bytes_per_s, figures.dcn_latency_s
        rate = figures.host_bytes_per_s if transfer.medium == "host" else figures.hbm_bytes_per_s
        return transfer.payload_bytes / rate, 0.0

    def _traffic(self, transfer: Transfer) -> Traffic:
        place = self._coords
        if transfer.pairs is not None:
            return permute_traffic(self._torus, [(place[src], place[dst]) for src, dst in transfer.pairs])
        groups = transfer.groups or ()
        if not groups or len(groups[0]) < 2:
            return _NO_LINKS
        return collective_traffic(self._torus, transfer.kind, [[place[i] for i in group] for group in groups])

    def _classify(self, traffic: dict[tuple[str, int], Traffic], watched: int) -> dict[tuple[str, int], _Pattern]:
        """Number the classes of links, express every pattern by them."""
        signatures: dict[Link, list[tuple[int, float]]] = {}
        for number, pattern in enumerate(traffic.values()):
            for link, load in pattern.load.items():
                signatures.setdefault(link, []).append((number, load))
        numbers: dict[tuple[tuple[int, float], ...], int] = {}
        class_of = {link: numbers.setdefault(tuple(sig), len(numbers)) for link, sig in signatures.items()}
        own = {link: row_name(self._torus, link) for link in self._torus.links_from(self._coords[watched])}
        patterns = {}
        for key, pattern in traffic.items():
            load_of_class = {class_of[link]: load for link, load in pattern.load.items()}
            rows = tuple((name, class_of[link]) for link, name in own.items() if link in pattern.load)
            patterns[key] = _Pattern(tuple(load_of_class.items()), rows, pattern.hops)
        return patterns


def row_name(torus: Torus, link: Link) -> str:
    """How a link of the watched device is called: torus dimension with direction (`X+`), or `core`."""
    _, dim, sign = link
    if dim == len(torus.shape):
        return "core"
    letter = _LETTERS[dim] if dim < len(_LETTERS) else f"D{dim}"
    return f"{letter}{'+' if sign > 0 else '-'}"


def _key(transfer: Transfer) -> tuple[str, int]:
    members = transfer.pairs if transfer.pairs is not None else transfer.groups
    return (transfer.kind, id(members))


def _dcn_share(kind: str, num_slices: int) -> float:
    """Payloads that leave each device for other slices; `payload` is what it hands to the runtime."""
    others = (num_slices - 1) / num_slices
    return {"all-reduce": 2 * others, "reduce-scatter": others, "all-to-all": others, "all-gather": num_slices - 1}.get(
        kind, 1.0
    )
