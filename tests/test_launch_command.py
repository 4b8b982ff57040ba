"""The command `overlapfx launch`: what it refuses, in which order it acts, what it hands to other programs."""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

import pytest

import launch.launch
from launch.arguments import USER_ERROR
from launch.launch import SUBMISSION_FAILED, main
from launch.plan import DOES_NOT_FIT

CONFIG = ("--config=configs/gpt.py:32B",)
WHERE = ("--topology=v4:4x4x4", "--project=my-project", "--zone=us-central2-b")
WHAT = ("--image=registry/overlapfx:1", "--mount=/mnt/runs", "--name=job-1")
TPU = (*CONFIG, "--cloud-tpu", *WHERE, *WHAT)
GKE = (*CONFIG, "--gke", *WHERE, *WHAT, "--cluster=c-1", "--claim=runs")

# Writes down what it is called with, answers like gcloud.
FAKE = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
stdin = sys.stdin.read() if "--filename=-" in words else ""
with (here / "calls.jsonl").open("a") as log:
    log.write(json.dumps([pathlib.Path(__file__).name, words, stdin]) + "\\n")
if "describe" in words:
    states = (here / "states").read_text().split()
    print(states[0])
    (here / "states").write_text(" ".join(states[1:] or states))
if any(word in " ".join(words) for word in (here / "refused").read_text().split()):
    print("ERROR: (gcloud) RESOURCE_EXHAUSTED: no quota", file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture
def fake_cloud(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder, alone on PATH, with a gcloud and a kubectl that only write down what they are called with."""
    for program in ("gcloud", "kubectl"):
        (tmp_path / program).write_text(FAKE.format(python=sys.executable))
        (tmp_path / program).chmod(0o755)
    (tmp_path / "states").write_text("WAITING_FOR_RESOURCES PROVISIONING ACTIVE")
    (tmp_path / "refused").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launch.launch, "_POLL_S", 0.01)
    return tmp_path


def calls(folder: pathlib.Path) -> list[Any]:
    log = folder / "calls.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for the planner, which has tests of its own; says that the step fits unless its last entry is "no"."""
    asked: list[Any] = []

    def plan(config: Any, topology: Any, chosen: Any, flags: Any, assumed: Any, arguments: Any) -> int:
        full = asked[:1] == ["no"]
        asked.append((config.name, str(topology), [variant.name for variant in chosen], flags))
        print("THE PLAN")
        return DOES_NOT_FIT if full else 0

    monkeypatch.setattr(launch.launch.planning, "plan", plan)
    monkeypatch.setattr(launch.launch.slices, "require_compiler", lambda: None)
    monkeypatch.setattr(launch.launch.slices, "prepare_environment", lambda: None)
    return asked


def without(words: tuple[str, ...], option: str) -> list[str]:
    left = [word for word in words if not word.startswith(option)]
    assert len(left) < len(words)
    return left


def replaced(words: tuple[str, ...], word: str) -> list[str]:
    return [*without(words, word.partition("=")[0] + "="), word]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (without(TPU, "--project"), "--project is missing; give the ID of your Google Cloud project."),
        (without(TPU, "--zone"), "--zone is missing; give the zone of your TPUs, such as us-central2-b."),
        (without(GKE, "--zone"), "--zone is missing;"),
        (without(TPU, "--topology"), "--topology is missing; give the slice, for example v4:4x4x4."),
        (without(TPU, "--image"), "--image is missing; give a container image in which the command overlapfx"),
        (without(TPU, "--mount"), "--mount is missing; give the directory that all hosts share."),
        (without(GKE, "--cluster"), "--cluster is missing; give the name of the cluster."),
        (without(GKE, "--claim"), "--claim is missing; give the claim of the shared volume."),
        (
            replaced(TPU, "--project=My Project"),
            "--project is 'My Project'; it must be the ID of a Google Cloud project",
        ),
        (replaced(TPU, "--project=--impersonate"), "--project is '--impersonate';"),
        (replaced(TPU, "--zone=us-central2"), "--zone is 'us-central2'; it must be a zone, such as us-central2-b."),
        (replaced(TPU, "--zone=moon"), "--zone is 'moon';"),
        (replaced(TPU, "--name=job 1; rm -rf /"), "--name is 'job 1; rm -rf /'; it must be lower-case letters,"),
        (replaced(TPU, "--name=-x"), "--name is '-x';"),
        (replaced(TPU, "--image=--privileged"), "--image is '--privileged'; it must be the name of a container image."),
        (replaced(TPU, "--mount=runs"), "--mount is 'runs'; it must be an absolute path of"),
        (replaced(TPU, "--mount=/a:/etc"), "--mount is '/a:/etc';"),
        (replaced(TPU, "--mount=/mnt/../etc"), "--mount is '/mnt/../etc';"),
        ((*TPU, "--run_dir=/home/me"), "--run_dir is /home/me, which is not below --mount /mnt/runs;"),
        (replaced(TPU, "--topology=v4:3x3x3"), "no slice 'v4:3x3x3' exists; use one of v4: 2x2x1,"),
        (
            replaced(TPU, "--topology=v4:4x4x8"),
            "the mesh replica=1, y=16, x=4 has 64 devices but v4:4x4x8 has 128; set mesh.y=32, or choose another",
        ),
        (
            [*replaced(TPU, "--topology=v4:2x2x4,slices=4"), "--config.mesh.replica=2", "--config.mesh.y=8"],
            "v4:2x2x4,slices=4 has 4 slices, over which mesh.replica=2 cannot be divided; set mesh.replica to",
        ),
        (replaced(TPU, "--topology=tpu7x:2x4x4"), "the Cloud TPU API has no slice tpu7x:2x4x4; launch it with --gke,"),
        ((*GKE, "--reserved"), "--reserved belongs to --cloud-tpu; with --gke the node pool uses the reservation."),
        ((*TPU, "--flag=xla_nonsense=1"), "--xla_nonsense is not a compiler flag that OverlapFX knows;"),
        ((*TPU, "--flag=xla_enable_async_all_gather=false"), "--xla_enable_async_all_gather=false in LIBTPU_INIT_ARGS"),
        (
            (*TPU, "--train=--devices=8"),
            "--train is '--devices=8'; it must be one of --check-replicas, --use-older-checkpoint.",
        ),
        ((*TPU, "--max-restarts=-1"), "--max-restarts is -1; it must be 0 or more."),
        ((*TPU, "--startup-timeout=0"), "--startup-timeout is 0; it must be more than 0."),
        ((*TPU, "--config.mesh.x=3"), "model.d_model is 8192, which does not divide over mesh axis x of size 3;"),
        ((*TPU, "--local"), "argument --local: not allowed with argument --cloud-tpu"),
        (CONFIG, "one of the arguments --gke --cloud-tpu --local is required"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_planned(
    words: list[str],
    sentence: str,
    planned: list[Any],
    fake_cloud: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == USER_ERROR
    said = capsys.readouterr().err
    assert said.startswith(f"overlapfx launch: {sentence}")
    assert said.count("\n") == 1
    assert planned == []
    assert calls(fake_cloud) == []


@pytest.mark.parametrize("words", [TPU, GKE])
def test_what_does_not_fit_is_not_submitted(
    words: tuple[str, ...], planned: list[Any], fake_cloud: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned.append("no")
    assert main(words) == DOES_NOT_FIT
    printed = capsys.readouterr()
    assert printed.out == "THE PLAN\n"
    assert printed.err == "overlapfx launch: gpt_32B does not fit on v4:4x4x4; nothing was submitted.\n"
    assert calls(fake_cloud) == []


def test_a_program_that_is_not_installed_is_named(
    planned: list[Any], fake_cloud: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake_cloud / "kubectl").unlink()
    with pytest.raises(SystemExit):
        main(GKE)
    assert "kubectl is not installed or not on PATH; install it, or look with --dry-run." in capsys.readouterr().err
    assert planned == calls(fake_cloud) == []
    assert main([*GKE, "--dry-run"]) == 0


def test_a_dry_run_plans_then_shows_what_a_shell_would_run(
    planned: list[Any], fake_cloud: pathlib.Path, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    words = [*GKE, "--flag=xla_tpu_scoped_vmem_limit_kib=65536", "--flag=megascale_grpc_premap_memory_bytes=1024"]
    assert main([*words, "--dry-run"]) == 0
    plan, shown = capsys.readouterr().out.split("\n# What would be submitted (--dry-run):\n")
    assert plan == "THE PLAN\n"
    assert planned == [("gpt_32B", "v4:4x4x4", ["ours"], {"xla_tpu_scoped_vmem_limit_kib": "65536"})]
    assert calls(fake_cloud) == []
    # Typed into a shell it does what the command itself does.
    os.system(f"PATH={fake_cloud} /bin/sh {_script(tmp_path, shown)}")
    typed = calls(fake_cloud)
    (fake_cloud / "calls.jsonl").unlink()
    assert main(words) == 0
    assert calls(fake_cloud) == typed
    assert len(typed) == 2
    assert "LIBTPU_INIT_ARGS" in typed[1][2]


def _script(folder: pathlib.Path, text: str) -> pathlib.Path:
    # The heredocs of /bin/sh need no program, but this folder is alone on PATH.
    (folder / "script.sh").write_text(text)
    return folder / "script.sh"


def test_gke_gets_credentials_then_the_manifest(
    planned: list[Any], fake_cloud: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(GKE) == 0
    (gcloud, credentials, _), (kubectl, create, manifest) = calls(fake_cloud)
    assert (gcloud, kubectl) == ("gcloud", "kubectl")
    assert credentials == [
        *("container", "clusters", "get-credentials", "c-1", "--location=us-central2-b", "--project=my-project")
    ]
    assert create == ["--context=gke_my-project_us-central2-b_c-1", "--namespace=default", "create", "--filename=-"]
    assert manifest.startswith("apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\nmetadata:\n  name: job-1\n")
    assert "kubectl --context=gke_my-project_us-central2-b_c-1 --namespace=default delete jobset job-1" in (
        capsys.readouterr().out
    )


def test_cloud_tpu_waits_for_the_slices_then_starts_every_one(
    planned: list[Any], fake_cloud: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*replaced(TPU, "--topology=v4:2x4x4,slices=2"), "--config.mesh.replica=2", "--config.mesh.y=8"]
    assert main([*words, "--train=--check-replicas"]) == 0
    verbs = [next(w for w in ("create", "describe", "ssh") if w in call[1]) for call in calls(fake_cloud)]
    assert verbs == ["create", "describe", "describe", "describe", "ssh", "ssh"]
    assert [call[1][4] for call in calls(fake_cloud)[-2:]] == ["job-1-0", "job-1-1"]
    remote = calls(fake_cloud)[-1][1][-1]
    assert remote.endswith(
        "overlapfx train --config=configs/gpt.py:32B --config.mesh.replica=2 --config.mesh.y=8 "
        "--check-replicas --run_dir=/mnt/runs/job-1"
    )
    printed = capsys.readouterr().out
    assert printed.index("THE PLAN") < printed.index("$ gcloud")
    assert "state: WAITING_FOR_RESOURCES\nstate: PROVISIONING\nstate: ACTIVE\n" in printed


@pytest.mark.parametrize(
    ("refused", "states", "extra", "sentence"),
    [
        ("create", "ACTIVE", [], "failed with exit code 1: ERROR: (gcloud) RESOURCE_EXHAUSTED: no quota"),
        ("ssh", "ACTIVE", [], "failed with exit code 1: ERROR: (gcloud) RESOURCE_EXHAUSTED: no quota"),
        ("", "PROVISIONING FAILED", [], "the state became FAILED, from which it does not become ACTIVE."),
        ("", "PROVISIONING", ["--wait=0.00001"], "the state is PROVISIONING after 0.036 s, not ACTIVE."),
    ],
)
def test_a_failed_submission_stops_and_says_what_to_remove(
    refused: str,
    states: str,
    extra: list[str],
    sentence: str,
    planned: list[Any],
    fake_cloud: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (fake_cloud / "refused").write_text(refused)
    (fake_cloud / "states").write_text(states)
    assert main([*TPU, *extra]) == SUBMISSION_FAILED
    said = capsys.readouterr().err
    assert sentence in said
    assert said.splitlines()[-1] == (
        "overlapfx launch: what exists by now is removed by: gcloud compute tpus queued-resources delete job-1 "
        "--project=my-project --zone=us-central2-b --force"
    )
    assert refused == "ssh" or not any("ssh" in call[1] for call in calls(fake_cloud))


def test_nothing_of_the_environment_goes_along(
    planned: list[Any], fake_cloud: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-value")
    for words in (TPU, GKE):
        assert main(words) == 0
    printed = capsys.readouterr()
    assert "s3cr3t-value" not in printed.out + printed.err + json.dumps(calls(fake_cloud))
