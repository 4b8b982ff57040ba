"""Frozen configuration dataclasses, made once at the edge from an ml_collections ConfigDict."""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar

from overlapfx.families import ConformerConfig, ModelConfig, MoEConfig, config_class
from overlapfx.fields import Fraction, Natural, NonNegativeFloat, Positive, PositiveFloat, Range, Section, Seed

MODES = ("auto", "on", "off")
METHODS = ("auto", "ring", "stripe", "prefetch", "exchange", "blocking")
DIRECTIONS = ("auto", "one", "two", "two_whole")
INTERLEAVES = ("auto", "parity", "halves")
SCHEDULERS = ("compiler", "bottom_up", "top_down")
ACCUM_DTYPES = ("float32", "bfloat16", "float16")
ROW_STRIPES = (1, 2, 4, 8)
NUM_BYTES = 256  # text is read as bytes, so a vocabulary has at least these


def _check_choice(where: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{where} is {value!r}; choose one of {', '.join(map(str, choices))}.")


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How the collectives of a collective einsum run beside its arithmetic.

    mode: "off" keeps every collective blocking, "on" decomposes wherever a decomposition is legal, "auto" lets the gate
        choose.
    method: the decomposition; "exchange" applies to ReduceScatter only, "prefetch" to AllGather only.
    direction: "one" ring direction, "two" (half shards travel each way), "two_whole" (whole shards travel each way and
        two arrivals share one einsum).
    unroll: 1, or 2 for the paper's double buffering (two interleaved accumulator chains for ReduceScatter).
    interleave: how unroll 2 splits a ReduceScatter, "parity" (the paper's) or "halves"; see plan/chains.py.
    accum_dtype: dtype of a travelling ReduceScatter accumulator, which is also its dtype on the wire.
    save_gathered: keep gathered operands for the backward pass instead of streaming them again.
    row_stripes: how many row stripes of a device's batch go through the layers side by side, one computing while
        another communicates.
    sites: per-site overrides, site name -> {field: value}.
    """

    mode: str = "auto"
    method: str = "auto"
    direction: str = "auto"
    unroll: int = 2
    interleave: str = "auto"
    scheduler: str = "compiler"
    accum_dtype: str = "float32"
    save_gathered: bool = False
    row_stripes: int = 1
    sites: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        _check_choice("overlap.mode", self.mode, MODES)
        _check_choice("overlap.method", self.method, METHODS)
        _check_choice("overlap.direction", self.direction, DIRECTIONS)
        _check_choice("overlap.unroll", self.unroll, (1, 2))
        _check_choice("overlap.interleave", self.interleave, INTERLEAVES)
        _check_choice("overlap.scheduler", self.scheduler, SCHEDULERS)
        _check_choice("overlap.accum_dtype", self.accum_dtype, ACCUM_DTYPES)
        _check_choice("overlap.row_stripes", self.row_stripes, ROW_STRIPES)
        known = {f.name for f in dataclasses.fields(self)} - {"sites"}
        for site, override in self.sites.items():
            unknown = sorted(set(override) - known)
            if unknown:
                raise ValueError(
                    f"overlap.sites[{site!r}] sets {', '.join(unknown)}; "
                    f"the fields of a site are {', '.join(sorted(known))}."
                )
        # Frozen all the way down, so that a configuration can be a static (hashable) argument of jit.
        frozen = {site: MappingProxyType(dict(override)) for site, override in self.sites.items()}
        object.__setattr__(self, "sites", MappingProxyType(frozen))
        for site in frozen:
            self.at(site)  # an illegal override is refused here, not in the middle of a trace

    def at(self, site: str) -> Overlap:
        """The settings in force at one site: this object with that site's override applied."""
        override = self.sites.get(site)
        base = dataclasses.replace(self, sites={})
        return dataclasses.replace(base, **override) if override else base

    def __hash__(self) -> int:
        plain = tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "sites")
        return hash((plain, tuple(sorted((k, tuple(sorted(v.items()))) for k, v in self.sites.items()))))


T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class MeshConfig(Section):
    """Devices along the data axis y, the model axis x, the optional outer axis of replicas of the whole model."""

    _where: ClassVar[str] = "mesh."
    y: Positive
    x: Positive
    replica: Positive = 1

    @property
    def num_devices(self) -> int:
        """Devices that a mesh of these sizes needs."""
        return self.replica * self.y * self.x


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """What is read: a data set by name, `global_batch` sequences per step over all devices.

    data_dir: "" means the default cache. num_workers: reader processes, 0 reads in this process. max_skipped_records:
        how many records of a split may be unreadable; they count as empty documents.
    """

    _where: ClassVar[str] = "data."
    name: str
    data_dir: str
    global_batch: Positive
    num_workers: Natural
    seed: Seed
    max_skipped_records: Natural = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        part = r"[A-Za-z0-9_][A-Za-z0-9_.+-]*"
        if not re.fullmatch(f"{part}(/{part})?(:{part})?", self.name):
            raise ValueError(
                f"data.name is {self.name!r}; write NAME, NAME/CONFIG or NAME/CONFIG:VERSION of letters, digits, '.', "
                "'_', '+' or '-': it names a place below data.data_dir."
            )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Section):
    """Adam with warm-up, cosine decay to `final_lr_ratio * learning_rate`, clipping by the global gradient norm.

    grad_accum: number of micro-batches that one step of `global_batch` sequences is cut into.
    """

    _where: ClassVar[str] = "optimizer."
    learning_rate: PositiveFloat
    warmup_steps: Natural
    final_lr_ratio: Annotated[float, Range(0, 1)]
    b1: Fraction
    b2: Fraction
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    clip_norm: PositiveFloat
    grad_accum: Positive


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """Length of the run; every `_every` counts steps.

    step_timeout_s: seconds after which the watchdog ends a step or an evaluation batch that does not finish, 0 for
        none. max_skipped_steps: how many updates in a row may be skipped because their numbers are not finite.
    """

    _where: ClassVar[str] = "train."
    num_steps: Positive
    log_every: Positive
    eval_every: Positive
    eval_batches: Positive
    checkpoint_every: Positive
    checkpoint_keep: Positive
    step_timeout_s: NonNegativeFloat = 1800.0
    max_skipped_steps: Natural = 3


