"""One point of a sweep, planned for a slice or measured on the devices of this process."""

from __future__ import annotations

import gc
import importlib
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from launch import session
from launch.sweep_basis import code_hash
from overlapfx import chips
from overlapfx.aot import slices, variants
from overlapfx.aot.step_plan import DoesNotFit, Planner, StepPlan
from overlapfx.config import Config, from_config_dict
from overlapfx.train import loop, metrics, optimizer, state, step

_CODE = code_hash()  # of what this process has imported by now
_NUM_WARM_UP = 2  # the first steps allocate


def do(task: Mapping[str, Any]) -> dict[str, Any]:
    """The outcome of a task, as JSON values; seconds and bytes, memory of one device, None for what is not known.

    task: "config" (nested dicts), "target"; for a plan "assumed" and "flags", for a measurement "num_steps".
    "outcome" is "ok", "does not fit" or "error"; the last two have "why".
    """
    config = from_config_dict(task["config"])
    find = _measure if "num_steps" in task else _plan
    return {**outcome_of(lambda: find(config, task)), "code": _CODE}


def outcome_of(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `find` finds with its cost, or the "outcome" and "why" of what the compiler or the devices refuse."""
    begun = time.process_time()
    try:
        found = find()
    except DoesNotFit as error:
        found = {"outcome": "does not fit", "fits": False, "why": str(error)}
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        found = _failure(error)
    jax.clear_caches()
    gc.collect()
    return {**found, "cpu_s": round(time.process_time() - begun, 3), "peak_rss_bytes": _peak_rss_bytes()}


def _failure(error: Exception) -> dict[str, Any]:
    """What the compiler or the devices refuse; the first line of their many."""
    why = str(error).strip().splitlines()[0]
    if "RESOURCE_EXHAUSTED" in str(error):
        return {"outcome": "does not fit", "fits": False, "why": why}
    return {"outcome": "error", "why": f"{type(error).__name__}: {why}"}


def _plan(config: Config, task: Mapping[str, Any]) -> dict[str, Any]:
    family = importlib.import_module(f"models.{config.model.family}")
    planner = Planner.make(config, family, slices.parse_slice(task["target"]), task["assumed"])
    plan = planner.plan(variants.OURS, task["flags"])
    return {
        "outcome": "ok",
        "fits": plan.fits,
        **_rates(config, plan.step_s, planner.topology.num_chips),
        "mfu": plan.mfu,
        "hfu": plan.hfu,
        "communication_s": plan.timeline.communication_s,
        "communication_share": plan.timeline.communication_share,
        "memory_bytes": plan.compiled.memory.total,
        "hbm_bytes": plan.hbm_bytes,
        "step_s_by_link_factor": {f"{factor:g}": step_s for factor, step_s in plan.sensitivity},
        "sites": _sites(plan),
        "not_understood": sum(plan.timeline.unknown.values()),
        "max_hops": {report.axis: report.max_hops for report in planner.placement.reports},
        "compile_s": round(plan.compiled.compile_s, 3),
    }


def _sites(plan: StepPlan) -> dict[str, int]:
    """How many sites are in which state: planned, scheduled."""
    states = [site.state for site in plan.sites]
    return {name: states.count(name) for name in dict.fromkeys(states)}


def _rates(config: Config, step_s: float, num_chips: int) -> dict[str, Any]:
    tokens_per_s = config.data.global_batch * config.model.seq_len / step_s
    return {
        "step_s": step_s,
        "num_chips": num_chips,
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_chip": tokens_per_s / num_chips,
    }


def _measure(config: Config, task: Mapping[str, Any]) -> dict[str, Any]:
    """Real steps on made-up tokens: speed does not depend on them."""
    num_steps = task["num_steps"]
    family = importlib.import_module(f"models.{config.model.family}")
    mesh = session.make_mesh(config)
    model = session.make_model(config)
    adam = optimizer.make_optimizer(config.optimizer, config.train.num_steps)
    first = state.init_state(mesh, model, adam, config.seed)
    batch = loop.to_global(_made_up(config, family.objective(config.model).fields), mesh, step.batch_spec(mesh))
    begun = time.perf_counter()
    compiled = session.make_step(config, mesh, model).lower(first, batch).compile()
    compile_s = time.perf_counter() - begun
    times_s = _time_steps(compiled, first, batch, num_steps)
    step_s = statistics.median(times_s)
    chip = _chip(config)
    flops = family.step_flops(config.model, config.data.global_batch)
    rates = metrics.Utilization(flops.model, flops.hardware, mesh.size, chip).rates(num_steps, step_s)
    memory = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "outcome": "ok",
        "fits": True,
        **_rates(config, step_s, mesh.size),
        "mfu": None if rates.mfu_percent is None else rates.mfu_percent / 100,
        "hfu": None if rates.hfu_percent is None else rates.hfu_percent / 100,
        "communication_s": None,
        "communication_share": None,
        "memory_bytes": kept + memory.temp_size_in_bytes,
        "hbm_bytes": None if chip is None else chip.hbm_bytes,
        "step_s_min": min(times_s),
        "step_s_max": max(times_s),
        "compile_s": round(compile_s, 3),
    }


def _time_steps(compiled: Any, current: state.TrainState, batch: Any, num_steps: int) -> list[float]:
    """Seconds of each step, from the end of the one before to its own end."""
    timer = metrics.StepTimer()
    times_s = []
    for number in range(_NUM_WARM_UP + num_steps):
        if number == _NUM_WARM_UP:
            timer.start()
        current, results = compiled(current, batch)
        jax.block_until_ready((current, results))
        if number >= _NUM_WARM_UP:
            times_s.append(timer.lap())
    return times_s


_chips: dict[str, chips.Chip | None] = {}


def _chip(config: Config) -> chips.Chip | None:
    """One chip for all points of this process, so that a CPU is measured once per dtype."""
    dtype = config.model.compute_dtype
    if dtype not in _chips:
        _chips[dtype] = session.chip_of(config)
    return _chips[dtype]


def _made_up(config: Config, fields: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """A batch of the model's `fields`: random tokens in one text per row, all of which count."""
    rng = np.random.default_rng(config.seed)
    batch = {}
    for name, field in fields.items():
        shape, dtype = (config.data.global_batch, *field.shape), field.dtype
        is_tokens = np.issubdtype(dtype, np.integer) and name != "segments"
        batch[name] = rng.integers(0, config.model.vocab_size, shape, dtype) if is_tokens else np.ones(shape, dtype)
    return batch


def _peak_rss_bytes() -> int:
    """The most memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB but for macOS
