"""A training job for a TPU slice, checked before anything is submitted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from launch.accelerators import CloudSlice
from overlapfx.config import Config

GRACE_S = 120  # between the request to stop and the end: enough to finish a step and save

_NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"
_PROJECT = r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]"
_ZONE = r"[a-z]+-[a-z]+[0-9]+-[a-z]"
_LOCATION = rf"{_ZONE}|[a-z]+-[a-z]+[0-9]+"
_PATH = r"(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
_IMAGE = r"[A-Za-z0-9][A-Za-z0-9._/:@-]*"


@dataclasses.dataclass(frozen=True)
class Job:
    """What runs on every host of the slices.

    train_arguments: those of `overlapfx train` but --run_dir. mount: the directory that all hosts share, at the same
    path; run_dir lies below it. variables: environment of every process, compiler flags among them; nothing secret.
    """

    name: str
    topology: CloudSlice
    image: str
    train_arguments: tuple[str, ...]
    mount: str
    run_dir: str
    variables: Mapping[str, str]
    spot: bool = False
    max_restarts: int = 10
    grace_s: int = GRACE_S
    timeout_s: float = 600.0

    @property
    def command(self) -> tuple[str, ...]:
        """The command in the image."""
        return ("overlapfx", "train", *self.train_arguments, f"--run_dir={self.run_dir}")


def require(option: str, value: str | None, what: str) -> str:
    """`value`; raises ValueError if the user has not given it."""
    if not value:
        raise ValueError(f"{option} is missing; give {what}.")
    return value


def matching(option: str, value: str, pattern: str, what: str) -> str:
    """`value`; raises ValueError unless the whole of it matches."""
    if not re.fullmatch(pattern, value):
        raise ValueError(f"{option} is {value!r}; it must be {what}.")
    return value


def job_name(option: str, value: str) -> str:
    """A name that clouds accept for a job."""
    return matching(option, value, _NAME, "lower-case letters, digits and hyphens, beginning with a letter")


def project(value: str | None) -> str:
    """The checked Google Cloud project."""
    given = require("--project", value, "the ID of your Google Cloud project")
    return matching("--project", given, _PROJECT, "the ID of a Google Cloud project, such as my-project-123")


def zone(value: str | None, *, regions: bool = False) -> str:
    """The checked zone, or, if allowed, region."""
    given = require("--zone", value, "the zone of your TPUs, such as us-central2-b")
    if regions:
        return matching("--zone", given, _LOCATION, "the zone or region of the cluster, such as us-central2-b")
    return matching("--zone", given, _ZONE, "a zone, such as us-central2-b")


def image(value: str | None) -> str:
    """The checked container image."""
    given = require("--image", value, "a container image in which the command overlapfx is installed")
    return matching("--image", given, _IMAGE, "the name of a container image")


def shared_directory(mount: str | None, run_dir: str | None, name: str) -> tuple[str, str]:
    """The checked mount point with the run directory below it."""
    what = "an absolute path of letters, digits, '.', '_' and '-'"
    mount = matching("--mount", require("--mount", mount, "the directory that all hosts share"), _PATH, what)
    found = matching("--run_dir", run_dir or f"{mount}/{name}", _PATH, what)
    if not found.startswith(f"{mount}/"):
        raise ValueError(f"--run_dir is {found}, which is not below --mount {mount}; its checkpoints would be lost.")
    return mount, found


def check_fills(config: Config, topology: CloudSlice) -> None:
    """Raises ValueError unless the mesh of the config fills the slices."""
    mesh, wanted = config.mesh, topology.topology
    if mesh.num_devices != wanted.num_devices:
        inner, rest = divmod(wanted.num_devices, mesh.replica * mesh.x)
        remedy = f"set mesh.y={inner}" if rest == 0 else "choose sizes whose product is that"
        raise ValueError(
            f"the mesh replica={mesh.replica}, y={mesh.y}, x={mesh.x} has {mesh.num_devices} devices but {wanted} has "
            f"{wanted.num_devices}; {remedy}, or choose another slice."
        )
    outer = mesh.replica if mesh.replica > 1 else mesh.y
    if outer % wanted.num_slices:
        raise ValueError(
            f"{wanted} has {wanted.num_slices} slices, over which mesh.replica={mesh.replica} cannot be divided; set "
            f"mesh.replica to a multiple of {wanted.num_slices}."
        )