@dataclasses.dataclass(frozen=True)
class SampleConfig(Section):
    """Text generated at the end of a run: `num_tokens` after `prompt`; temperature 0 takes the likeliest token."""

    _where: ClassVar[str] = "sample."
    prompt: str
    num_tokens: Natural
    temperature: NonNegativeFloat


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """A whole run. `name` also names its directory; `seed` decides initial values and dropout."""

    name: str
    seed: Seed
    model: ModelConfig
    mesh: MeshConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    overlap: Overlap
    sample: SampleConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ValueError(f"name is {self.name!r}; use letters, digits, '.', '_' or '-' only: it names a directory.")


def from_config_dict(values: Any) -> Config:
    """The checked `Config` of an ml_collections ConfigDict, or of nested plain dicts such as `to_dict` returns.

    Raises a one-sentence ValueError that names the field for an unknown or missing field, a wrong type, an illegal
    value, or sizes that do not divide over the mesh.
    """
    # Asked by method, not by class, so that ml_collections is needed only where configs are written.
    plain = values.to_dict() if hasattr(values, "to_dict") else values
    config = _build(Config, plain, "")
    validate(config)
    return config


def _build(cls: type[T], values: Any, where: str) -> T:
    """An instance of dataclass `cls` from a mapping; `where` is the dotted prefix of its fields in messages."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where.rstrip('.') or 'The config'} is {values!r}; it must be a group of fields.")
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"{where}{unknown[0]} is not a field; the fields there are {', '.join(fields)}.")
    hints = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, field in fields.items():
        if name in values:
            made[name] = values[name]
            if dataclasses.is_dataclass(hints[name]):
                by_family = hints[name] is ModelConfig and isinstance(values[name], Mapping)
                section = config_class(values[name]) if by_family else hints[name]
                made[name] = _build(section, values[name], f"{where}{name}.")
            elif typing.get_origin(hints[name]) is Mapping:
                _check_groups(values[name], f"{where}{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}{name} is missing; every field of the config must be given.")
    return cls(**made)


def _check_groups(values: Any, where: str) -> None:
    """A mapping with keys of the user's choice must hold groups of fields."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} is {values!r}; it must be a group of groups of fields.")
    for key, group in values.items():
        if not isinstance(group, Mapping):
            raise ValueError(f"{where}[{key!r}] is {group!r}; it must be a group of fields.")


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dicts, lists, scalars, ready for JSON; `from_config_dict` turns them back into an equal config."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value

    return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}


