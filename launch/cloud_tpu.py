"""A training job on Cloud TPU VMs: a queued resource, then one container on every worker."""

from __future__ import annotations

import shlex

from launch.commands import Command
from launch.identity import cloud_tpu_variables
from launch.job import Job

# States of a queued resource: the one to wait for, then those that do not lead there.
# Source: cloud.google.com/tpu/docs/queued-resources.
_STATES = ("ACTIVE", "FAILED", "SUSPENDING", "SUSPENDED")


def nodes(job: Job) -> tuple[str, ...]:
    """The names of the TPU nodes, one per slice; the service numbers those of a prefix."""
    num_slices = job.topology.topology.num_slices
    return (job.name,) if num_slices == 1 else tuple(f"{job.name}-{index}" for index in range(num_slices))


def commands(job: Job, *, project: str, zone: str, reserved: bool) -> list[Command]:
    """What requests the slices, waits for them, and starts the job on every worker of every slice.

    Raises ValueError for a slice that the Cloud TPU API does not offer.
    """
    where = (f"--project={project}", f"--zone={zone}")
    resource = ("gcloud", "compute", "tpus", "queued-resources")
    multiple = (f"--node-count={len(nodes(job))}", f"--node-prefix={job.name}")
    create = (
        *(*resource, "create", job.name, *where),
        *job.topology.accelerator_arguments(),
        f"--runtime-version={job.topology.runtime_version}",
        *((f"--node-id={job.name}",) if len(nodes(job)) == 1 else multiple),
        *(("--spot",) if job.spot else ()),
        *(("--reserved",) if reserved else ()),
    )
    describe = (*resource, "describe", job.name, *where, "--format=value(state.state)")
    start = shlex.join(_container(job))
    return [
        Command(create),
        Command(describe, until=_STATES),
        *(Command(_ssh(node, where, "all", start)) for node in nodes(job)),
    ]


def hints(job: Job, *, project: str, zone: str) -> list[Command]:
    """Commands that follow the job and end it, with the slices."""
    where = (f"--project={project}", f"--zone={zone}")
    logs = shlex.join(("sudo", "docker", "logs", "--follow", job.name))
    resource = ("gcloud", "compute", "tpus", "queued-resources")
    return [
        Command(_ssh(nodes(job)[0], where, "0", logs)),
        Command((*resource, "delete", job.name, *where, "--force")),
    ]


def _ssh(node: str, where: tuple[str, ...], worker: str, command: str) -> tuple[str, ...]:
    return ("gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *where, f"--worker={worker}", f"--command={command}")


def _container(job: Job) -> tuple[str, ...]:
    """The container of one worker: it outlives the connection, and starts again after a failure or a reboot.

    It sees the TPU and the network of its host, as cloud.google.com/tpu/docs/run-in-container describes, and its shared
    memory, through which reader processes hand over batches.
    """
    environment = {
        **cloud_tpu_variables(slices=job.topology.topology.num_slices, timeout_s=job.timeout_s),
        **job.variables,
    }
    return (
        *("sudo", "docker", "run", "--detach", f"--name={job.name}", "--privileged", "--network=host", "--ipc=host"),
        *(f"--restart=on-failure:{job.max_restarts}", f"--stop-timeout={job.grace_s}"),
        f"--volume={job.mount}:{job.mount}",
        *(f"--env={name}={value}" for name, value in environment.items()),
        job.image,
        *job.command,
    )
