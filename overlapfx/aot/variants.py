"""The programs that a plan compares: the config's own, the blocking one, the best that XLA does by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from overlapfx.config import Overlap
from overlapfx.plan.schedulers import SCHEDULERS

Options = Mapping[str, str]

# The TPU compiler options that make communication asynchronous; see LOG.md for what each brings.
_ASYNC: Options = MappingProxyType(
    {
        "xla_enable_async_all_gather": "true",
        "xla_tpu_enable_latency_hiding_scheduler": "true",
        # Without these the scheduler keeps one gather and a handful of permutes in flight, and puts ends of transfers
        # right behind their starts as soon as it fears for memory, long before it runs out.
        "xla_max_concurrent_async_all_gathers": "4",
        "xla_max_concurrent_async_collective_permutes": "32",
        "xla_tpu_enable_scheduler_memory_pressure_tracking": "false",
    }
)
# XLA decomposes an einsum with its collective from this size of the operand on, in MiB.
_WINDOWED: Options = MappingProxyType({"xla_jf_spmd_threshold_for_windowed_einsum_mib": "0"})


@dataclasses.dataclass(frozen=True, eq=False)  # compared by identity, so that it can be a key
class Variant:
    """One way to compile the step: `group` is the name on the command line, `name` tells members of a group apart.

    partitioning: as for `train.step.make_train_step`. blocking: switch the overlap of the config off. Partial sums that
    cross the network have the dtype of the config in every variant.
    """

    group: str
    name: str
    what: str
    partitioning: str = "shard_map"
    blocking: bool = False
    options: Options = dataclasses.field(default_factory=dict)

    def overlap(self, configured: Overlap) -> Overlap:
        """The overlap to compile with, given that of the config."""
        return Overlap(mode="off", accum_dtype=configured.accum_dtype) if self.blocking else configured


OURS = Variant("ours", "ours", "the config as it is, in shard_map", options=_ASYNC)
VARIANTS = (
    Variant("blocking", "blocking", "blocking collectives in shard_map, default options", blocking=True),
    Variant("xla", "xla-auto", "automatic partitioning, windowed einsum where XLA likes it", "xla"),
    Variant(
        "xla",
        "xla-windowed",
        "automatic partitioning, windowed einsum everywhere",
        "xla",
        options={**_WINDOWED, **_ASYNC},
    ),
    Variant("xla", "xla-async", "blocking collectives in shard_map, made asynchronous", blocking=True, options=_ASYNC),
    OURS,
)
NAMES = tuple(dict.fromkeys(name for variant in VARIANTS for name in (variant.group, variant.name)))


def choose(compare: str) -> tuple[Variant, ...]:
    """The variants of a comma-separated list of groups or single variants, in its order; "" is ours alone.

    Raises ValueError for any other name.
    """
    names = [name.strip() for name in compare.split(",")] if compare else [OURS.name]
    for name in names:
        if name not in NAMES:
            raise ValueError(f"--compare has {name!r}; choose from {', '.join(NAMES)}, separated by commas.")
    found = (variant for name in names for variant in VARIANTS if name in (variant.group, variant.name))
    return tuple(dict.fromkeys(found))


def choose_schedulers(text: str) -> tuple[str, ...]:
    """Names in plan.schedulers, the order as compiled first, for a comma-separated list; empty for "".

    "compiler" is the order as compiled, which text calls as_written. Raises ValueError for any other name.
    """
    names = [name.strip() for name in text.split(",")] if text else []
    known = ("compiler", *SCHEDULERS)
    for name in names:
        if name not in known:
            raise ValueError(f"--scheduler has {name!r}; choose from {', '.join(known)}, separated by commas.")
    return tuple(dict.fromkeys(("as_written", *names))) if names and set(names) - {"compiler"} else ()


def options_of(variant: Variant, given: Options) -> dict[str, str]:
    """Compiler options of a variant; what the user gave goes before and holds for every variant alike."""
    return {**variant.options, **given}


def parse_settings(what: str, texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping. Raises ValueError naming `what` for anything else, or a name given twice."""
    settings: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ValueError(f"{what} {text!r} is not of the form NAME=VALUE; for example {what} {_EXAMPLE[what]}.")
        if name in settings and settings[name] != value:
            raise ValueError(f"{what} sets {name} to {settings[name]} and to {value}; leave one of them out.")
        settings[name] = value
    return settings


def parse_figures(what: str, texts: Sequence[str]) -> dict[str, float]:
    """As `parse_settings`, for numbers."""
    figures = {}
    for name, value in parse_settings(what, texts).items():
        try:
            figures[name] = float(value)
        except ValueError as error:
            raise ValueError(f"{what} {name}={value} is not a number; for example {what} {_EXAMPLE[what]}.") from error
    return figures


_EXAMPLE = {"--flag": "xla_enable_async_all_gather=false", "--assume": "link_bytes_per_s=50e9"}
