"""Compiled programs that are kept: found again only for the same question, damage and lack of room do no harm."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from overlapfx.aot import kept
from overlapfx.aot.kept import Kept
from overlapfx.layers.fused_attention import fused_attend
from overlapfx.train.directories import replacing

PROGRAM = Kept("HloModule step\n\nENTRY %main {\n}\n", {"compile_s": 2.5, "memory": {"code": 3}})


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_was_kept_is_found() -> None:
    assert kept.find("a") is None
    kept.keep("a", PROGRAM)
    assert kept.find("a") == PROGRAM
    assert kept.find("b") is None
    assert [path.name for path in kept.directory().iterdir()] == ["a.gz"]


def test_another_question_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> list[str]:
        options = {"xla_a": "true"}
        return [
            kept.key("module", options, "v4:2x2x1"),
            kept.key("module2", options, "v4:2x2x1"),
            kept.key("module", {"xla_a": "false"}, "v4:2x2x1"),
            kept.key("module", options, "v4:2x2x2"),
        ]

    before = keys()
    assert len(set(before)) == 4
    assert keys() == before
    flags = os.environ.get("XLA_FLAGS", "")
    monkeypatch.setenv("XLA_FLAGS", f"{flags} --xla_force_host_platform_device_count=3 --xla_cpu_c=d")
    assert keys() == before
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_b")
    assert not set(keys()) & set(before)


@pytest.mark.parametrize("damage", [lambda packed: packed[:-9], lambda packed: b"", lambda packed: b"x" * 40])
def test_a_damaged_file_is_as_good_as_none(damage) -> None:
    kept.keep("a", PROGRAM)
    (path,) = kept.directory().iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert kept.find("a") is None


def test_where_nothing_can_be_kept_work_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    kept.keep("a", PROGRAM)
    assert kept.find("a") is None


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "cache" / "file"

    def write(content: bytes, error: OSError | None = None) -> None:
        with replacing(path) as file:
            file.write(content)
            if error is not None:
                raise error

    write(b"whole")
    with pytest.raises(OSError, match="full"):
        write(b"ha", OSError("the disk is full"))
    assert path.read_bytes() == b"whole"
    assert list(path.parent.iterdir()) == [path]


def test_those_not_asked_for_the_longest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate("abc"):
        kept.keep(name, PROGRAM)
        os.utime(kept.directory() / f"{name}.gz", (1e9 - age, 1e9 - age))
    size = (kept.directory() / "a.gz").stat().st_size
    monkeypatch.setattr(kept, "_MAX_BYTES", 3 * size)
    assert kept.find("c") is not None  # asked for just now
    kept.keep("d", PROGRAM)
    assert [name for name in "abcd" if kept.find(name)] == ["a", "c", "d"]


def test_a_kernel_is_the_same_program_in_every_command_and_checkout() -> None:
    tpu = AbstractDevice(device_kind="TPU v4", num_cores=2, platform="tpu")
    mesh = AbstractMesh((1,), ("y",), axis_types=(AxisType.Auto,), abstract_device=tpu)

    def lowered(depth: int, causal: bool = True) -> Any:
        if depth:
            return lowered(depth - 1, causal)
        x = jax.ShapeDtypeStruct((1, 128, 1, 128), jnp.bfloat16)
        segments = jnp.ones((1, 128), jnp.int32)
        attend = jax.jit(lambda x: fused_attend(x, x, x, segments, segments, causal=causal))
        with jax.sharding.use_abstract_mesh(mesh):
            return attend.trace(x).lower(lowering_platforms=("tpu",))

    here, deeper = lowered(0), lowered(3)
    assert "stable_mosaic" in kept.text_of(here)
    assert ".py" not in kept.text_of(here)  # which the bytecode of jax 0.10.2 has
    assert kept.text_of(here) == kept.text_of(deeper)
    assert kept.text_of(here) != kept.text_of(lowered(0, causal=False))


def test_a_scope_of_another_name_is_another_program() -> None:
    def text(name: str) -> str:
        return kept.text_of(jax.jit(lambda x: jax.named_scope(name)(jnp.sin)(x) + 1).lower(1.0))

    assert text("mlp.up") == text("mlp.up")
    assert text("mlp.up") != text("mlp.down")
