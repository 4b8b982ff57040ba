"""What `overlapfx launch` would submit: manifests against the published schema, commands byte for byte."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shlex
import subprocess
from typing import Any

import jsonschema
import pytest
import yaml

from launch import cloud_tpu, gke, job
from launch.accelerators import CloudSlice
from launch.commands import Command
from overlapfx.aot.slices import FAMILIES, parse_slice

DATA = pathlib.Path(__file__).parent / "data"
HOSTILE = (
    'it\'s "$HOME" $(reboot) $$(X) `id` ; rm -rf / & | > < \\ * ? ~ # ! {a,b} [x]',
    "two\nlines: - {a: b}\n---\n# c",
    "yes",
    "0123",
    "null",
    " leading and trailing ",
    "ünï¢ødé \u2028 \x07",
    "%s ${X} {{x}} @file",
    "'",
)


def make_job(topology: str = "v4:4x4x4,slices=2", **fields: Any) -> job.Job:
    values: dict[str, Any] = {
        "name": "gpt-32b",
        "topology": CloudSlice(parse_slice(topology)),
        "image": "us-docker.pkg.dev/p/r/overlapfx:1.0",
        "train_arguments": ("--config=configs/gpt.py:32B", "--config.mesh.replica=2"),
        "mount": "/mnt/runs",
        "run_dir": "/mnt/runs/gpt-32b",
        "variables": {"JAX_PLATFORMS": "tpu,cpu", "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=65536"},
    }
    return job.Job(**{**values, **fields})


def schema() -> dict[str, Any]:
    """The published schema, strict like kubectl: fields that it does not name are errors."""

    def strict(node: Any) -> Any:
        if isinstance(node, list):
            return [strict(item) for item in node]
        if not isinstance(node, dict):
            return node
        inner = {key: strict(value) for key, value in node.items()}
        if isinstance(inner.get("properties"), dict) and "additionalProperties" not in inner:
            inner["additionalProperties"] = False
        return inner

    found = strict(json.loads((DATA / "jobset-v1alpha2.json").read_text()))
    found["properties"]["metadata"].pop("additionalProperties", None)
    return dict(found)


def validate(manifest: Any) -> None:
    jsonschema.Draft7Validator(schema()).validate(manifest)


def at(manifest: Any, *path: Any) -> Any:
    for key in path:
        manifest = manifest[key]
    return manifest


JOB = ("spec", "replicatedJobs", 0, "template", "spec")
POD = (*JOB, "template", "spec")
CONTAINER = (*POD, "containers", 0)


# ---- names and numbers of slices ----


@pytest.mark.parametrize(
    ("topology", "label", "hosts", "chips_per_host", "arguments"),
    [
        ("v4:2x2x1", "tpu-v4-podslice", 1, 4, ("--accelerator-type=v4-8",)),
        ("v4:4x4x4", "tpu-v4-podslice", 16, 4, ("--accelerator-type=v4-128",)),
        ("v4:8x8x8", "tpu-v4-podslice", 128, 4, ("--accelerator-type=v4-1024",)),
        ("v4:4x4x16", "tpu-v4-podslice", 64, 4, ("--type=v4", "--topology=4x4x16")),
        ("v5e:1x1", "tpu-v5-lite-podslice", 1, 1, ("--accelerator-type=v5litepod-1",)),
        ("v5e:2x2", "tpu-v5-lite-podslice", 1, 4, ("--accelerator-type=v5litepod-4",)),
        ("v5e:2x4", "tpu-v5-lite-podslice", 1, 8, ("--accelerator-type=v5litepod-8",)),
        ("v5e:4x4", "tpu-v5-lite-podslice", 4, 4, ("--accelerator-type=v5litepod-16",)),
        ("v5e:16x16", "tpu-v5-lite-podslice", 64, 4, ("--accelerator-type=v5litepod-256",)),
        ("v5p:2x2x2", "tpu-v5p-slice", 2, 4, ("--accelerator-type=v5p-16",)),
        ("v5p:4x4x4", "tpu-v5p-slice", 16, 4, ("--accelerator-type=v5p-128",)),
        ("v6e:4x4,slices=3", "tpu-v6e-slice", 4, 4, ("--accelerator-type=v6e-16",)),
        ("v6e:16x16", "tpu-v6e-slice", 64, 4, ("--accelerator-type=v6e-256",)),
        ("tpu7x:4x4x4", "tpu7x", 16, 4, None),
    ],
)
def test_names_and_numbers(
    topology: str, label: str, hosts: int, chips_per_host: int, arguments: tuple[str, ...] | None
) -> None:
    found = CloudSlice(parse_slice(topology))
    assert (found.gke_accelerator, found.hosts, found.chips_per_host) == (label, hosts, chips_per_host)
    if arguments is None:
        with pytest.raises(ValueError, match="no slice tpu7x:4x4x4; launch it with --gke, or choose one of v4, v5e"):
            found.accelerator_arguments()
    else:
        assert found.accelerator_arguments() == arguments


def test_every_named_slice_has_whole_hosts() -> None:
    for family in FAMILIES.values():
        for shape in family.named:
            found = CloudSlice(parse_slice(f"{family.name}:{shape}"))
            assert found.hosts * found.chips_per_host == found.chips


# ---- GKE ----


@pytest.mark.parametrize(
    ("golden", "made"),
    [
        ("launch/gke_two_slices.yaml", make_job()),
        ("launch/gke_spot.yaml", make_job("v6e:4x4", spot=True, variables={}, max_restarts=3, grace_s=30)),
    ],
)
def test_the_manifest_byte_for_byte(golden: str, made: job.Job) -> None:
    assert gke.manifest_text(made, "runs-claim") == (DATA / golden).read_text()


@pytest.mark.parametrize("topology", ["v4:4x4x4", "v4:4x4x4,slices=4", "v5e:2x4", "v5p:2x2x2", "tpu7x:2x2x1"])
def test_the_manifest_obeys_the_published_schema(topology: str) -> None:
    made = make_job(topology, spot=True)
    gke.check(made)
    validate(yaml.safe_load(gke.manifest_text(made, "runs-claim")))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ((*JOB, "podFailurePolicy", "rules", 0, "onExitCodes", "values"), ["2"]),
        ((*JOB, "completionMode"), 1),
        ((*JOB, "completionmode"), "Indexed"),
        ((*POD, "terminationGracePeriodSecond"), 30),
        ((*CONTAINER, "resources", "limits"), 4),
        ((*CONTAINER, "volumeMounts", 0, "path"), "/x"),
        (("spec", "failurePolicy", "rules", 0, "action"), "FailJob"),
        (("spec", "failurePolicy", "maxRestart"), 3),
    ],
)
def test_the_schema_finds_a_planted_fault(path: tuple[Any, ...], value: Any) -> None:
    manifest = yaml.safe_load(gke.manifest_text(make_job(), "runs-claim"))
    validate(manifest)
    at(manifest, *path[:-1])[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


def test_one_job_per_slice_one_pod_per_host() -> None:
    manifest = gke.manifest(make_job("v5p:4x4x8,slices=3"), "runs-claim")
    group = at(manifest, "spec", "replicatedJobs", 0)
    assert group["replicas"] == 3
    assert (at(manifest, *JOB, "parallelism"), at(manifest, *JOB, "completions")) == (32, 32)
    assert at(manifest, *CONTAINER, "resources", "limits") == {"google.com/tpu": 4}
    assert at(manifest, *POD, "nodeSelector") == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x8",
    }
    environment = {entry["name"]: entry.get("value") for entry in at(manifest, *CONTAINER, "env")}
    assert environment["OVERLAPFX_COORDINATOR"] == "gpt-32b-slice-0-0.gpt-32b:8475"
    assert (environment["OVERLAPFX_NUM_SLICES"], environment["OVERLAPFX_NUM_WORKERS"]) == ("3", "32")


@pytest.mark.parametrize(
    ("message", "action"),
    [
        ("Container train for pod a/b failed with exit code 2 matching FailJob rule at index 0", "FailJobSet"),
        (
            "Pod a/b has condition DisruptionTarget matching FailJob rule at index 1",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        (
            "Container train for pod a/b failed with exit code 75 matching FailJob rule at index 2",
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        ("Job has reached the specified backoff limit", None),
    ],
)
def test_restarts_are_counted_only_where_they_should_be(message: str, action: str | None) -> None:
    rules = at(gke.manifest(make_job(), "c"), "spec", "failurePolicy", "rules")
    found = [
        rule["action"] for rule in rules if any(re.search(p, message) for p in rule["onJobFailureMessagePatterns"])
    ]
    assert found == ([] if action is None else [action])


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_reach_the_container_as_they_are_on_gke(value: str) -> None:
    words = (f"--config.sample.prompt={value}", value)
    made = make_job(train_arguments=words, variables={"LIBTPU_INIT_ARGS": value})
    manifest = yaml.safe_load(gke.manifest_text(made, "runs-claim"))
    validate(manifest)
    command = at(manifest, *CONTAINER, "command")
    assert [kubernetes_expands(word) for word in command[2:4]] == list(words)
    environment = {entry["name"]: entry.get("value") for entry in at(manifest, *CONTAINER, "env")}
    assert kubernetes_expands(environment["LIBTPU_INIT_ARGS"]) == value


def kubernetes_expands(text: str) -> str:
    """What Kubernetes makes of $ in a command or a variable, with no variable of any name defined."""
    done, rest = "", text
    while "$" in rest:
        before, rest = rest.split("$", 1)
        done += before
        if rest.startswith("$"):
            done, rest = done + "$", rest[1:]
        elif rest.startswith("(") and ")" in rest:
            raise AssertionError(f"a reference to a variable is left in {text!r}")
        else:
            done += "$"
    return done + rest


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (make_job(name="a" * 60), "too long for the names of its pods; use at most 46 characters."),
        (make_job("v5e:2x4,slices=2"), "GKE joins only slices of several hosts, but v5e:2x4,slices=2 has one host"),
    ],
)
def test_what_gke_cannot_run_is_refused(made: job.Job, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        gke.check(made)
    assert sentence in str(error.value)
    gke.check(dataclasses.replace(made, name="a" * 46, topology=CloudSlice(parse_slice("v5e:4x4,slices=2"))))


# ---- Cloud TPU ----


@pytest.mark.parametrize(
    ("golden", "made", "reserved"),
    [
        ("launch/cloud_tpu_one_slice.txt", make_job("v4:4x4x4"), True),
        ("launch/cloud_tpu_two_slices.txt", make_job("v5p:4x4x16,slices=2", spot=True), False),
    ],
)
def test_the_commands_byte_for_byte(golden: str, made: job.Job, reserved: bool) -> None:
    place = {"project": "my-project", "zone": "us-central2-b"}
    commands = [*cloud_tpu.commands(made, **place, reserved=reserved), *cloud_tpu.hints(made, **place)]
    assert "".join(f"{command.shown()}\n" for command in commands) == (DATA / golden).read_text()


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_reach_the_container_as_they_are_on_a_tpu_vm(value: str) -> None:
    words = (f"--config.sample.prompt={value}", value)
    made = make_job("v4:4x4x4", train_arguments=words, variables={"LIBTPU_INIT_ARGS": value})
    *_, start = cloud_tpu.commands(made, project="my-project", zone="us-central2-b", reserved=False)
    remote = next(word for word in start.argv if word.startswith("--command=")).removeprefix("--command=")
    # A real shell reads it as the worker's would, with a program in place of sudo that prints what it is given.
    script = "sudo() { printf '%s\\0' \"$@\"; }\n" + remote
    printed = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout.decode().split("\0")[:-1]
    assert printed == list(shlex.split(remote))[1:]
    assert printed[-3:-1] == list(words)
    assert f"--env=LIBTPU_INIT_ARGS={value}" in printed


def test_shown_commands_are_those_that_run() -> None:
    for value in HOSTILE:
        assert shlex.split(Command(("gcloud", value)).shown()) == ["gcloud", value]
