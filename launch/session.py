"""The parts that the plain path of `launch.train` puts together, each made from the config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from launch import flags
from overlapfx import chips
from overlapfx import mesh as meshes
from overlapfx.aot.device_order import physical_order
from overlapfx.aot.variants import OURS
from overlapfx.config import Config
from overlapfx.ops import order
from overlapfx.ops.selftest import check_rings
from overlapfx.train import data, loop, metrics, optimizer, sample, state, step
from overlapfx.train.checkpoint import Checkpointer
from overlapfx.train.console import Console
from overlapfx.train.feeding import process_share
from overlapfx.train.guard import Guard
from overlapfx.train.report import count, write_report
from overlapfx.train.rundir import RunDir
from overlapfx.train.watchdog import Watchdog


def _family(config: Config) -> Any:
    return importlib.import_module(f"models.{config.model.family}")


def _is_primary() -> bool:
    return jax.process_index() == 0


def make_mesh(config: Config) -> Mesh:
    """The mesh over every device of the run, on a TPU in the order that plans assume."""
    devices = jax.devices()
    ordered = physical_order(devices, config.mesh)
    return meshes.make_mesh(config.mesh, devices if ordered is None else ordered, arrange=ordered is None)


def make_model(config: Config) -> state.Model:
    """The model of the config, without a parameter allocated."""
    return state.describe(_family(config).build(config.model, config.overlap))


def open_run(config: Config, path: Path) -> RunDir:
    """The run directory, new or resumed; a context manager."""
    return RunDir(path, config, primary=_is_primary())


def open_checkpoints(config: Config, run: RunDir) -> Checkpointer:
    """The checkpoints of a run; a context manager."""
    # Before Orbax raises an error it logs it, with the traceback of each of its threads; one sentence is enough.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return Checkpointer(run.checkpoint_dir, config.train.checkpoint_keep)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the loop reads: this process's share of every batch, and how a batch is laid over the mesh.

    skipped: a sentence for every record that cannot be read.
    """

    batches: data.BatchStream
    eval_batches: Callable[[], Iterator[data.Batch]]
    place: Callable[[Any], Any]
    skipped: tuple[str, ...]


def open_inputs(config: Config, mesh: Mesh, opened: contextlib.ExitStack) -> Inputs:
    """Training and evaluation batches of the config's data set."""
    objective = _family(config).objective(config.model)
    training, validation = (
        data.make_source(config.data, split, objective.sample_rate) for split in ("train", "validation")
    )
    share, num_shares = process_share(jax.NamedSharding(mesh, step.batch_spec(mesh)), config.data.global_batch)
    shape: dict[str, Any] = {
        "objective": objective,
        "global_batch": config.data.global_batch,
        "process_index": share,
        "process_count": num_shares,
    }
    stream = data.BatchStream(training, seed=config.data.seed, num_workers=config.data.num_workers, **shape)
    return Inputs(
        batches=opened.enter_context(stream),
        eval_batches=lambda: data.eval_batches(validation, num_batches=config.train.eval_batches, **shape),
        place=functools.partial(loop.to_global, mesh=mesh, spec=step.batch_spec(mesh)),
        skipped=(*training.skipped, *validation.skipped),
    )


def make_optimizer(config: Config) -> Any:
    """The optimizer of the config."""
    return optimizer.make_optimizer(config.optimizer, config.train.num_steps)


def initial_state(config: Config, mesh: Mesh, model: state.Model) -> state.TrainState:
    """The state before the first step."""
    return state.init_state(mesh, model, make_optimizer(config), config.seed)


def first_state(
    config: Config, mesh: Mesh, model: state.Model, checkpoints: Checkpointer, inputs: Inputs, *, fall_back: bool
) -> tuple[state.TrainState, int]:
    """The newest checkpoint's state, with the data put where it was, or initial values; and the steps behind it."""
    check_rings(mesh)
    abstract = state.abstract_state(mesh, model, make_optimizer(config), config.seed)
    found = checkpoints.restore_newest(abstract, fall_back=fall_back)
    if found is None:
        return initial_state(config, mesh, model), 0
    latest, restored, position = found
    inputs.batches.set_state(position)
    return restored, latest


