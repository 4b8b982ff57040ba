"""What Google Cloud calls a TPU slice, with the hosts that it consists of."""

from __future__ import annotations

import dataclasses
import math

from overlapfx.aot.slices import FAMILIES, Slice


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of one family: the label of GKE nodes, prefix and unit of the Cloud TPU API's accelerator types, the
    software of its VMs.
    """

    gke: str
    prefix: str = ""
    per_chip: int = 1
    runtime: str = ""


# Sources, read in November 2026: cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus (labels, topologies, nodes
# of machine types *-4t), cloud.google.com/tpu/docs/supported-tpu-configurations (accelerator types: v4 and v5p count
# TensorCores, two to a chip, v5e and v6e count chips), cloud.google.com/tpu/docs/runtimes (software versions). TPU7x is
# not in the Cloud TPU API: docs.cloud.google.com/tpu/docs/queued-resources.
_NAMES = {
    "v4": _Names("tpu-v4-podslice", "v4", 2, "tpu-ubuntu2204-base"),
    "v5e": _Names("tpu-v5-lite-podslice", "v5litepod", 1, "v2-alpha-tpuv5-lite"),
    "v5p": _Names("tpu-v5p-slice", "v5p", 2, "v2-alpha-tpuv5"),
    "v6e": _Names("tpu-v6e-slice", "v6e", 1, "v2-alpha-tpuv6e"),
    "tpu7x": _Names("tpu7x"),
}
_CHIPS_PER_HOST = 4
# v5e and v6e have VMs of eight chips, a whole 2x4 slice, too: machine types ct5lp-hightpu-8t, ct6e-standard-8t.
_ONE_HOST_2D = 8


@dataclasses.dataclass(frozen=True)
class CloudSlice:
    """A slice with the numbers and names that manifests and commands need; hosts are those of one slice."""

    topology: Slice

    @property
    def _names(self) -> _Names:
        return _NAMES[self.topology.family.name]

    @property
    def chips(self) -> int:
        """Chips of one slice."""
        return math.prod(self.topology.shape)

    @property
    def chips_per_host(self) -> int:
        """Chips of one host, what a GKE pod asks for as google.com/tpu."""
        one_host = _ONE_HOST_2D if len(self.topology.shape) == 2 else _CHIPS_PER_HOST
        return self.chips if self.chips <= one_host else _CHIPS_PER_HOST

    @property
    def hosts(self) -> int:
        """Hosts of one slice, each with one process."""
        return self.chips // self.chips_per_host

    @property
    def shape(self) -> str:
        """The shape as 4x4x4."""
        return "x".join(map(str, self.topology.shape))

    @property
    def gke_accelerator(self) -> str:
        """The value of the node label cloud.google.com/gke-tpu-accelerator."""
        return self._names.gke

    @property
    def runtime_version(self) -> str:
        """The software of a TPU VM; raises ValueError where there are none."""
        self._require_api()
        return self._names.runtime

    def accelerator_arguments(self) -> tuple[str, ...]:
        """What tells gcloud the slice: an accelerator type for the usual shape of its size, else type and topology.

        Raises ValueError for a family that the Cloud TPU API does not offer.
        """
        self._require_api()
        usual = next((name for name in self.topology.family.named if _size(name) == self.chips), None)
        if self.shape == usual:
            return (f"--accelerator-type={self._names.prefix}-{self.chips * self._names.per_chip}",)
        return (f"--type={self._names.prefix}", f"--topology={self.shape}")

    def _require_api(self) -> None:
        if not self._names.prefix:
            offered = ", ".join(name for name in FAMILIES if _NAMES[name].prefix)
            raise ValueError(
                f"the Cloud TPU API has no slice {self.topology}; launch it with --gke, or choose one of {offered}."
            )


def _size(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))
