"""Looped CollectiveEinsum: shards or accumulators travel a ring while the einsums that need them run."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from overlapfx.ops import pieces, ring
from overlapfx.plan.chains import Chain, Stream, gather_streams, scatter_chains
from overlapfx.plan.decide import Plan
from overlapfx.plan.pattern import Problem

Outs = dict[int, tuple[Array, ...]]  # result index -> buffers or running sums


def gather_ring(
    problem: Problem, plan: Plan, operands: Sequence[Array], finish: pieces.Finish, keep: bool
) -> tuple[Outs, Shaped[Array, "..."] | None]:
    """Multiplies the shards of one operand as they arrive (the paper's algorithm 1, AllGather-Einsum).

    In each round the device sends on the shard that it holds and, beside that, multiplies it. The label's role decides
    the rest, term by term: if the other operand has the label too, it is sliced to match (contracting, batch); if the
    result has it, the partial result is placed (free, batch), otherwise added. N - 1 sends: the last shard is not sent
    on.

    Returns every result that depends on the operand, finished where the pieces were final and else as running sums, and
    the gathered operand if `keep`.
    """
    slot = plan.slot
    assert slot is not None
    run = _GatherRing(problem, plan, operands, finish, keep)
    streams = gather_streams(slot.num_shards, slot.shard_size, plan.direction)
    moving, labels = operands[slot.index], problem.operands[slot.index].labels
    held = [pieces.take(moving, labels, slot.label, s.piece.offset, s.piece.size) for s in streams]
    num_rounds = max(s.stop for s in streams)
    first = max(1, *(s.start for s in streams))  # from here on every round is alike, ...
    last = min(s.stop for s in streams) - 1  # ... up to here, where the first stream stops sending
    state: tuple[list[Array], Outs] = (held, {})
    if plan.loop and last - first > 1:
        for r in range(first):
            state = run.round(streams, r, state)
        state = lax.fori_loop(
            first, last, lambda r, s: run.round(streams, r, s, steady=True), state, unroll=plan.unroll
        )
        rest = range(last, num_rounds)
    else:
        rest = range(num_rounds)
    for r in rest:
        state = run.round(streams, r, state)
    outs = state[1]
    kept = outs.pop(_KEPT)[0] if keep else None
    return outs, kept


_KEPT = -1  # key of the gathered operand among the outs


class _GatherRing:
    """The fixed surroundings of one ring: what does not change from round to round."""

    def __init__(
        self, problem: Problem, plan: Plan, operands: Sequence[Array], finish: pieces.Finish, keep: bool
    ) -> None:
        assert plan.slot is not None
        self.problem, self.slot, self.operands, self.finish, self.keep = problem, plan.slot, operands, finish, keep
        self.place_in_ring = ring.index(self.slot.axes)
        self.labels = problem.operands[self.slot.index].labels

    def round(
        self, streams: Sequence[Stream], r: int | Array, state: tuple[list[Array], Outs], steady: bool = False
    ) -> tuple[list[Array], Outs]:
        """Send on what is held, multiply it, receive. In a steady round (traced `r`) all streams do both."""
        held, outs = state
        received = [
            ring.shift(x, self.slot.axes, s.step) if steady or r + 1 < s.stop else x
            for s, x in zip(streams, held, strict=True)
        ]
        for pair in sorted({s.pair for s in streams}):
            parts = [
                (x, self._start(s, r), s.piece.size)
                for s, x in zip(streams, held, strict=True)
                if s.pair == pair and (steady or s.start <= r < s.stop)
            ]
            if parts:
                outs = self._multiply(outs, *zip(*parts, strict=True))
        return received, outs

    def _start(self, stream: Stream, r: int | Array) -> Array:
        shard = jnp.mod(self.place_in_ring - stream.step * r, self.slot.num_shards)
        return shard * self.slot.shard_size + stream.piece.offset

    def _multiply(
        self, outs: Outs, shards: Sequence[Array], starts: Sequence[pieces.Start], sizes: Sequence[int]
    ) -> Outs:
        """Arrivals of one round as one einsum per term (paper 5.4.2: concatenated, twice the work per wait)."""
        slot, problem = self.slot, self.problem
        dim = self.labels.index(slot.label)
        full = slot.num_shards * slot.shard_size
        shard = shards[0] if len(shards) == 1 else jnp.concatenate(shards, axis=dim)
        outs = dict(outs)
        for i, result in enumerate(problem.results):
            added = slot.label not in result.labels and i in outs  # to the sum over the shards before
            total: pieces.Sum = outs[i] if added else None
            for term in problem.terms:
                if term.out != i or slot.index not in term.operands():
                    continue
                cut = tuple(
                    shard
                    if j == slot.index
                    else pieces.take_all(self.operands[j], problem.operands[j].labels, slot.label, starts, sizes)
                    for j in term.operands()
                )
                total = [pieces.multiply_add(problem, term, cut, total)]
            if total is None:
                continue
            if slot.label in result.labels:
                shape = pieces.result_shape(problem, i, self.operands, slot.label, full)
                where = result.labels.index(slot.label)
                for part, start in zip(pieces.split(total[0], where, sizes), starts, strict=True):
                    final = self.finish(i, part, slot.label, start)
                    outs[i] = pieces.place_all(outs.get(i), final, shape, where, start)
            else:
                outs[i] = tuple(total)
        if self.keep:
            shape = (*shard.shape[:dim], full, *shard.shape[dim + 1 :])
            for part, start in zip(shards, starts, strict=True):
                outs[_KEPT] = pieces.place_all(outs.get(_KEPT), (part,), shape, dim, start)
        return outs


def all_gather_by_ring(x: Shaped[Array, "..."], labels: str, plan: Plan) -> Shaped[Array, "..."]:
    """An AllGather made of permutes, which every TPU generation runs asynchronously: for operands known early.

    Nothing depends on it until the einsum, so the compiler may start it as early as memory allows, and the einsum stays
    whole: no running sum, no slices.
    """
    slot = plan.slot
    assert slot is not None
    dim = labels.index(slot.label)
    shape = (*x.shape[:dim], x.shape[dim] * slot.num_shards, *x.shape[dim + 1 :])
    streams = gather_streams(slot.num_shards, slot.shard_size, plan.direction)
    place_in_ring = ring.index(slot.axes)
    buffer = None
    for stream in streams:
        held = pieces.take(x, labels, slot.label, stream.piece.offset, stream.piece.size)
        for r in range(stream.stop):
            if r >= stream.start:
                shard = jnp.mod(place_in_ring - stream.step * r, slot.num_shards)
                buffer = pieces.place(buffer, held, shape, dim, shard * slot.shard_size + stream.piece.offset)
            if r + 1 < stream.stop:
                held = ring.shift(held, slot.axes, stream.step)
    assert buffer is not None
    return buffer


def scatter_ring(problem: Problem, operands: Sequence[Array], plan: Plan) -> Shaped[Array, "..."]:
    """The sum over the ring of one result's products, this device's shard (algorithm 1, Einsum-ReduceScatter).

    Accumulators travel. In each round the device computes its partial einsum for the shard that the arriving
    accumulator is meant for, taking slices of the operands that own the scattered label, and adds it. At the end the
    shard id equals the device id. Partial einsums are added in the accumulation dtype and rounded to plan.accum_dtype
    only to travel; the last addition is not rounded.
    """
    slot = plan.slot
    assert slot is not None
    chains = scatter_chains(slot.num_shards, slot.shard_size, plan.direction, plan.unroll, plan.interleave)
    run = _ScatterRing(problem, plan, operands)
    num_rounds = max(c.count for c in chains)
    accumulators: list[Array | None] = [None] * len(chains)
    last = min(c.count for c in chains) - 1
    done = 0
    if plan.loop and last > 2:
        accumulators = run.round(chains, 0, accumulators)
        accumulators = lax.fori_loop(1, last, lambda r, accs: run.round(chains, r, accs, steady=True), accumulators)
        done = last
    for r in range(done, num_rounds):
        accumulators = run.round(chains, r, accumulators)
    return run.join(chains, accumulators)


class _ScatterRing:
    """The fixed surroundings of one ring of accumulators."""

    def __init__(self, problem: Problem, plan: Plan, operands: Sequence[Array]) -> None:
        assert plan.slot is not None
        self.problem, self.slot, self.operands = problem, plan.slot, operands
        self.terms = [t for t in problem.terms if t.out == self.slot.index]
        self.dim = problem.results[self.slot.index].labels.index(self.slot.label)
        self.place_in_ring = ring.index(self.slot.axes)
        self.accum = pieces.accumulation_dtype(*operands)
        self.wire = pieces.wire_dtype(self.accum, plan.accum_dtype)

    def round(
        self, chains: Sequence[Chain], r: int | Array, accumulators: Sequence[Array | None], steady: bool = False
    ) -> list[Array | None]:
        """Send every accumulator on, compute the next partial einsums beside that, then add."""
        active = [i for i, c in enumerate(chains) if steady or r < c.count]
        new = list(accumulators)
        for i in active:
            acc = accumulators[i]
            if acc is not None:
                new[i] = ring.shift(acc, self.slot.axes, chains[i].step * chains[i].stride)
        for pair in sorted({chains[i].pair for i in active}):
            members = [i for i in active if chains[i].pair == pair]
            for i, total in zip(
                members, self._totals([chains[i] for i in members], r, [new[i] for i in members]), strict=True
            ):
                travels_on = steady or r + 1 < chains[i].count or chains[i].last > 0
                new[i] = total.astype(self.wire) if travels_on else total
        return new

    def _totals(self, chains: Sequence[Chain], r: int | Array, arrived: Sequence[Array | None]) -> list[Array]:
        """What arrived plus this device's partial einsums, in the accumulation dtype."""
        slot = self.slot
        starts = [
            jnp.mod(self.place_in_ring + c.step * c.distance(r), slot.num_shards) * slot.shard_size + c.piece.offset
            for c in chains
        ]
        sizes = [c.piece.size for c in chains]
        waiting = [acc for acc in arrived if acc is not None]
        assert len(waiting) in (0, len(chains))
        total: pieces.Sum = waiting or None
        for term in self.terms:
            cut = tuple(
                pieces.take_all(self.operands[j], self.problem.operands[j].labels, slot.label, starts, sizes)
                for j in term.operands()
            )
            total = [pieces.multiply_add(self.problem, term, cut, total, self.dim)]
        assert total is not None
        return pieces.split(total[0], self.dim, sizes)

    def join(self, chains: Sequence[Chain], accumulators: Sequence[Array | None]) -> Array:
        """The epilogue: chains that end beside the owner hop home, sums of one piece are added, pieces joined."""
        by_piece: dict[int, Array] = {}
        for chain, acc in zip(chains, accumulators, strict=True):
            assert acc is not None
            home = ring.shift(acc, self.slot.axes, chain.step * chain.last).astype(self.accum)
            known = by_piece.get(chain.piece.offset)
            by_piece[chain.piece.offset] = home if known is None else known + home
        parts = [by_piece[offset] for offset in sorted(by_piece)]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=self.dim)
