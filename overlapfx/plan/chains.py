"""The paper's rings as small tables: which shard is where in which round."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

# A ring of N devices sends by -1 ({1 -> 0}, {2 -> 1}, ..., {0 -> N-1}, the paper's direction) or by +1.
# Distances are counted against the direction of travel: what device i holds after k hops by -1 started at device i + k.


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part [offset, offset + size) of a shard along the communicated label."""

    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class Stream:
    """Shards of an AllGather that travel one way.

    In round r the device holds the shard at distance r. It multiplies it when start <= r < stop, and sends it on while
    r + 1 < stop. Streams of one pair share one einsum per round.
    """

    piece: Piece
    step: int  # -1 or +1
    start: int
    stop: int
    pair: int = 0


@dataclasses.dataclass(frozen=True)
class Chain:
    """Accumulators of a ReduceScatter that travel one way.

    In round r the device adds its partial einsum for the shard at distance last + stride * (count - 1 - r) downstream;
    between rounds the accumulator moves `stride` hops, after the last one `last` hops to the shard's owner. Chains of
    one pair share one einsum per round.
    """

    piece: Piece
    step: int
    count: int
    stride: int
    last: int
    pair: int = 0

    def distance(self, r: Any) -> Any:
        """How far downstream the shard of round `r` lives; `r` is an int, or one that is traced."""
        return self.last + self.stride * (self.count - 1 - r)


# Columns that a register of a TPU holds.
_LANES = 128


def halves(piece: Piece) -> tuple[Piece, ...]:
    """A piece cut in two, unevenly if its size is odd; a piece of one row stays whole.

    Four registers or more are cut between registers, maybe unevenly: where they are not, TPU compilers turn over in
    memory all arrays that the pieces are added to, and every einsum that adds more takes a quarter longer. Of three,
    two would travel one way while the other way is half idle, which costs more.
    """
    unit = _LANES if piece.size % _LANES == 0 and piece.size >= 4 * _LANES else 1
    low = -(-piece.size // (2 * unit)) * unit
    if low == piece.size:
        return (piece,)
    return Piece(piece.offset, low), Piece(piece.offset + low, piece.size - low)


def gather_streams(num_shards: int, shard_size: int, direction: str) -> tuple[Stream, ...]:
    """Streams that bring every shard to every device with num_shards - 1 sends of a whole shard in total.

    "one": all shards by -1. "two": each half shard its own way, both multiplied in every round. "two_whole": whole
    shards both ways, two arrivals a round, about half as many rounds (paper 5.4.2; its prologue is round 0, where the
    device multiplies its own shard).
    """
    whole = Piece(0, shard_size)
    if direction == "one":
        return (Stream(whole, -1, 0, num_shards),)
    if direction == "two":
        return tuple(Stream(p, 2 * i - 1, 0, num_shards, pair=i) for i, p in enumerate(halves(whole)))
    if direction == "two_whole":
        down = Stream(whole, -1, 0, num_shards // 2 + 1)
        up = Stream(whole, +1, 1, (num_shards - 1) // 2 + 1)
        return (down, up) if up.stop > up.start else (down,)
    raise ValueError(f"ring direction {direction!r} is not one of one, two, two_whole.")


def scatter_chains(
    num_shards: int, shard_size: int, direction: str, unroll: int, interleave: str = "halves"
) -> tuple[Chain, ...]:
    """Chains that bring every partial einsum to its shard's owner.

    Directions as for `gather_streams`; in "two_whole" the owner joins what came from both sides (the paper's epilogue).
    unroll 2 makes two interleaved chains out of each, so that an addition fused into one chain's einsum never waits for
    that chain's own transfer. There are two ways to split the work:
    - "parity", the paper's figure 8: one chain visits the devices at even distance, the other those at odd distance,
    two
      hops at a time, and an epilogue of one hop joins them. num_shards - 1 sends of whole shards, but a send of two
      hops occupies two links: 2 * num_shards - 3 link transfers in one direction.
    - "halves": each chain carries half of the shard, one hop at a time. num_shards - 1 link transfers, einsums half as
    wide.
    """
    whole = Piece(0, shard_size)
    if direction == "one":
        spans = [(whole, -1, 0, num_shards - 1)]
    elif direction == "two":
        spans = [(p, s, 0, num_shards - 1) for p, s in zip(halves(whole), (-1, +1), strict=False)]
    elif direction == "two_whole":
        spans = [(whole, -1, 0, num_shards // 2), (whole, +1, 1, (num_shards - 1) // 2)]
    else:
        raise ValueError(f"ring direction {direction!r} is not one of one, two, two_whole.")
    if unroll == 2 and interleave == "halves":
        spans = [(half, step, near, far) for piece, step, near, far in spans for half in halves(piece)]
        unroll = 1
    chains: list[Chain] = []
    for way in (-1, +1):
        mine = [
            (piece, (far - last) // unroll + 1, last)
            for piece, step, near, far in spans
            if step == way
            for last in range(near, min(near + unroll, far + 1))
        ]
        # In "two_whole" the i-th chain one way is paired with the i-th the other way; otherwise nothing is paired.
        base = len(chains) if direction == "two" else 0
        chains += [Chain(p, way, count, unroll, last, base + i) for i, (p, count, last) in enumerate(mine)]
    return tuple(chains)


# Numbers of rows that the parts of an einsum should have, or a multiple of them.
_UNITS = (1024, 512, 256, 128, 64, 32, 16, 8)


def stripe_sizes(size: int, pieces: int, grow: bool) -> tuple[int, ...]:
    """Cuts `size` into at most `pieces` parts; growing ones start small, so that little is exposed before the first
    product.

    Growing parts have sizes in the ratio 1 : 2 : 2 : ..., about: where they can, all are multiples of a large power of
    two, since einsums of any other number of rows are dearer, and so is placing what they give. Every part is at least
    1 and they add up to `size`.
    """
    pieces = max(1, min(pieces, size))
    weights = [1] + [2 if grow else 1] * (pieces - 1)
    total = sum(weights)
    unit = next((u for u in _UNITS if size % u == 0 and size // u >= total), 1)
    bounds = [0]
    for i in range(pieces):
        ideal = size // unit * sum(weights[: i + 1]) // total
        bounds.append(max(ideal, bounds[-1] + 1) if i < pieces - 1 else size // unit)
    sizes = tuple((b - a) * unit for a, b in itertools.pairwise(bounds))
    assert sum(sizes) == size and min(sizes) >= (1 if size else 0), (size, pieces, sizes)
    return sizes
