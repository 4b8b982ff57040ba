"""The collective einsums that figures compile one by one."""

from __future__ import annotations

from experiments.paper.measurement import Measurement, einsum

ONE_DIRECTION = ("ring one", "ring one, 2 chains")
TWO_DIRECTIONS = ("ring two", "ring two, 2 chains")
ALL = ("blocking", *ONE_DIRECTION, "ring one, parity", *TWO_DIRECTIONS, "ring two whole", "stripe", "prefetch")
# Sizes of the 32B model on 64 chips, 32 sequences of 1024 tokens per y shard.
_SIZES = {"tokens": 32768, "width": 8192, "hidden": 32768, "heads": 64, "head_dim": 128}
_TINY = {"tokens": 512, "width": 256, "hidden": 512, "heads": 4, "head_dim": 64}
_SITES = ("mlp_up", "mlp_down", "attention_out", "weight_contracting", "weight_free")


def names(quick: bool) -> tuple[str, ...]:
    """Of `experiments.bench_sites`; quick: the one with a gather and a scatter."""
    return ("mlp_down",) if quick else _SITES


def site(name: str, quick: bool) -> Measurement:
    """All decompositions of a site in both passes; the forward pass alone in the quick variant."""
    if quick:
        return einsum(name, "v4:2x2x1", (2, 2), _TINY, (*ALL, "exchange"), "forward")
    return einsum(name, "v4:4x4x4", (16, 4), _SIZES, (*ALL, "exchange"), "forward+backward")


def ring(name: str, size: int, quick: bool) -> Measurement:
    """A single ring of `size` devices; every device computes and communicates the same at every size."""
    topology, devices, sizes = ("v4:2x2x1", 4, _TINY) if quick else ("v4:4x4x4", 64, _SIZES)
    sizes = {**sizes, "hidden": size * sizes["hidden"] // 4}
    ways = ("blocking", "ring one", "ring two", "ring two whole")
    return einsum(name, topology, (devices // size, size), sizes, ways, "forward")
