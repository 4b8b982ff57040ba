"""The command line: config files with overrides, the environment for JAX, exit codes with one-sentence errors."""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

import pytest

import launch.train
from launch import cli
from launch.arguments import config_parser, one_sentence, parse
from launch.config_file import load_config
from launch.environment import device_environment
from overlapfx.train.stops import EXIT_STORAGE, StorageError

PROJECT = pathlib.Path(__file__).resolve().parent.parent
TINY = "configs/gpt.py:tiny"
FILES = "configs/bert.py, configs/conformer.py, configs/gpt.py, configs/moe.py, configs/t5.py"
COUNT = "--xla_force_host_platform_device_count"
ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command that fails before it imports JAX."""
    command = [sys.executable, "-X", "importtime", "-m", *arguments]
    environment = {**os.environ, "XLA_FLAGS": ""}
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stderr.splitlines()
    assert not any(line.split()[-1:] == ["jax"] for line in lines), "JAX was imported"
    return done.returncode, "\n".join(line for line in lines if not line.startswith("import time:"))


# ---- config files ----


def test_the_default_config_of_a_file() -> None:
    assert load_config("configs/gpt.py") == load_config(TINY)
    assert load_config("configs/gpt.py:32B").name == "gpt_32B"


def test_a_file_is_found_from_any_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(TINY).name == "gpt_tiny"
    (tmp_path / "mine.py").write_text(
        "from configs.gpt import get_config as base\ndef get_config(): return base('64B')\n"
    )
    assert load_config("mine.py").name == "gpt_64B"
    assert load_config(str(tmp_path / "mine.py")).name == "gpt_64B"


@pytest.mark.parametrize(
    ("override", "group", "field", "value"),
    [
        ("mesh.x=4", "mesh", "x", 4),
        ("mesh.x=1_0", "mesh", "x", 10),
        ("optimizer.learning_rate=1e-3", "optimizer", "learning_rate", 0.001),
        ("optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("model.gated=false", "model", "gated", False),
        ("model.gated=True", "model", "gated", True),
        ("sample.prompt=a=b", "sample", "prompt", "a=b"),
        ("data.data_dir=", "data", "data_dir", ""),
        ("overlap.mode=off", "overlap", "mode", "off"),
    ],
)
def test_overrides_have_the_type_of_the_field(override: str, group: str, field: str, value: object) -> None:
    got = load_config(TINY, [override])[group][field]
    assert got == value
    assert type(got) is type(value)


def test_top_level_field_and_later_override_wins() -> None:
    assert load_config(TINY, ["seed=7", "name=a", "seed=8"]).seed == 8


def test_sites_are_json() -> None:
    config = load_config(TINY, ['overlap.sites={"mlp.up": {"mode": "off"}}'])
    assert config.overlap.sites.to_dict() == {"mlp.up": {"mode": "off"}}


@pytest.mark.parametrize(
    ("path", "overrides", "sentence"),
    [
        ("configs/gtp.py:tiny", [], f"There is no config file 'configs/gtp.py'; the project has {FILES}"),
        ("configs", [], f"There is no config file 'configs'; the project has {FILES}"),
        ("configs/__init__.py", [], "configs/__init__.py has no function get_config;"),
        (
            "configs/gpt.py:huge",
            [],
            "configs/gpt.py has no config 'huge'; choose one of tiny, 1B, 32B, 64B, 128B, 256B, 512B",
        ),
        (TINY, ["mesh.z=1"], "--config.mesh.z is not a field; the fields of mesh are replica, x, y."),
        (
            TINY,
            ["mush.x=1"],
            "--config.mush is not a field; the fields are data, mesh, model, name, optimizer, overlap,",
        ),
        (TINY, ["mesh.x.y=1"], "--config.mesh.x.y is not a field; mesh.x has no fields of its own."),
        (TINY, ["mesh=1"], "--config.mesh is a group; set one of its fields: mesh.replica, mesh.x, mesh.y."),
        (TINY, ["mesh.x=four"], "--config.mesh.x is 'four'; it must be an integer."),
        (TINY, ["mesh.x=4.0"], "--config.mesh.x is '4.0'; it must be an integer."),
        (TINY, ["mesh.x="], "--config.mesh.x is ''; it must be an integer."),
        (TINY, ["mesh.x"], "--config.mesh.x has no value; write --config.mesh.x=VALUE."),
        (TINY, ["optimizer.eps=tiny"], "--config.optimizer.eps is 'tiny'; it must be a number."),
        (TINY, ["model.gated=1"], "--config.model.gated is '1'; it must be true or false."),
        (TINY, ["overlap.sites={"], "--config.overlap.sites is '{', which is not JSON: "),
        (TINY, ["overlap.sites=[1]"], "--config.overlap.sites is '[1]'; it must be a JSON object, for example {}."),
    ],
)
def test_errors_of_config_files(path: str, overrides: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        load_config(path, overrides)
    assert str(error.value).startswith(sentence)
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)


# ---- the environment for JAX ----


@pytest.mark.parametrize(
    ("devices", "environ", "accelerator", "added"),
    [
        # No accelerator: simulate what the mesh of 8 needs.
        (None, {}, False, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{COUNT}=8 {ORDER}"}),
        (None, {"JAX_PLATFORMS": "cpu"}, True, {"XLA_FLAGS": f"{COUNT}=8 {ORDER}"}),
        (None, {"XLA_FLAGS": "--a=1"}, False, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--a=1 {COUNT}=8 {ORDER}"}),
        (None, {"XLA_FLAGS": f"{COUNT}=4"}, False, {"JAX_PLATFORMS": "cpu"}),
        (None, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{COUNT}=4"}, False, {}),
        # Asked for on the command line.
        (2, {}, True, {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{COUNT}=2 {ORDER}"}),
        (4, {"XLA_FLAGS": f"{COUNT}=4"}, True, {"JAX_PLATFORMS": "cpu"}),
        # An accelerator is used as it is.
        (None, {}, True, {}),
        (None, {"JAX_PLATFORMS": "tpu"}, False, {}),
    ],
)
def test_environment(devices: int | None, environ: dict[str, str], accelerator: bool, added: dict[str, str]) -> None:
    assert device_environment(8, devices, environ, accelerator) == added


@pytest.mark.parametrize(
    ("devices", "environ", "sentence"),
    [
        (0, {}, "--devices is 0; it must be at least 1."),
        (8, {"JAX_PLATFORMS": "tpu"}, "--devices=8 simulates CPU devices but JAX_PLATFORMS is 'tpu'; "),
        (8, {"XLA_FLAGS": f"{COUNT}=4"}, f"--devices=8 contradicts {COUNT}=4 in XLA_FLAGS; leave one of them out."),
    ],
)
def test_contradictions_are_refused(devices: int, environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match="devices") as error:
        device_environment(8, devices, environ, accelerator=False)
    assert str(error.value).startswith(sentence)


# ---- arguments ----


def test_overrides_with_equals_sign_or_space() -> None:
    parser = config_parser("train", "")
    words = ["--config.mesh.x", "1", f"--config={TINY}", "--devices=4", "--config.mesh.y=2", "--config.seed", "3"]
    arguments, config = parse(parser, words)
    assert (config.mesh.x, config.mesh.y, config.seed, arguments.devices) == (1, 2, 3, 4)


def test_one_sentence_lets_bugs_through(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop, one_sentence("overlapfx train"):
        raise ValueError("mesh.x is 0.")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "overlapfx train: mesh.x is 0.\n"
    with pytest.raises(KeyError), one_sentence("overlapfx train"):
        raise KeyError("a bug")


# ---- commands ----


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert all(name in said and what in said for name, (_, what) in cli.COMMANDS.items())


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert capsys.readouterr().err == f"overlapfx: 'trian' is not a command; choose one of {', '.join(cli.COMMANDS)}.\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"overlapfx {name}" in capsys.readouterr().out


def test_train_is_handed_config_with_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(launch.train, "prepare", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(
        launch.train, "train", lambda config, run_dir, rest: calls.append((config.mesh.x, run_dir, flags(rest))) or 0
    )

    def flags(rest: argparse.Namespace) -> tuple[bool, bool]:
        return rest.check_replicas, rest.use_older_checkpoint

    common = ["train", f"--config={TINY}", "--config.mesh.x=4"]
    assert cli.main([*common, "--run_dir=somewhere", "--check-replicas"]) == 0
    assert cli.main([*common, "--devices", "16", "--use-older-checkpoint"]) == 0
    assert calls == [
        (16, None),
        (4, pathlib.Path("somewhere"), (True, False)),
        (16, 16),
        (4, pathlib.Path("runs/gpt_tiny"), (False, True)),
    ]


def test_a_run_that_stops_says_why_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def train(*_: object) -> int:
        raise StorageError("The disk is full; make room.")

    monkeypatch.setattr(launch.train, "prepare", lambda *_: {})
    monkeypatch.setattr(launch.train, "train", train)
    assert cli.main(["train", f"--config={TINY}"]) == EXIT_STORAGE
    assert capsys.readouterr().err == "overlapfx train: The disk is full; make room.\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--config=configs/gpt.py:tiny", "--config.mesh.x=4", "--config.model.num_kv_heads=2"],
            "model.num_kv_heads is 2, which does not divide over mesh axis x of size 4; the nearest legal value is 4.",
        ),
        (["--config=nothing.py"], f"There is no config file 'nothing.py'; the project has {FILES}."),
        (["--conf=configs/gpt.py"], "the following arguments are required: --config"),
        (["--config=configs/gpt.py", "--runs=a"], "'--runs=a' is not an argument; see --help."),
        (["--config=configs/gpt.py", "--devices=0"], "--devices is 0; it must be at least 1."),
    ],
)
def test_an_error_is_one_sentence_before_jax_is_imported(arguments: list[str], sentence: str) -> None:
    assert run("launch.train", *arguments) == (2, f"overlapfx train: {sentence}")


def test_the_console_command_is_the_same_as_the_module() -> None:
    assert run("launch.cli", "train", "--config=nothing.py") == run("launch.train", "--config=nothing.py")