def validate(config: Config) -> None:
    """Refuses sizes that do not divide over the mesh or do not fit each other, before any device is touched.

    Every parameter and activation is cut evenly: a_BTD [y,-,x], w_DF [y,x], w_FD [x,y], w_DNH [y,x,-], w_NHD [x,-,y],
    w_VD [x,y]. Raises a one-sentence ValueError with the field, its value, the axis, its size and the nearest legal
    values.
    """
    model, mesh, optimizer = config.model, config.mesh, config.optimizer
    axis_x = ("mesh axis x", mesh.x)
    _check_divides("model.d_model", model.d_model, axis_x, step=math.lcm(mesh.x, mesh.y))
    _check_divides("model.d_model", model.d_model, ("mesh axis y", mesh.y), step=math.lcm(mesh.x, mesh.y))
    _check_divides("model.d_ff", model.d_ff, axis_x)
    least_vocab = NUM_BYTES if model.reads_text else 1
    _check_divides("model.vocab_size", model.vocab_size, axis_x, least=least_vocab)
    _check_divides("model.num_heads", model.num_heads, axis_x)
    _check_kv_heads(model, mesh)
    if isinstance(model, MoEConfig):
        _check_divides("model.num_experts", model.num_experts, ("mesh axis y", mesh.y))
    if isinstance(model, ConformerConfig):
        for axis in (axis_x, ("mesh axis y", mesh.y)):
            _check_divides("model.conv_channels", model.conv_channels, axis, step=math.lcm(mesh.x, mesh.y))
    if model.positions == "rotary":
        _check_divides(
            "model.head_dim", model.head_dim, ("the two halves that rotary positions turn into each other", 2)
        )
    batch_shards = mesh.replica * mesh.y * optimizer.grad_accum
    over = f"mesh.replica * mesh.y * optimizer.grad_accum = {mesh.replica} * {mesh.y} * {optimizer.grad_accum}"
    _check_divides("data.global_batch", config.data.global_batch, (over, batch_shards))
    if model.vocab_size < least_vocab:
        legal = math.ceil(NUM_BYTES / mesh.x) * mesh.x
        raise ValueError(f"model.vocab_size is {model.vocab_size}, less than the {NUM_BYTES} byte values; use {legal}.")
    if config.overlap.row_stripes > 1 and not model.takes_row_stripes:
        raise ValueError(
            f"overlap.row_stripes is {config.overlap.row_stripes}, but the layers of the family {model.family} take "
            "the batch as a whole; use 1."
        )
    if config.sample.num_tokens and not model.continues_text:
        raise ValueError(
            f"sample.num_tokens is {config.sample.num_tokens}, but a model of the family {model.family} does not "
            "continue text; use 0."
        )
    if optimizer.warmup_steps > config.train.num_steps:
        raise ValueError(
            f"optimizer.warmup_steps is {optimizer.warmup_steps}, "
            f"more than train.num_steps = {config.train.num_steps}; use at most {config.train.num_steps}."
        )


def _check_divides(field: str, value: int, over: tuple[str, int], step: int = 0, least: int = 1) -> None:
    """Raises unless the size of `over` divides `value`; legal values are multiples of `step`, at least `least`."""
    parts, size = over
    if value % size == 0:
        return
    step = step or size
    lowest = math.ceil(least / step) * step
    nearest = sorted({max(lowest, below) for below in (value // step * step, value // step * step + step)})
    raise ValueError(_refusal(field, value, f"{parts} of size {size}" if "axis" in parts else parts, nearest))


def _check_kv_heads(model: ModelConfig, mesh: MeshConfig) -> None:
    """Key and value heads are cut over x like query heads, and each serves the same number of query heads."""
    heads, value = model.num_heads, model.num_kv_heads
    legal = [n for n in range(mesh.x, heads + 1, mesh.x) if heads % n == 0]
    if value in legal:
        return
    nearest = [max((n for n in legal if n < value), default=None), min((n for n in legal if n > value), default=None)]
    over = f"mesh axis x of size {mesh.x}" if value % mesh.x else f"the {heads} query heads of model.num_heads evenly"
    raise ValueError(_refusal("model.num_kv_heads", value, over, [n for n in nearest if n is not None]))


def _refusal(field: str, value: int, over: str, nearest: list[int]) -> str:
    legal = f"values are {' and '.join(map(str, nearest))}" if len(nearest) > 1 else f"value is {nearest[0]}"
    return f"{field} is {value}, which does not divide over {over}; the nearest legal {legal}."