def make_step(config: Config, mesh: Mesh, model: state.Model) -> Any:
    """The jitted training step."""
    return step.make_train_step(
        mesh,
        model,
        make_optimizer(config),
        optimizer.make_schedule(config.optimizer, config.train.num_steps),
        grad_accum=config.optimizer.grad_accum,
        dropout=config.model.dropout > 0,
        scheduler=config.overlap.scheduler,
        compiler_options=compiler_options(mesh),
    )


def _overlap(config: Config) -> str:
    """The mode, and who orders the instructions if that is not the compiler."""
    scheduler = config.overlap.scheduler
    return config.overlap.mode + ("" if scheduler == "compiler" else f" in the order of {order.describe(scheduler)}")


def compiler_options(mesh: Mesh) -> dict[str, Any] | None:
    """On TPUs the options that plans of this program are made with; other compilers know none of them."""
    return dict(OURS.options) if mesh.devices.flat[0].platform == "tpu" else None


def chip_of(config: Config) -> chips.Chip | None:
    """What one device can do: from the table, measured on a CPU, None for an accelerator that the table lacks."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return chips.measure_cpu_peak(config.model.compute_dtype, jax.device_count())
    return chips.detect(device)


def open_log(
    config: Config,
    mesh: Mesh,
    model: state.Model,
    chip: chips.Chip | None,
    run: RunDir,
    checkpoints: Checkpointer,
    inputs: Inputs,
    start_step: int,
    opened: contextlib.ExitStack,
) -> loop.RunLog:
    """Metrics on disk and on the console; says first what run this is."""
    flops = _family(config).step_flops(config.model, config.data.global_batch)
    utilization = metrics.Utilization(flops.model, flops.hardware, mesh.size, chip)
    writer = metrics.MetricsWriter(
        run.metrics_file,
        run.tensorboard_dir,
        from_step=start_step,
        about={
            "mesh": _axes(mesh),
            "convention": utilization.convention(),
            "chip": chip.name if chip else None,
            **flags.final(),
        },
        primary=_is_primary(),
    )
    opened.callback(writer.close)
    console = Console(config.train.num_steps, config.train.log_every, primary=_is_primary())
    begins = f"resumes after step {start_step}" if start_step else "starts"
    console.note(
        f"{config.name} {begins} in {run.path}: {count(model.num_params())} parameters, mesh {_axes(mesh)}, "
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}, overlap {_overlap(config)}, "
        f"{config.model.compute_dtype} compute, data {config.data.name}"
    )
    for note in (*run.notes, *checkpoints.skipped, *inputs.skipped):
        console.note(note)
    writer.write("data", start_step, skipped_records=len(inputs.skipped))
    guard = Guard(model.names(), config.train.max_skipped_steps)
    return loop.RunLog(writer, console, utilization, guard=guard)


def open_watchdog(config: Config, run: RunDir, log: loop.RunLog) -> Watchdog:
    """Ends this process if a step does not finish in time, and marks the run; a context manager."""
    return Watchdog(config.train.step_timeout_s, run.path, process=jax.process_index(), on_hang=log.hung)


def _axes(mesh: Mesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())


def report(
    config: Config,
    mesh: Mesh,
    model: state.Model,
    chip: chips.Chip | None,
    run: RunDir,
    final: state.TrainState,
    summary: loop.Summary,
) -> None:
    """Draws the run's picture and prints a sample of text; an interrupted run has neither yet."""
    if summary.interrupted:
        return
    text = ""
    if config.sample.num_tokens:
        tokens = sample.generate(
            mesh,
            model,
            final.params,
            np.concatenate([[data.SEPARATOR], data.encode(config.sample.prompt)]).astype(np.int32),
            num_tokens=config.sample.num_tokens,
            seq_len=config.model.seq_len,
            temperature=config.sample.temperature,
            key=jax.random.key(config.seed),
        )
        text = config.sample.prompt + data.decode(tokens)
    if not _is_primary():
        return
    if text:
        print(f"\nSample at temperature {config.sample.temperature}:\n{text}\n", flush=True)
    write_report(
        run.metrics_file,
        run.report_file,
        name=config.name,
        num_params=model.num_params(),
        mesh=dict(mesh.shape),
        chip=chip.name if chip else None,
    )
    print(f"Picture: {run.report_file}", flush=True)
