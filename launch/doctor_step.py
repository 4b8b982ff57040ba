"""What an examination asks of the first step: rings, gradients with and without overlap, what was scheduled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from launch import session
from launch.doctor_machine import memory_text
from launch.finding import FAIL, OK, WARN, Finding
from overlapfx.aot.device_order import physical_placement
from overlapfx.aot.hlo import parse_module
from overlapfx.aot.lowering import lower
from overlapfx.aot.program import Branch, Compute, Loop, Program, Start, Step, Wait
from overlapfx.aot.sites import NOT_SCHEDULED, scope_pattern
from overlapfx.config import Config
from overlapfx.ops.selftest import check_rings
from overlapfx.plan.decide import CallSite, record_sites
from overlapfx.train import step
from overlapfx.train.names import leaf_names

# Norm of the difference over the norm, by leaf: what another order of summation explains.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# Temporaries with overlap over those without: the pieces and sums of a site live at the same time as its operands.
MAX_MEMORY_RATIO = 2.0


def physical_rings(config: Config) -> Iterator[Finding]:
    """How the axes lie on the network."""
    found = physical_placement(jax.devices(), config.mesh)
    if found is None:
        text = "no torus that this program knows: neighbours on the mesh may be any number of hops apart"
        simulated = jax.default_backend() == "cpu"
        yield Finding(
            OK if simulated else WARN, "physical rings", "simulated devices, no network" if simulated else text
        )
        return
    for number, (_, placement) in enumerate(found):
        name = "physical rings" if len(found) == 1 else f"physical rings of slice {number}"
        broken = [report.axis for report in placement.reports if report.size > 1 and not report.is_cycle]
        yield Finding(WARN if broken else OK, name, "\n".join(map(str, placement.reports)))


def ring_self_test(config: Config) -> Iterator[Finding]:
    """Whether shifts along every axis arrive at the neighbour."""
    mesh = session.make_mesh(config)
    try:
        check_rings(mesh)
    except RuntimeError as error:
        yield Finding(FAIL, "ring self-test", str(error))
        return
    yield Finding(OK, "ring self-test", f"every shift arrives, along {', '.join(mesh.axis_names)} and all of them")


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """The gradients of one program, with what was decided while it was traced."""

    run: Any
    sites: tuple[CallSite, ...]

    @functools.cached_property
    def memory(self) -> Any:
        return self.run.memory_analysis()

    @property
    def total_bytes(self) -> int:
        m = self.memory
        return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def first_step(config: Config) -> Iterator[Finding]:
    """The gradients of the first batch, overlapped against plain; memory; what the compiler scheduled."""
    mesh = session.make_mesh(config)
    with contextlib.ExitStack() as opened:
        inputs = session.open_inputs(config, mesh, opened)
        batch = inputs.place(next(inputs.batches))
    first = session.initial_state(config, mesh, session.make_model(config))
    key = jax.random.fold_in(first.key, 0) if config.model.dropout > 0 else None
    arguments = (first.params, batch, key)
    ours = _compile(config, mesh, arguments)
    off = dataclasses.replace(config.overlap, mode="off", scheduler="compiler", sites={})
    plain = _compile(dataclasses.replace(config, overlap=off), mesh, arguments)
    yield compare_gradients(config.model.compute_dtype, ours.run(*arguments), plain.run(*arguments))
    yield _memory_ratio(ours, plain)
    per_device = jax.default_backend() != "cpu"
    status, text = memory_text(ours.total_bytes * (1 if per_device else mesh.size), per_device)
    yield Finding(status, "memory", f"gradients take {text}")
    yield scheduling(ours.sites, lower(parse_module(ours.run.as_text())), jax.default_backend())


def _compile(config: Config, mesh: Mesh, arguments: tuple[Any, ...]) -> _Compiled:
    gradients = step.make_gradients(
        mesh,
        session.make_model(config),
        grad_accum=config.optimizer.grad_accum,
        scheduler=config.overlap.scheduler,
    )
    with record_sites() as sites:
        compiled = gradients.lower(*arguments).compile(session.compiler_options(mesh))
    return _Compiled(compiled, tuple(dict.fromkeys(sites)))


def compare_gradients(compute_dtype: str, ours: tuple[Any, Any, Any], plain: tuple[Any, Any, Any]) -> Finding:
    """The largest difference between the gradients (loss, count, tree) of two programs, with the name of its leaf."""
    distances = jax.tree.map(np.asarray, jax.jit(_distances)(ours[2], plain[2]))
    worst, where = max(zip(distances, leaf_names(plain[2]), strict=True), key=lambda found: _order(found[0]))
    loss, plain_loss = (
        float(np.asarray(total)) / max(float(np.asarray(count)), 1.0) for total, count, _ in (ours, plain)
    )
    tolerance = TOLERANCE[compute_dtype]
    text = (
        f"overlapped against plain: the worst leaf is {where}, {worst:.2g} of its norm apart (at most {tolerance:g} "
        f"in {compute_dtype}); loss {loss:.6g} against {plain_loss:.6g}"
    )
    return Finding(OK if worst <= tolerance else FAIL, "gradients", text)


def _distances(ours: Any, plain: Any) -> jax.Array:
    def distance(a: jax.Array, b: jax.Array) -> jax.Array:
        apart, norm = jnp.linalg.norm((a - b).ravel()), jnp.linalg.norm(b.ravel())
        # A leaf without a gradient must have none in the other program either.
        return jnp.where(norm > 0, apart / norm, jnp.where(apart > 0, jnp.inf, 0.0))

    return jnp.stack([distance(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True)])


def _order(distance: float) -> float:
    return float("inf") if np.isnan(distance) else float(distance)


def _memory_ratio(ours: _Compiled, plain: _Compiled) -> Finding:
    with_overlap, without = ours.memory.temp_size_in_bytes, plain.memory.temp_size_in_bytes
    ratio = with_overlap / max(without, 1)
    text = (
        f"{with_overlap / 1e6:.3g} MB of temporaries per device with overlap, {without / 1e6:.3g} MB without: a ratio "
        f"of {ratio:.2f} (at most {MAX_MEMORY_RATIO:g} is expected)"
    )
    return Finding(OK if ratio <= MAX_MEMORY_RATIO else WARN, "memory of overlap", text)


def scheduling(sites: Sequence[CallSite], program: Program, backend: str) -> Finding:
    """Whether work runs between the start and the end of the transfers of every site that was planned."""
    planned = list(dict.fromkeys(site.name for site in sites if site.plan.slot is not None))
    if not planned:
        return Finding(OK, "overlap", "nothing is decomposed: there is nothing to schedule")
    scopes = [start.transfer.op_name for start, has_work in _transfers(program.steps) if has_work]
    hidden = {name for name in planned if any(scope_pattern(name).search(scope) for scope in scopes)}
    missing = [name for name in planned if name not in hidden]
    if not missing:
        return Finding(OK, "overlap", f"all {len(planned)} planned sites have work between start and end of a transfer")
    text = f"{NOT_SCHEDULED}: {', '.join(missing)}"
    if backend == "cpu":
        return Finding(
            OK, "overlap", f"{text}\nthe compiler for CPUs has no asynchronous transfers, so this is expected here"
        )
    return Finding(FAIL if len(missing) == len(planned) else WARN, "overlap", text)


def _transfers(steps: Sequence[Step]) -> Iterator[tuple[Start, bool]]:
    """Every asynchronous transfer, with whether anything is computed before the program waits for it."""
    open_ones: dict[str, tuple[Start, bool]] = {}
    for current in steps:
        if isinstance(current, Start):
            open_ones[current.transfer.name] = (current, False)
        elif isinstance(current, Wait) and current.key in open_ones:
            yield open_ones.pop(current.key)
        elif isinstance(current, Compute | Loop | Branch):
            open_ones = {key: (start, True) for key, (start, _) in open_ones.items()}
        if isinstance(current, Loop):
            yield from _transfers(current.body)
        elif isinstance(current, Branch):
            for alternative in current.alternatives:
                yield from _transfers(alternative)
    yield from open_ones.values()
