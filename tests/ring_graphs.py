"""Instruction graphs of the project's sites, built from the tables that the looped einsums are built from."""

from __future__ import annotations

from overlapfx.plan.chains import gather_streams, scatter_chains, stripe_sizes
from overlapfx.plan.schedulers.base import COMPUTE, DONE, START, Graph, Node

LEFT, RIGHT = 0, 1  # links of the ring


class Builder:
    """Appends nodes; each method returns the position of the node that holds the value."""

    def __init__(self):
        self.nodes = []

    def add(self, name, kind=COMPUTE, operands=(), **fields):
        self.nodes.append(Node(name, kind, tuple(operands), **fields))
        return len(self.nodes) - 1

    def start(self, name, source, link, seconds, size=1):
        return self.add(f"{name}-start", START, [source], loads=((link, seconds),), latency_s=1e-6, size_bytes=size)

    def done(self, start):
        name = self.nodes[start].name.removesuffix("-start")
        return self.add(f"{name}-done", DONE, [start], shares=(start,))

    def graph(self, *results):
        return Graph(tuple(self.nodes), results)


def gather_graph(num_shards, direction, product_s, transfer_s, adds, late_done=True):
    """A gather ring: every product adds to a running sum, or is placed into the result (which chains them alike).

    product_s, transfer_s: of a whole shard. late_done: written with the DONEs of a round after its products, or right
    after their STARTs, as a blocking permute is.
    """
    b = Builder()
    streams = gather_streams(num_shards, 8, direction)
    held = [b.add(f"shard.{i}") for i in range(len(streams))]
    out = None
    for r in range(max(s.stop for s in streams)):
        starts = {}
        for i, s in enumerate(streams):
            if r + 1 < s.stop:
                link = LEFT if s.step < 0 else RIGHT
                starts[i] = b.start(f"send.{r}.{i}", held[i], link, transfer_s * s.piece.size / 8, s.piece.size)
                if not late_done:
                    starts[i] = b.done(starts[i])
        for pair in sorted({s.pair for s in streams}):
            members = [i for i, s in enumerate(streams) if s.pair == pair and s.start <= r < s.stop]
            if members:
                share = sum(streams[i].piece.size for i in members) / 8
                reads = [held[i] for i in members] + ([out] if out is not None else [])
                shares = (out,) if out is not None else ()
                size = 0 if out is not None else 8 * num_shards
                seconds = product_s * share * (1.1 if adds else 1.0)
                out = b.add(f"product.{r}.{pair}", operands=reads, seconds=seconds, size_bytes=size, shares=shares)
        for i, s in starts.items():
            held[i] = b.done(s) if late_done else s
    return b.graph(out)


def scatter_graph(num_shards, direction, unroll, interleave, product_s, transfer_s, fused, late_done=True):
    """A ring of accumulators; fused: the addition is part of the product, which then waits for what has arrived."""
    b = Builder()
    chains = scatter_chains(num_shards, 8, direction, unroll, interleave)
    flying = [None] * len(chains)
    sums = [None] * len(chains)
    for r in range(max(c.count for c in chains)):
        active = [i for i, c in enumerate(chains) if r < c.count]
        for i in active:
            if sums[i] is not None:
                link, share = (LEFT if chains[i].step < 0 else RIGHT), chains[i].piece.size / 8
                hops = chains[i].stride
                flying[i] = b.start(f"send.{r}.{i}", sums[i], link, hops * transfer_s * share, chains[i].piece.size)
                if not late_done:
                    flying[i] = b.done(flying[i])
        for i in active:
            seconds, size = product_s * chains[i].piece.size / 8, chains[i].piece.size
            if fused:
                arrived = [] if flying[i] is None else [b.done(flying[i]) if late_done else flying[i]]
                sums[i] = b.add(f"product.{r}.{i}", operands=arrived, seconds=seconds * 1.05, size_bytes=size)
                continue
            part = b.add(f"product.{r}.{i}", seconds=seconds, size_bytes=size)
            if flying[i] is None:
                sums[i] = part
            else:
                done = b.done(flying[i]) if late_done else flying[i]
                sums[i] = b.add(f"sum.{r}.{i}", operands=[part, done], seconds=0.1 * seconds, size_bytes=size)
    ends = []
    for i, chain in enumerate(chains):
        if chain.last:
            link = LEFT if chain.step < 0 else RIGHT
            sums[i] = b.done(b.start(f"home.{i}", sums[i], link, chain.last * transfer_s, chain.piece.size))
        ends.append(sums[i])
    return b.graph(b.add("join", operands=ends, seconds=0.05 * product_s, size_bytes=8))


def stripe_graph(num_stripes, product_s, transfer_s, blocking=False):
    """Stripes, each gathered over both links while the one before it is multiplied."""
    b = Builder()
    out = None
    for k, size in enumerate(stripe_sizes(64, num_stripes, grow=True)):
        wire = ((LEFT, transfer_s * size / 64), (RIGHT, transfer_s * size / 64))
        stripe = b.add(f"stripe.{k}", seconds=0.01 * product_s, size_bytes=size)
        if blocking:
            whole = b.add(f"gather.{k}", operands=[stripe], loads=wire, latency_s=3e-6, size_bytes=4 * size)
        else:
            start = b.add(f"gather.{k}-start", START, [stripe], loads=wire, latency_s=3e-6, size_bytes=4 * size)
            whole = b.done(start)
        reads, shares = ([whole], ()) if out is None else ([whole, out], (out,))
        out = b.add(
            f"product.{k}",
            operands=reads,
            seconds=product_s * size / 64,
            size_bytes=0 if shares else 64,
            shares=shares,
        )
    return b.graph(out)


def site_graphs():
    """(name, graph) of every ring and stripe that a plan may choose, for rings where either side dominates."""
    for transfer_s in (0.3e-3, 0.95e-3, 2e-3):
        at = f"transfer {transfer_s * 1e3:g} ms"
        for n in (2, 3, 4, 8, 16):
            for late in (True, False):
                how = f"{at}, {n} shards, {'late' if late else 'early'} dones"
                for direction in ("one", "two", "two_whole"):
                    for adds in (True, False):
                        yield (
                            f"gather {direction} adds={adds}, {how}",
                            gather_graph(n, direction, 1e-3, transfer_s, adds, late),
                        )
                    for unroll in (1, 2):
                        for interleave in ("halves", "parity"):
                            for fused in (True, False):
                                yield (
                                    f"scatter {direction} {unroll} {interleave} fused={fused}, {how}",
                                    scatter_graph(n, direction, unroll, interleave, 1e-3, transfer_s, fused, late),
                                )
        for stripes in (2, 4, 8):
            yield f"stripes {stripes}, {at}", stripe_graph(stripes, 1e-3, transfer_s)
            yield f"blocking stripes {stripes}, {at}", stripe_graph(stripes, 1e-3, transfer_s, blocking=True)
