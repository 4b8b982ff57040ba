"""The examination finds planted faults, names them, and ends with an exit code that a script can use."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import doctor, doctor_machine, doctor_step
from launch.finding import FAIL, OK, WARN, Finding
from overlapfx.aot.program import Compute, Loop, Program, Start, Transfer, Wait
from overlapfx.config import MeshConfig

PROJECT = pathlib.Path(__file__).resolve().parent.parent
REQUIRED = {"jax": "0.10.2", "flax": "0.12"}


@pytest.mark.parametrize(
    ("installed", "sentence"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8"}, None),
        ({"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "flax": "0.12.12"}, None),
        ({"jax": "0.9.9", "jaxlib": "0.9.9", "flax": "0.12.8"}, "jax 0.9.9 is older than 0.10.2; install jax>=0.10.2."),
        ({"jax": "0.10.2", "jaxlib": "0.12.0", "flax": "0.12"}, "jax 0.10.2 and jaxlib 0.12.0 do not belong together"),
        ({"jax": "0.10.2", "jaxlib": "0.10.2", "flax": None}, "flax is missing; install flax>=0.12."),
    ],
)
def test_known_bad_versions(installed: dict, sentence: str | None) -> None:
    found = list(doctor_machine.bad_versions(installed, REQUIRED))
    assert (found == []) if sentence is None else (len(found) == 1 and found[0].startswith(sentence))


def test_what_the_project_declares_is_what_is_asked() -> None:
    required = doctor_machine._required()
    assert required["jax"] == "0.10.2" and "orbax-checkpoint" in required and "pytest" not in required
    assert [f.status for f in doctor_machine.versions()] in ([OK, OK], [OK, WARN])


def gradients(error: float) -> dict:
    return {"mlp": {"up": jnp.ones((4, 4)) * (1 + error), "down": jnp.arange(4.0)}, "unused": jnp.zeros(3)}


@pytest.mark.parametrize(("error", "status"), [(0, OK), (5e-5, OK), (1e-3, FAIL), (np.nan, FAIL), (np.inf, FAIL)])
def test_worst_leaf_is_named(error: float, status: str) -> None:
    one = jnp.ones(())
    found = doctor_step.compare_gradients("float32", (one, one, gradients(error)), (one, one, gradients(0)))
    assert found.status == status
    if error:
        assert "the worst leaf is mlp.up" in found.text


def test_a_gradient_where_there_should_be_none_is_a_fault() -> None:
    one = jnp.ones(())
    ours = gradients(0) | {"unused": jnp.full(3, 1e-9)}
    found = doctor_step.compare_gradients("float32", (one, one, ours), (one, one, gradients(0)))
    assert found.status == FAIL and "unused" in found.text


def site(name: str, planned: bool = True) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=name, plan=types.SimpleNamespace(slot="x" if planned else None))


def start(name: str, scope: str) -> Start:
    return Start(Transfer(name, f"jit(step)/{scope}/ppermute", "collective-permute", "ici", 8))


WORK = Compute("fusion", "jit(step)/mlp.up/dot", "einsum", 1, 0.0, 0.0)


def scheduling(*steps: object, backend: str = "tpu") -> Finding:
    return doctor_step.scheduling([site("mlp.up"), site("mlp.down")], Program("p", steps, 8, {}, {}), backend)


def test_c13_planned_but_not_scheduled_is_said() -> None:
    up, down = start("a", "mlp.up"), start("b", "mlp.down")
    good = scheduling(up, down, WORK, Wait("a", "a-done"), Wait("b", "b-done"))
    assert (good.status, "all 2 planned sites" in good.text) == (OK, True)
    half = scheduling(up, WORK, Wait("a", "a-done"), down, Wait("b", "b-done"))
    assert (half.status, half.text) == (WARN, "planned, not scheduled: mlp.down")
    none = scheduling(up, Wait("a", "a-done"), WORK, down, Wait("b", "b-done"))
    assert (none.status, none.text) == (FAIL, "planned, not scheduled: mlp.up, mlp.down")
    inside = scheduling(Loop("l", "scan", 3, (up, WORK, Wait("a", "a-done"), down, WORK, Wait("b", "b-done"))))
    assert inside.status == OK
    assert scheduling(backend="cpu").text.startswith("planned, not scheduled: mlp.up, mlp.down\nthe compiler for CPUs")
    nothing = doctor_step.scheduling([site("mlp.up", planned=False)], Program("p", (), 8, {}, {}), "tpu")
    assert nothing.status == OK and "nothing is decomposed" in nothing.text


def test_wrong_rings_are_found(monkeypatch) -> None:
    """A permute that fills all but one of its rings with zeros."""
    from overlapfx.ops import ring, selftest

    shift = ring.shift

    def broken(x: jax.Array, axes: tuple[str, ...], by: int) -> jax.Array:
        first = jax.lax.axis_index("y") == 0
        return jnp.where(first | (axes != ("x",)), shift(x, axes, by), 0)

    monkeypatch.setattr(selftest.ring, "shift", broken)
    config = types.SimpleNamespace(mesh=MeshConfig(y=2, x=4))
    (found,) = doctor_step.ring_self_test(config)
    assert found.status == FAIL
    assert "along x" in found.text and "instead of its neighbour's" in found.text


def test_the_wrong_number_of_devices_is_found() -> None:
    (found,) = doctor_machine.devices(types.SimpleNamespace(mesh=MeshConfig(y=2, x=2)))
    assert found.status == FAIL and "the mesh needs 4" in found.text


def test_memory_that_is_not_there_is_found() -> None:
    assert doctor_machine.memory_text(1 << 20, on_device=False)[0] == OK
    assert doctor_machine.memory_text(1 << 50, on_device=False)[0] == FAIL


def report(monkeypatch, capsys, findings: list) -> tuple[int, str]:
    def examine(*_: object):
        yield from doctor._examined("a check", lambda: iter_findings(findings))

    monkeypatch.setattr(doctor, "prepare", lambda *_: {})
    monkeypatch.setattr(doctor, "examine", examine)
    code = doctor.main(["--config=configs/gpt.py:tiny"])
    return code, capsys.readouterr().out


def iter_findings(findings: list):
    for found in findings:
        if isinstance(found, Exception):
            raise found
        yield found


def test_exit_code_and_report(monkeypatch, capsys) -> None:
    fine, look = Finding(OK, "a", "good\nindeed"), Finding(WARN, "b", "odd")
    code, out = report(monkeypatch, capsys, [fine, look])
    assert code == 0
    assert "[ ok ] a: good\n       indeed\n[look] b: odd\n1 fine, 1 to look at, 0 failed." in out
    code, out = report(monkeypatch, capsys, [fine, RuntimeError("the driver is gone")])
    assert code == doctor.FOUND_PROBLEMS
    assert "[FAIL] a check: RuntimeError: the driver is gone" in out


@pytest.mark.slow
def test_a_healthy_machine(tmp_path) -> None:
    small = {
        "d_model": 32,
        "num_layers": 2,
        "d_ff": 32,
        "seq_len": 32,
        "head_dim": 8,
        "num_heads": 4,
        "num_kv_heads": 4,
    }
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "doctor", "--config=configs/gpt.py:tiny", f"--run_dir={tmp_path / 'run'}"]
        + [f"--config.model.{name}={value}" for name, value in small.items()],
        cwd=PROJECT,
        env={k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("packages", "devices", "disk", "physical rings", "ring self-test", "gradients", "memory", "overlap"):
        assert f"[ ok ] {name}: " in done.stdout or f"[look] {name}: " in done.stdout, done.stdout
    assert "a ratio of" in done.stdout  # C14
    assert not (tmp_path / "run").exists()  # it looks, it does not write
