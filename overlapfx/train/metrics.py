"""What is measured at every step: its time, its rates against the chip's peak, its record on disk."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TextIO

from overlapfx.chips import Chip
from overlapfx.train.events import EventFile
from overlapfx.train.stops import StorageError

Value = str | int | float | bool | None


@dataclasses.dataclass
class Span:
    """A piece of time that does not count as part of a step; `seconds` is set when it ends."""

    seconds: float = 0.0


class StepTimer:
    """Times step k from the end of step k-1 to its own end, whatever was timed apart in between taken out.

    Reading data, logging or anything else that the loop does between two steps is part of the later one. The caller has
    to wait for the step's results before it calls `lap`: a dispatch is not a step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._begun: float | None = None  # end of the last step, moved on by what was timed apart
        self.apart_s: dict[str, float] = {}  # totals by name

    def start(self) -> None:
        """Marks the moment from which the first step is timed."""
        self._begun = self._clock()

    def lap(self) -> float:
        """Marks the end of a step; returns its time in seconds."""
        assert self._begun is not None, "StepTimer.lap() before start()"
        end = self._clock()
        step_s, self._begun = end - self._begun, end
        return step_s

    @contextlib.contextmanager
    def apart(self, name: str) -> Iterator[Span]:
        """Times a block that belongs to no step, such as an evaluation; its seconds are added up in `apart_s[name]`."""
        span, begun = Span(), self._clock()
        try:
            yield span
        finally:
            span.seconds = self._clock() - begun
            self.apart_s[name] = self.apart_s.get(name, 0.0) + span.seconds
            if self._begun is not None:
                self._begun += span.seconds


@dataclasses.dataclass(frozen=True)
class Rates:
    """Arithmetic rates of one step; the percentages are None where the chip is unknown."""

    model_tflops_per_device: float
    mfu_percent: float | None
    hfu_percent: float | None


@dataclasses.dataclass(frozen=True)
class Utilization:
    """Turns a step time into FLOP rates and, where the chip is known, into percent of its peak.

    MFU (model FLOPs utilization) counts model FLOPs only, HFU (hardware) adds those of recomputation.

    model_flops_per_step, hardware_flops_per_step: summed over all devices; the second is never the smaller one.
    num_devices: devices that share the step.
    chip: what one device can do, None if unknown.
    """

    model_flops_per_step: float
    hardware_flops_per_step: float
    num_devices: int
    chip: Chip | None

    def __post_init__(self) -> None:
        if self.num_devices < 1:
            raise ValueError(f"num_devices is {self.num_devices}; a step runs on at least 1 device.")
        if not 0 < self.model_flops_per_step <= self.hardware_flops_per_step:
            raise ValueError(
                f"model_flops_per_step is {self.model_flops_per_step:g}, hardware_flops_per_step "
                f"{self.hardware_flops_per_step:g}; the first must be positive, the second at least as large."
            )

    def rates(self, step: int, step_s: float) -> Rates:
        """Rates of a step that took `step_s` seconds.

        Raises:
          ValueError: more than 100 % of the peak: the time, the FLOPs or the peak is wrong, and so would be the report.
        """
        model = self.model_flops_per_step / step_s / self.num_devices
        hardware = self.hardware_flops_per_step / step_s / self.num_devices
        if self.chip is None:
            return Rates(model / 1e12, None, None)
        peak = self.chip.peak_bf16_flops
        for name, flops in (("MFU", model), ("HFU", hardware)):
            if flops > peak:
                raise ValueError(
                    f"Step {step} took {step_s:.6g} s, which is {flops / 1e12:.4g} TFLOP/s per device or {name} "
                    f"{100 * flops / peak:.1f} % of the {peak / 1e12:.4g} TFLOP/s of {self.chip.name} "
                    f"({self.chip.source}); wait for the step's results before its time is taken, or correct the FLOPs "
                    f"per step or the peak."
                )
        return Rates(model / 1e12, 100 * model / peak, 100 * hardware / peak)

    def convention(self) -> str:
        """The line that says what the logged figures mean."""
        if self.chip is None:
            peak = "The chip is unknown, so MFU and HFU are n/a."
        else:
            flops, name, source = self.chip.peak_bf16_flops / 1e12, self.chip.name, self.chip.source
            peak = f"100 % is {flops:.4g} TFLOP/s per device: {name} ({source})."
        return (
            "MFU counts model FLOPs (2 per multiply-add, causal attention halved, embedding look-ups not counted); HFU "
            f"adds recomputation. {peak} A step is timed from the end of the one before to its own end; compilation, "
            "evaluation and saving are shown apart. Tokens are the targets that count in the loss."
        )


