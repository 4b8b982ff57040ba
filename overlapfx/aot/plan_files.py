"""The files that a plan leaves behind; none of them replaces an older one."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from overlapfx.aot import picture, plan_json, render
from overlapfx.aot.plan_text import Outcome
from overlapfx.aot.step_plan import Planner, StepPlan
from overlapfx.aot.variants import Variant


@dataclasses.dataclass(frozen=True)
class PlanFiles:
    """Where to write; None for what nobody asked for.

    document: JSON. dump: a folder for the HLO text of every variant. png, trace: picture and Perfetto trace of the time
    line; where several `variants` are planned, each has its name before the suffix.
    """

    variants: Sequence[Variant]
    document: Path | None = None
    png: Path | None = None
    trace: Path | None = None
    dump: Path | None = None

    def check(self) -> None:
        """Raises ValueError if a file exists or cannot be made; to be called before anything is compiled."""
        paths = list(self._all())
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"{path} is asked for twice; give every file a name of its own.")
            if path.exists():
                raise ValueError(f"{path} exists and is not overwritten; give another name or remove it.")
            folder = next(parent for parent in path.resolve().parents if parent.exists())
            if not folder.is_dir():
                raise ValueError(f"{path} cannot be written since {folder} is a file; give another name.")
            try:
                with tempfile.TemporaryFile(dir=folder):
                    pass
            except OSError as error:
                why = f"{error.strerror} in {folder}"
                raise ValueError(f"{path} cannot be written ({why}); give another name.") from error

    def write_plan(self, planner: Planner, plan: StepPlan) -> None:
        """Text, picture and trace of one variant; folders are made."""
        if self.dump is not None:
            _made(_dumped(self.dump, plan.variant)).write_text(plan.compiled.text, encoding="utf-8")
        if self.trace is not None:
            render.write_trace(plan.timeline, _made(self._named(self.trace, plan.variant)))
        if self.png is not None:
            picture.draw(plan.timeline, _made(self._named(self.png, plan.variant)), _title(planner, plan))

    def write_document(self, planner: Planner, outcomes: Mapping[Variant, Outcome]) -> None:
        """The JSON document of all variants."""
        if self.document is not None:
            text = json.dumps(plan_json.document(planner, outcomes), indent=1)
            _made(self.document).write_text(text + "\n", encoding="utf-8")

    def written(self) -> list[Path]:
        """The files that exist by now."""
        return [path for path in self._all() if path.exists()]

    def _named(self, path: Path, variant: Variant) -> Path:
        return path.with_name(f"{path.stem}.{variant.name}{path.suffix}") if len(self.variants) > 1 else path

    def _all(self) -> Iterator[Path]:
        if self.document is not None:
            yield self.document
        for variant in self.variants:
            if self.dump is not None:
                yield _dumped(self.dump, variant)
            yield from (self._named(path, variant) for path in (self.png, self.trace) if path is not None)


def _dumped(folder: Path, variant: Variant) -> Path:
    return folder / f"{variant.name}.hlo.txt"


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _title(planner: Planner, plan: StepPlan) -> str:
    return (
        f"{planner.config.name} on {planner.topology}, {plan.variant.name}: {plan.variant.what}\n"
        f"estimate: {render.duration(plan.step_s)} per step, MFU {plan.mfu:.1%}, "
        f"{plan.timeline.communication_share:.1%} communication that is not hidden"
    )
