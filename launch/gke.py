"""A training job as a JobSet for Google Kubernetes Engine."""

from __future__ import annotations

from typing import Any

import yaml

from launch.arguments import USER_ERROR
from launch.commands import Command
from launch.identity import PORT, PREFIX, variables
from launch.job import Job
from overlapfx.train.stops import EXIT_DIVERGED, EXIT_INTERRUPTED

# The name of the one group of jobs: job i of it is slice i.
_GROUP = "slice"
_CONTAINER = "train"
_VOLUME = "runs"
_MEMORY = "shared-memory"
# What Kubernetes appends to the name of a pod.
_SUFFIX = "-xxxxx"
_MAX_NAME = 63


def check(job: Job) -> None:
    """Raises ValueError for what GKE cannot run."""
    slice_ = job.topology
    longest = f"{job.name}-{_GROUP}-{slice_.topology.num_slices - 1}-{slice_.hosts - 1}{_SUFFIX}"
    if len(longest) > _MAX_NAME:
        most = _MAX_NAME - len(longest) + len(job.name)
        raise ValueError(f"--name is {job.name!r}, too long for the names of its pods; use at most {most} characters.")
    # Source: cloud.google.com/kubernetes-engine/docs/how-to/tpu-multislice, "Multislice availability in GKE".
    if slice_.topology.num_slices > 1 and slice_.hosts == 1:
        raise ValueError(
            f"GKE joins only slices of several hosts, but {slice_.topology} has one host per slice; use larger slices."
        )


def manifest(job: Job, claim: str) -> dict[str, Any]:
    """The JobSet: one Job per slice, one pod per host, the shared directory from the persistent volume claim `claim`.

    JobSet (v0.10 or newer, for message patterns) makes a headless service of its own name, in which a pod is called
    NAME-slice-SLICE-HOST. Any pod that fails ends its Job, and then all Jobs start again: a step needs every host.
    Restarts after a preemption are free, the others are counted, and an error that a restart cannot mend ends it all.
    """
    slice_ = job.topology
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.max_restarts, "rules": _failure_rules()},
        "replicatedJobs": [
            {
                "name": _GROUP,
                "replicas": slice_.topology.num_slices,
                "template": {
                    "spec": {
                        "completionMode": "Indexed",
                        "parallelism": slice_.hosts,
                        "completions": slice_.hosts,
                        "backoffLimit": 0,
                        "podFailurePolicy": {"rules": _POD_RULES},
                        "template": {"spec": _pod(job, claim)},
                    }
                },
            }
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": job.name,
            "labels": {"app.kubernetes.io/name": "overlapfx", "app.kubernetes.io/instance": job.name},
            # One slice is one node pool: no two jobs may share it.
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": spec,
    }


# The Job controller says which of these ended a Job by their place in this list.
# Source: kubernetes.io/docs/tasks/job/pod-failure-policy.
_POD_RULES = [
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [USER_ERROR, EXIT_DIVERGED]},
    },
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    {
        "action": "FailJob",
        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [EXIT_INTERRUPTED]},
    },
]


def _failure_rules() -> list[dict[str, Any]]:
    """What JobSet does about a Job that one of the pod rules ended; any other failure is a counted restart."""
    hopeless, *preempted = (rf"matching FailJob rule at index {index}$" for index in range(len(_POD_RULES)))
    return [
        {
            "name": "mistake",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [hopeless],
        },
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": preempted,
        },
    ]


def _pod(job: Job, claim: str) -> dict[str, Any]:
    slice_ = job.topology
    selector = {
        "cloud.google.com/gke-tpu-accelerator": slice_.gke_accelerator,
        "cloud.google.com/gke-tpu-topology": slice_.shape,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "nodeSelector": selector,
    }
    if job.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        pod["tolerations"] = [spot]
    pod["containers"] = [
        {
            "name": _CONTAINER,
            "image": job.image,
            "command": [_literal(word) for word in job.command],
            "env": _environment(job),
            "ports": [{"containerPort": PORT}, {"containerPort": PORT + 1}],
            "resources": {"limits": {"google.com/tpu": slice_.chips_per_host}},
            "volumeMounts": [
                {"name": _VOLUME, "mountPath": job.mount},
                {"name": _MEMORY, "mountPath": "/dev/shm"},
            ],
        }
    ]
    pod["volumes"] = [
        {"name": _VOLUME, "persistentVolumeClaim": {"claimName": claim}},
        # Through which reader processes hand over batches; a container has 64 MiB of it by default.
        {"name": _MEMORY, "emptyDir": {"medium": "Memory"}},
    ]
    return pod


def _environment(job: Job) -> list[dict[str, Any]]:
    """Fixed variables, then the slice of this pod, which JobSet writes into a label of it.

    GKE itself adds what libtpu needs to find its neighbours and the other slices (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES,
    MEGASCALE_*); Kubernetes adds JOB_COMPLETION_INDEX, the number of the host in its slice.
    """
    fixed = variables(
        host=f"{job.name}-{_GROUP}-0-0.{job.name}",
        slices=job.topology.topology.num_slices,
        workers=job.topology.hosts,
        timeout_s=job.timeout_s,
    )
    listed: list[dict[str, Any]] = [
        {"name": name, "value": _literal(value)} for name, value in {**fixed, **job.variables}.items()
    ]
    label = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
    return [*listed, {"name": f"{PREFIX}SLICE", "valueFrom": label}]


def _literal(text: str) -> str:
    """`text` as Kubernetes leaves it alone: $(NAME) would be replaced by a variable, and $$ is one dollar."""
    return text.replace("$", "$$")


def manifest_text(job: Job, claim: str) -> str:
    """The manifest as YAML."""
    return str(yaml.safe_dump(manifest(job, claim), sort_keys=False, default_flow_style=False, width=10**6))


def commands(job: Job, claim: str, *, project: str, zone: str, cluster: str, namespace: str) -> list[Command]:
    """What submits the job: credentials for the cluster, then the manifest, which must not exist there yet."""
    # The name that gcloud gives to the credentials of a cluster.
    context = f"gke_{project}_{zone}_{cluster}"
    return [
        Command(
            (
                *("gcloud", "container", "clusters", "get-credentials", cluster),
                *(f"--location={zone}", f"--project={project}"),
            )
        ),
        Command(
            ("kubectl", f"--context={context}", f"--namespace={namespace}", "create", "--filename=-"),
            stdin=manifest_text(job, claim),
        ),
    ]


def hints(job: Job, *, project: str, zone: str, cluster: str, namespace: str) -> list[Command]:
    """Commands that follow the job and end it."""
    kubectl = ("kubectl", f"--context=gke_{project}_{zone}_{cluster}", f"--namespace={namespace}")
    selector = f"--selector=jobset.sigs.k8s.io/jobset-name={job.name},jobset.sigs.k8s.io/job-index=0"
    first = f"{selector},batch.kubernetes.io/job-completion-index=0"
    return [
        Command((*kubectl, "logs", first, "--follow", "--tail=-1")),
        Command((*kubectl, "delete", "jobset", job.name)),
    ]
