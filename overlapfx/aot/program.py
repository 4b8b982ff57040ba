"""What one device does, step by step: the scheduled HLO reduced to computing, transferring, waiting, looping."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from overlapfx.aot.assumptions import Assumptions
from overlapfx.aot.hlo_groups import Groups, Pairs


@dataclasses.dataclass(frozen=True)
class Compute:
    """Work of the processor.

    `kind` is "einsum", "kernel" (custom kernels) or "other". `cycles` is the compiler's estimate, None where it gives
    none; `num_flops` is known for kernels only; `num_bytes` counts operands plus results in memory.
    """

    name: str
    op_name: str
    kind: str
    cycles: int | None
    num_flops: float
    num_bytes: float

    def seconds(self, figures: Assumptions) -> float:
        """By the compiler's estimate, else by arithmetic or memory traffic, whichever takes longer."""
        if self.cycles is not None:
            return self.cycles / figures.clock_hz
        flops_per_s = figures.peak_flops * figures.kernel_efficiency
        return max(self.num_flops / flops_per_s, self.num_bytes / figures.hbm_bytes_per_s)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Data on the move.

    `medium` is "ici" (links between chips), "dcn" (between slices), "memory" (copies inside a device) or "host".
    `payload_bytes` is the whole array of one device: what a permute sends, the gathered result, the unreduced operand.
    `groups` or `pairs` hold partition ids on "ici"; `num_slices` counts the slices that take part on "dcn".
    """

    name: str
    op_name: str
    kind: str
    medium: str
    payload_bytes: int
    groups: Groups | None = None
    pairs: Pairs | None = None
    num_slices: int = 1


@dataclasses.dataclass(frozen=True)
class Start:
    """An asynchronous transfer begins."""

    transfer: Transfer


@dataclasses.dataclass(frozen=True)
class Wait:
    """The program needs the result of the transfer `key`, by its name."""

    key: str
    name: str


@dataclasses.dataclass(frozen=True)
class Blocking:
    """A transfer beside which nothing else runs."""

    transfer: Transfer


@dataclasses.dataclass(frozen=True)
class Loop:
    """A body that runs `num_trips` times; None if the program text does not tell how often."""

    name: str
    op_name: str
    num_trips: int | None
    body: tuple[Step, ...]


@dataclasses.dataclass(frozen=True)
class Branch:
    """One of several alternatives runs; which one is decided on the device."""

    name: str
    alternatives: tuple[tuple[Step, ...], ...]


Step = Compute | Start | Wait | Blocking | Loop | Branch


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps of one device.

    `unknown` counts constructs that could not be understood, by description; `notes` counts constructs that were read
    with an approximation worth knowing. `num_partitions` is the number of devices that run the program in lockstep.
    """

    name: str
    steps: tuple[Step, ...]
    num_partitions: int
    unknown: dict[str, int]
    notes: dict[str, int]

    def transfers(self) -> Iterator[Transfer]:
        """Every transfer in the text, loop bodies once."""
        yield from _transfers(self.steps)


def _transfers(steps: tuple[Step, ...]) -> Iterator[Transfer]:
    for step in steps:
        if isinstance(step, Start | Blocking):
            yield step.transfer
        elif isinstance(step, Loop):
            yield from _transfers(step.body)
        elif isinstance(step, Branch):
            for alternative in step.alternatives:
                yield from _transfers(alternative)
