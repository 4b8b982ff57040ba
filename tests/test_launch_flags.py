"""Case C15: compiler flags that are unknown, misplaced, malformed or in conflict are refused before JAX is imported."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from launch import flags

PROJECT = pathlib.Path(__file__).resolve().parent.parent
ASYNC = "xla_enable_async_all_gather"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (
            {"XLA_FLAGS": f"--{ASYNC}=true"},
            f"--{ASYNC} is in XLA_FLAGS, where it is not read; move it to LIBTPU_INIT_ARGS.",
        ),
        (
            {"LIBTPU_INIT_ARGS": "--xla_dump_to=/tmp/d"},
            "--xla_dump_to is in LIBTPU_INIT_ARGS, where it is not read; move it to XLA_FLAGS.",
        ),
        (
            {"LIBTPU_INIT_ARGS": "--xla_enable_async_all_gahter=true"},
            f"--xla_enable_async_all_gahter is not a compiler flag that OverlapFX knows; did you mean --{ASYNC}? if it "
            "exists, name it in OVERLAPFX_UNLISTED_FLAGS, which passes flags of XLA_FLAGS or LIBTPU_INIT_ARGS on "
            "unchecked.",
        ),
        (
            {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_backend_optimization_level=3"},
            "XLA_FLAGS sets --xla_backend_optimization_level to 0 and to 3; leave one of them out.",
        ),
        (
            {"LIBTPU_INIT_ARGS": f"--{ASYNC}=false"},
            f"--{ASYNC}=false in LIBTPU_INIT_ARGS contradicts {ASYNC}=true, with which the training step is compiled; "
            "leave it out.",
        ),
        ({"XLA_FLAGS": "--xla_hlo_profile=yes"}, "--xla_hlo_profile in XLA_FLAGS is 'yes'; it must be true or false."),
        (
            {"XLA_FLAGS": "--xla_backend_optimization_level=high"},
            "--xla_backend_optimization_level in XLA_FLAGS is 'high'; it must be an integer.",
        ),
        ({"XLA_FLAGS": "--xla_dump_to="}, "--xla_dump_to in XLA_FLAGS is ''; it must be text without spaces."),
        (
            {"LIBTPU_INIT_ARGS": f"{ASYNC}=true"},
            f"LIBTPU_INIT_ARGS holds '{ASYNC}=true', which is no flag; write --NAME=VALUE.",
        ),
        (
            {"XLA_FLAGS": "flags.txt"},
            "XLA_FLAGS is 'flags.txt', neither flags that begin with -- nor a file; correct it.",
        ),
        (
            {"XLA_FLAGS": '--xla_dump_to="/tmp'},
            "XLA_FLAGS is '--xla_dump_to=\"/tmp', in which a quotation mark is not closed; close it.",
        ),
    ],
)
def test_a_wrong_flag_is_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"\S") as error:
        flags.check(environ)
    assert str(error.value) == sentence


def test_right_flags_pass_with_their_final_strings() -> None:
    environ = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_hlo_profile",
        "LIBTPU_INIT_ARGS": f"--{ASYNC}=1 --xla_tpu_scoped_vmem_limit_kib=98304",
        "HOME": "/",
    }
    assert flags.check(environ) == {name: environ[name] for name in flags.VARIABLES}
    assert flags.check({"XLA_FLAGS": ""}) == {}


def test_a_file_of_flags_is_read_like_the_flags(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "flags.txt"
    file.write_text(f"--{ASYNC}=true\n")
    with pytest.raises(ValueError, match="move it to LIBTPU_INIT_ARGS"):
        flags.check({"XLA_FLAGS": str(file)})


def test_an_unlisted_flag_passes_once_it_is_named() -> None:
    environ = {"LIBTPU_INIT_ARGS": "--xla_tpu_brand_new=1"}
    with pytest.raises(ValueError, match="OVERLAPFX_UNLISTED_FLAGS"):
        flags.check(environ)
    flags.check({**environ, flags.UNLISTED: "other, --xla_tpu_brand_new"})


def test_every_flag_goes_to_its_own_variable() -> None:
    given = {"xla_dump_to": "/tmp/d", ASYNC: "true", "--xla_tpu_scoped_vmem_limit_kib": "65536"}
    assert flags.place(given) == {
        "XLA_FLAGS": "--xla_dump_to=/tmp/d",
        "LIBTPU_INIT_ARGS": f"--{ASYNC}=true --xla_tpu_scoped_vmem_limit_kib=65536",
    }
    for wrong, part in (({"xla_nonsense": "1"}, "not a compiler flag"), ({"xla_dump_to": "a b"}, "without spaces")):
        with pytest.raises(ValueError, match=part):
            flags.place(wrong)


@pytest.mark.parametrize("command", [["launch.train"], ["launch.launch", "--local"]])
def test_the_error_comes_before_jax(command: list[str]) -> None:
    environ = {**os.environ, "XLA_FLAGS": f"--{ASYNC}=true"}
    words = [sys.executable, "-X", "importtime", "-m", *command, "--config=configs/gpt.py:tiny"]
    done = subprocess.run(words, cwd=PROJECT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines[-1].endswith("where it is not read; move it to LIBTPU_INIT_ARGS.")
    assert not any(line.split()[-1:] == ["jax"] for line in lines)


def test_jaxlib_knows_every_flag_of_its_variable() -> None:
    values = {"bool": "false", "int": "1", "text": "x"}
    known = {
        "xla_cpu_max_isa": "AVX2",
        "xla_step_marker_location": "STEP_MARK_AT_ENTRY",
        "xla_dump_to": os.devnull,
    }
    listed = [flag for flag in flags.FLAGS.values() if flag.variable == flags.XLA]
    text = " ".join(f"--{flag.name}={known.get(flag.name, values[flag.kind])}" for flag in listed)
    # jaxlib ends the process at the first flag that it does not know.
    environ = {**os.environ, "XLA_FLAGS": text, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert len(listed) > 10
