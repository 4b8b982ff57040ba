"""Which process of a job this one is, from what the launcher or the cloud tells it."""

from __future__ import annotations

import dataclasses
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

PREFIX = "OVERLAPFX_"
PORT = 8475  # where process 0 is met; JAX's own coordinator listens on another port, which process 0 announces
STARTUP_TIMEOUT_S = 600.0
CLOUD_TPU = "cloud-tpu"

_METADATA = "http://{host}/computeMetadata/v1/instance/attributes/{key}"
_METADATA_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """Process `index` of `count`, which all meet at `host`:`port` within `timeout_s` seconds.

    workers_per_slice: processes of one slice; they are numbered slice by slice.
    """

    index: int
    count: int
    host: str
    port: int
    workers_per_slice: int
    timeout_s: float = STARTUP_TIMEOUT_S

    def name(self, index: int) -> str:
        """What messages call a process, for example "process 5" or "process 5 (slice 1, worker 1)"."""
        if self.count == self.workers_per_slice:
            return f"process {index}"
        return f"process {index} (slice {index // self.workers_per_slice}, worker {index % self.workers_per_slice})"


ALONE = Identity(0, 1, "", 0, 1)


def variables(*, slices: int, timeout_s: float, host: str, workers: int, port: int = PORT) -> dict[str, str]:
    """The variables that are the same for all processes of a job whose process 0 is at a known place."""
    return {
        f"{PREFIX}COORDINATOR": f"{host}:{port}",
        f"{PREFIX}NUM_SLICES": str(slices),
        f"{PREFIX}NUM_WORKERS": str(workers),
        f"{PREFIX}STARTUP_TIMEOUT_S": f"{timeout_s:g}",
    }


def cloud_tpu_variables(*, slices: int, timeout_s: float) -> dict[str, str]:
    """The variables of a process on a TPU VM, which asks its VM for the rest."""
    return {
        f"{PREFIX}CLUSTER": CLOUD_TPU,
        f"{PREFIX}NUM_SLICES": str(slices),
        f"{PREFIX}STARTUP_TIMEOUT_S": f"{timeout_s:g}",
    }


def identify(environ: Mapping[str, str], metadata: Callable[[str], str] | None = None) -> Identity:
    """The place of this process in its job: ALONE unless the launcher's variables are set.

    metadata: reads an attribute of a TPU VM, by default from the cloud's metadata server; used only where the launcher
        asked for it. Raises ValueError with one sentence for variables that contradict each other.
    """
    timeout_s = _number(environ, "STARTUP_TIMEOUT_S", STARTUP_TIMEOUT_S)
    if environ.get(PREFIX + "CLUSTER") == CLOUD_TPU:
        return _from_metadata(metadata or _read_metadata, timeout_s, environ)
    if PREFIX + "COORDINATOR" not in environ:
        return ALONE
    host, _, port = environ[PREFIX + "COORDINATOR"].rpartition(":")
    slices, workers = int(_number(environ, "NUM_SLICES", 1)), int(_number(environ, "NUM_WORKERS", 1))
    # Kubernetes numbers the pods of an indexed Job in this variable.
    worker_variable = PREFIX + "WORKER" if PREFIX + "WORKER" in environ else "JOB_COMPLETION_INDEX"
    slice_index = int(_number(environ, "SLICE", 0))
    worker = int(_number(environ, worker_variable.removeprefix(PREFIX), 0, "" if worker_variable[0] == "J" else PREFIX))
    if not (0 <= slice_index < slices and 0 <= worker < workers and host and port.isdigit()):
        raise ValueError(
            f"the variables {PREFIX}* say worker {worker} of {workers} on slice {slice_index} of {slices}, to be met "
            f"at {environ[PREFIX + 'COORDINATOR']!r}, which is not possible; start the process with overlapfx launch."
        )
    return Identity(slice_index * workers + worker, slices * workers, host, int(port), workers, timeout_s)


def _number(environ: Mapping[str, str], name: str, default: float, prefix: str = PREFIX) -> float:
    text = environ.get(prefix + name, "")
    try:
        return float(text) if text else default
    except ValueError as error:
        raise ValueError(f"{prefix}{name} is {text!r}; it must be a number.") from error


def _from_metadata(read: Callable[[str], str], timeout_s: float, environ: Mapping[str, str]) -> Identity:
    """Reads what Cloud TPU tells every VM of a slice; the same attributes that JAX's own detection reads.

    Source: jax/_src/clusters/cloud_tpu_cluster.py. Endpoints are host names, or triples NAME:NUMBER:ADDRESS.
    """
    worker = int(read("agent-worker-number"))
    endpoints = [endpoint.split(":")[-1] for endpoint in read("worker-network-endpoints").split(",")]
    settings: dict[str, str] = {}
    for line in read("tpu-env").splitlines():
        key, _, value = line.partition(":")
        settings[key.strip()] = value.strip().strip("'")
    slices = int(settings.get("MEGASCALE_NUM_SLICES") or 1)
    slice_index = int(settings.get("MEGASCALE_SLICE_ID") or 0)
    host = (settings.get("MEGASCALE_COORDINATOR_ADDRESS") or endpoints[0]).split(":")[0]
    expected = int(_number(environ, "NUM_SLICES", slices))
    if slices != expected:
        raise ValueError(
            f"this TPU VM belongs to {slices} slices but the job was launched for {expected}; launch it again with the "
            f"topology that exists."
        )
    workers = len(endpoints)
    return Identity(slice_index * workers + worker, slices * workers, host, PORT, workers, timeout_s)


def _read_metadata(key: str) -> str:
    address = _METADATA.format(host="metadata.google.internal", key=key)
    request = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        if error.code == 404 and key == "tpu-env":  # a single slice may have none
            return ""
        raise ValueError(f"the metadata server has no {key} ({error}); is this a TPU VM?") from error
    except OSError as error:
        raise ValueError(
            f"the metadata server does not answer for {key} ({error}); start the job on TPU VMs with overlapfx launch."
        ) from error
