"""The applications of the paper: their configs, their slices, where their sizes come from."""

from __future__ import annotations

import dataclasses
import functools

from launch.config_file import load_config
from overlapfx.config import Config, from_config_dict

PUBLIC, OURS = "public configuration", "ours"


@dataclasses.dataclass(frozen=True)
class Application:
    """A config on a slice: `changes` are fields set as on the command line, `source` says whose sizes they are.

    tiny: the config of the same family that trains on simulated devices.
    """

    name: str
    config_name: str
    topology: str
    source: str = PUBLIC
    changes: tuple[str, ...] = ()
    tiny: str = ""

    def config(self, *changes: str) -> Config:
        """The checked config with more `changes`. Raises ValueError where they are illegal."""
        return _load(self.config_name, (*self.changes, *changes))


@functools.cache
def _load(name: str, changes: tuple[str, ...]) -> Config:
    return from_config_dict(load_config(name, changes))


# To add one: a row here; `tiny` is enough for the quick variant and the training curves.
_APPLICATIONS = (
    Application("GPT_1T", "configs/gpt.py:1024B", "v4:8x16x16", tiny="configs/gpt.py:tiny"),
    Application("Meena_500B", "configs/gpt.py:meena_500B", "v4:8x8x16", OURS, tiny="configs/gpt.py:tiny"),
    Application("MLPerf_200B", "configs/bert.py:200B", "v4:8x8x16", tiny="configs/bert.py:tiny"),
    Application("T5_300B", "configs/t5.py:300B", "v4:8x8x8", OURS, tiny="configs/t5.py:tiny"),
    Application(
        "GLaM_1T", "configs/moe.py:1T", "v4:8x8x16", "published sizes, the rest ours", tiny="configs/moe.py:tiny"
    ),
    Application("BigSSL_10B", "configs/conformer.py:10B", "v4:4x4x8", OURS, tiny="configs/conformer.py:tiny"),
)
# Of the GPT series, with slices of as many chips as their mesh has.
_GPT_SLICES = {
    "32B": "v4:4x4x4",
    "64B": "v4:4x4x8",
    "128B": "v4:4x8x8",
    "256B": "v4:8x8x8",
    "512B": "v4:8x8x16",
    "1024B": "v4:8x16x16",
}
# The quick variant: the tiny config of the same family in bfloat16, on the smallest slice with two axes.
_QUICK_SLICE = "v4:2x2x1"
_QUICK = ("mesh.y=2", "mesh.x=2", "model.num_layers=2", "model.compute_dtype=bfloat16", "overlap.mode=auto")


def applications(quick: bool) -> tuple[Application, ...]:
    """The paper's six; quick: a tiny one of every family."""
    if not quick:
        return _APPLICATIONS
    return tuple(_stand_in(one) for one in {one.tiny: one for one in reversed(_APPLICATIONS)}.values())[::-1]


def gpt_sizes(quick: bool) -> tuple[Application, ...]:
    """The GPT scaling series; quick: two tiny ones."""
    if quick:
        first = _stand_in(_APPLICATIONS[0])
        return dataclasses.replace(first, name="32B"), _wider(first, "1024B")
    return tuple(Application(name, f"configs/gpt.py:{name}", topology) for name, topology in _GPT_SLICES.items())


def smallest_gpt(quick: bool) -> Application:
    """What experiments with many programs are made with."""
    return gpt_sizes(quick)[0]


def _stand_in(one: Application) -> Application:
    return dataclasses.replace(
        one, config_name=one.tiny, topology=_QUICK_SLICE, source="tiny, ours", changes=(f"name={one.name}", *_QUICK)
    )


def _wider(one: Application, name: str) -> Application:
    changes = (*one.changes, "model.d_model=256", "model.d_ff=1024")
    return dataclasses.replace(one, name=name, changes=changes)