class MetricsWriter:
    """Appends records to a JSON lines file and their numbers to TensorBoard events.

    A record has `kind` ("start", "data", "compile", "train", "eval", "checkpoint", "hung", "end"), `attempt` (1, 2,
    ...: which run of this directory wrote it), `step` (number of steps finished), `unix_s` (time of day) and its own
    values; every line is flushed. A start line at step s says that a new attempt was restored at s: the lines of
    earlier attempts beyond s belong to work that was lost, and `read_metrics` drops them.

    Args:
      jsonl: the file, made if missing; an earlier attempt's lines stay.
      tensorboard: directory of the event files, None for none.
      from_step: the step that this attempt starts after (0, or the step that was restored).
      about: what the start line says about this attempt (mesh, chip, convention, ...).
      primary: False on all processes of a job but one: nothing is written.
    """

    def __init__(
        self,
        jsonl: str | pathlib.Path,
        tensorboard: str | pathlib.Path | None = None,
        *,
        from_step: int = 0,
        about: Mapping[str, Value] = MappingProxyType({}),
        primary: bool = True,
    ):
        self._file: TextIO | None = None
        self._events: EventFile | None = None
        self.attempt, self.last_step = 1, from_step
        self._path, self._failed = pathlib.Path(jsonl), False
        if not primary:
            return
        torn = False
        if self._path.exists():
            lines = self._path.read_text(encoding="utf-8").split("\n")
            self.attempt = 1 + max((record["attempt"] for record in _parse(lines, self._path)), default=0)
            torn = lines[-1] != ""  # the last writer was killed inside a line
        with self._failing("of the start"):
            self._file = self._path.open("a", encoding="utf-8")
            if torn:
                self._file.write("\n")
        self.write("start", from_step, **about)  # before there are events: it holds for this file only
        if tensorboard is not None:
            # TensorBoard, too, is told to forget what earlier attempts did beyond the restored step.
            purge = from_step + 1 if self.attempt > 1 else None
            with self._failing("of the start"):
                self._events = EventFile(pathlib.Path(tensorboard), str(self.attempt), purge)

    def write(self, kind: str, step: int, **values: Value) -> None:
        """Writes one record; a number that is not finite is written as "NaN", "Infinity" or "-Infinity".

        Raises:
          StorageError: the file cannot be written.
        """
        self.last_step = step
        if self._file is None:
            return
        record = {"kind": kind, "attempt": self.attempt, "step": step, "unix_s": round(time.time(), 3), **values}
        with self._failing(f"of step {step}"):
            self._file.write(json.dumps({k: _to_json(v) for k, v in record.items()}, allow_nan=False) + "\n")
            self._file.flush()
            for name, value in values.items():
                if self._events is not None and isinstance(value, int | float) and not isinstance(value, bool):
                    self._events.add(f"{kind}/{name}", value, step)

    @contextlib.contextmanager
    def _failing(self, which: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failed = True
            raise StorageError(
                f"The metrics {which} cannot be written to {self._path} or beside it ({error.strerror}); make room or "
                "mend the disk, then run the same command again."
            ) from error

    def close(self) -> None:
        """Closes both files; writing afterwards is an error."""
        # What could not be written before cannot be written now, and has been said.
        with contextlib.suppress(OSError) if self._failed else self._failing("of the last steps"):
            if self._file is not None:
                self._file.close()
            if self._events is not None:
                self._events.close()


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The records of a metrics file in order, each (kind, step) once.

    Work that was lost, because a later attempt was restored at an earlier step, is left out; so is the line in which a
    killed writer stopped.

    Raises:
      ValueError: a line is damaged in any other way.
    """
    path = pathlib.Path(path)
    kept: dict[tuple[str, int], dict[str, Any]] = {}
    for record in _parse(path.read_text(encoding="utf-8").split("\n"), path):
        if record["kind"] == "start":
            kept = {key: value for key, value in kept.items() if key[1] <= record["step"]}
        key = (record["kind"], record["step"])
        kept.pop(key, None)  # so that the order is that of the lines that are kept
        kept[key] = record
    return list(kept.values())


def _parse(lines: list[str], path: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the records; a torn line may only be the last one of an attempt, so a start line has to follow."""
    torn: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        is_record = isinstance(record, dict) and {"kind", "attempt", "step"} <= record.keys()
        if torn is not None and not (is_record and record["kind"] == "start"):
            raise ValueError(f"{path} line {torn} is not a metrics record; remove or repair that line.")
        torn = None if is_record else number
        if is_record:
            yield {key: _from_json(value) for key, value in record.items()}


def _to_json(value: Value) -> Value:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _from_json(value: Value) -> Value:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
