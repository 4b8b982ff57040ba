"""The ring tables: shards visit every device once, partial einsums reach their owner once, nothing travels twice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapfx.plan.chains import Chain, Piece, Stream, gather_streams, halves, scatter_chains, stripe_sizes

pytestmark = pytest.mark.core

DIRECTIONS = ("one", "two", "two_whole")
RINGS = list(itertools.product((2, 3, 4, 5, 6, 7, 8, 9, 16), (1, 2, 3, 4, 5)))


def row_hops(chains: tuple[Chain, ...]) -> int:
    """Link transfers of a ReduceScatter by every device, in rows."""
    return sum(c.piece.size * ((c.count - 1) * c.stride + c.last) for c in chains)


def deliver(num_shards: int, shard_size: int, chains: tuple[Chain, ...]) -> np.ndarray:
    """How often the partial einsum of device d for row w of shard s ends in the accumulator of device o: [o, s, w, d].

    Accumulators move as the code says, not as `distance` says, so that one checks the other.
    """
    delivered = np.zeros((num_shards, num_shards, shard_size, num_shards), int)
    for chain, start in itertools.product(chains, range(num_shards)):
        device, held = start, []
        for r in range(chain.count):
            if r:
                device = (device + chain.step * chain.stride) % num_shards
            held.append((device, (device + chain.step * chain.distance(r)) % num_shards))
        owner = (device + chain.step * chain.last) % num_shards
        rows = slice(chain.piece.offset, chain.piece.offset + chain.piece.size)
        for worker, shard in held:
            delivered[owner, shard, rows, worker] += 1
    return delivered


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_device_multiplies_every_row_once_for_as_many_sends_as_needed(direction: str) -> None:
    for num_shards, shard_size in RINGS:
        streams = gather_streams(num_shards, shard_size, direction)
        seen = np.zeros((num_shards, shard_size), int)  # by distance, which is the same for all devices
        for s in streams:
            for r in range(s.start, s.stop):
                seen[-s.step * r % num_shards, s.piece.offset : s.piece.offset + s.piece.size] += 1
        assert (seen == 1).all(), streams
        # A stream sends in every round but its last, whether or not it multiplies what it holds.
        assert sum((s.stop - 1) * s.piece.size for s in streams) == (num_shards - 1) * shard_size, streams


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("unroll", "interleave"), [(1, "halves"), (2, "halves"), (2, "parity")])
def test_every_partial_einsum_reaches_its_owner_once(direction: str, unroll: int, interleave: str) -> None:
    for num_shards, shard_size in RINGS:
        chains = scatter_chains(num_shards, shard_size, direction, unroll, interleave)
        delivered = deliver(num_shards, shard_size, chains)
        owned = np.zeros_like(delivered)
        owned[np.arange(num_shards), np.arange(num_shards)] = 1
        np.testing.assert_array_equal(delivered, owned, err_msg=str(chains))
        if interleave == "halves":
            assert row_hops(chains) == (num_shards - 1) * shard_size, chains


@pytest.mark.parametrize("num_shards", [3, 4, 8, 9])
def test_parity_chains_cost_two_links_per_hop(num_shards: int) -> None:
    # By hand: N-1 sends of which all but the epilogue's one take two links, 2 (N - 2) + 1.
    assert row_hops(scatter_chains(num_shards, 1, "one", 2, "parity")) == 2 * num_shards - 3


def test_two_directions_halve_the_rounds() -> None:
    for n in (4, 5, 8):
        assert max(s.stop for s in gather_streams(n, 4, "one")) == n
        assert max(s.stop for s in gather_streams(n, 4, "two_whole")) == n // 2 + 1
        assert max(c.count for c in scatter_chains(n, 4, "two_whole", 1)) == n // 2 + 1


def test_rings_of_four_by_hand() -> None:
    whole = Piece(0, 3)
    assert gather_streams(4, 3, "one") == (Stream(whole, -1, 0, 4),)
    # Own shard and the one from above, then from both sides, then the one opposite.
    assert gather_streams(4, 3, "two_whole") == (Stream(whole, -1, 0, 3), Stream(whole, +1, 1, 2))
    assert gather_streams(4, 3, "two") == (Stream(Piece(0, 2), -1, 0, 4, 0), Stream(Piece(2, 1), +1, 0, 4, 1))
    assert scatter_chains(4, 3, "one", 1) == (Chain(whole, -1, 4, 1, 0, 0),)
    # The paper's figure 8: even distances in one chain, odd ones in the other with one hop to go.
    assert scatter_chains(4, 3, "one", 2, "parity") == (Chain(whole, -1, 2, 2, 0, 0), Chain(whole, -1, 2, 2, 1, 1))
    assert scatter_chains(4, 3, "two_whole", 1) == (Chain(whole, -1, 3, 1, 0, 0), Chain(whole, +1, 1, 1, 1, 0))
    assert [scatter_chains(4, 3, "one", 1)[0].distance(r) for r in range(4)] == [3, 2, 1, 0]


def test_unknown_direction_is_refused() -> None:
    for make in (lambda: gather_streams(4, 2, "both"), lambda: scatter_chains(4, 2, "both", 1)):
        with pytest.raises(ValueError, match="ring direction 'both' is not one of one, two, two_whole"):
            make()


def test_halves_by_hand() -> None:
    assert halves(Piece(4, 5)) == (Piece(4, 3), Piece(7, 2))
    assert halves(Piece(4, 2)) == (Piece(4, 1), Piece(5, 1))
    assert halves(Piece(4, 1)) == (Piece(4, 1),)
    # Between registers of 128 lanes.
    assert halves(Piece(0, 1280)) == (Piece(0, 640), Piece(640, 640))
    assert halves(Piece(640, 640)) == (Piece(640, 384), Piece(1024, 256))
    assert halves(Piece(0, 1152)) == (Piece(0, 640), Piece(640, 512))
    assert halves(Piece(0, 384)) == (Piece(0, 192), Piece(192, 192))
    assert halves(Piece(0, 960)) == (Piece(0, 480), Piece(480, 480))


def test_stripes_by_hand() -> None:
    assert stripe_sizes(14, 4, grow=True) == (2, 4, 4, 4)
    assert stripe_sizes(12, 4, grow=False) == (3, 3, 3, 3)
    assert stripe_sizes(2, 4, grow=True) == (1, 1)
    assert stripe_sizes(0, 4, grow=True) == (0,)
    assert stripe_sizes(16384, 4, grow=True) == (2048, 4096, 5120, 5120)
    assert stripe_sizes(64, 4, grow=True) == (8, 16, 16, 24)


@given(size=st.integers(1, 300), pieces=st.integers(1, 12), grow=st.booleans())
def test_stripes_cover_the_label_and_the_first_is_the_smallest(size: int, pieces: int, grow: bool) -> None:
    sizes = stripe_sizes(size, pieces, grow)
    assert sum(sizes) == size
    assert len(sizes) == min(pieces, size)
    assert min(sizes) >= 1
    assert sizes[0] == min(sizes)
    assert max(sizes) <= 2 * size // len(sizes) + 1
