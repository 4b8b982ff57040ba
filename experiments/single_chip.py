"""Trains a GPT on one chip, to see what share of its arithmetic a step without communication uses.

    python -m experiments.single_chip                                     1 billion parameters on the GPU or TPU at hand
    python -m experiments.single_chip --config=configs/gpt.py:tiny        small enough for a CPU

That share is the ceiling of every larger run. Batches, step and clock are those of `overlapfx train`; nothing is saved
but the figures, which are appended to DIR/results.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import math
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from launch import environment
from launch.arguments import Parser, one_sentence, parse_overrides
from launch.config_file import load_config
from launch.sweep_machine import this_machine
from launch.sweep_store import Store
from overlapfx.chips import Chip, detect
from overlapfx.config import Config, from_config_dict, to_dict
from overlapfx.train.console import percent
from overlapfx.train.metrics import MetricsWriter, Utilization, read_metrics
from overlapfx.train.rundir import versions

if TYPE_CHECKING:
    import jax

PROG = "experiments.single_chip"
# Of these a median and quartiles are still worth something.
MIN_COUNTED = 4
# Float32 parameter, gradient and two moments, of each parameter.
STATE_BYTES = 16
ONE_DEVICE = ("mesh.y=1", "mesh.x=1", "mesh.replica=1")
# What a lowered program calls the kernels of overlapfx.layers, by the name of the attention that they make.
KERNELS = {"__cudnn$fmha": "cuDNN's kernels", "tpu_custom_call": "Pallas kernels"}
PLAIN = "plain products and softmax, no kernel"


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """The checked arguments, with the config on one device; a wrong one is a one-sentence error with exit code 2."""
    parser = Parser(
        prog=PROG,
        description="Trains a GPT on one chip and reports its utilization.",
        epilog="--config.FIELD=VALUE replaces one field of the config, for example --config.data.global_batch=8.",
    )
    parser.add_argument(
        "--config", default="configs/gpt.py:1B", metavar="FILE[:NAME]", help="what to train (default %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="steps to train (default %(default)s)")
    parser.add_argument(
        "--skip", type=int, default=5, metavar="N", help="first steps that do not count (default %(default)s)"
    )
    parser.add_argument("--peak-flops", type=float, metavar="FLOPS", help="FLOP/s of a device that is not known")
    parser.add_argument(
        "--out", type=pathlib.Path, default="runs/single_chip", metavar="DIR", help="results (default %(default)s)"
    )
    arguments, overrides = parse_overrides(parser, sys.argv[1:] if argv is None else argv)
    if arguments.skip < 1:
        parser.error(f"--skip is {arguments.skip}; skip at least 1 step, in which a device warms up.")
    if arguments.steps < arguments.skip + MIN_COUNTED:
        parser.error(
            f"--steps={arguments.steps} leaves {arguments.steps - arguments.skip} steps after --skip={arguments.skip}; "
            f"train at least {arguments.skip + MIN_COUNTED} steps."
        )
    peak = arguments.peak_flops
    if peak is not None and not (math.isfinite(peak) and peak > 0):
        parser.error(f"--peak-flops is {peak:g}; give FLOP/s of dense products, for example 989.4e12.")
    config = from_config_dict(load_config(arguments.config, [*ONE_DEVICE, *overrides]))
    if config.mesh.num_devices != 1:
        raise ValueError(f"the mesh has {config.mesh.num_devices} devices but one chip is measured; leave it at 1 x 1.")
    return arguments, config


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, prints and stores the figures; returns the exit code."""
    with one_sentence(PROG):  # around the run, too: it may not fit, or be faster than the peak that was given
        arguments, config = parse(argv)
        environment.prepare(1)
        with Store(arguments.out) as store:
            record = measure(config, arguments)
            if record is None:
                return _interrupted(store)
            store.add(record)
    print(describe(record), flush=True)
    print(f"Appended to {store.path}", flush=True)
    return 0


def _interrupted(store: Store) -> int:
    from overlapfx.train.stops import EXIT_INTERRUPTED

    print(f"{PROG}: interrupted; nothing was added to {store.path}.", file=sys.stderr)
    return EXIT_INTERRUPTED


def measure(config: Config, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """What the results hold about one run; None if it was interrupted. Raises ValueError if it does not fit."""
    import jax

    device = jax.devices()[0]
    utilization = _utilization(config, chip_of(device, arguments.peak_flops))
    metrics_file = arguments.out / "metrics.jsonl"
    try:
        attention, num_params, interrupted = _train(config, arguments.steps, utilization, metrics_file, device)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(does_not_fit(config, device, str(error))) from error
    if interrupted:
        return None
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    return {
        "key": f"{config.name} {device.device_kind} {now}",
        "time": now,
        "device_kind": device.device_kind,
        "platform": device.platform,
        "platform_version": device.client.platform_version,
        "attention": attention,
        "num_params": num_params,
        **summarise(read_metrics(metrics_file), arguments.skip, utilization),
        "peak_memory_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "versions": versions(),
        "config": to_dict(config),
    }


def chip_of(device: jax.Device, peak_flops: float | None) -> Chip | None:
    """What a device can do, as given or from the table, None if nobody knows: of a CPU no share is claimed."""
    if peak_flops is not None:
        return Chip(device.device_kind, peak_flops, None, None, None, None, 0, "given as --peak-flops")
    return detect(device)


def _utilization(config: Config, chip: Chip | None) -> Utilization:
    flops = importlib.import_module(f"models.{config.model.family}").step_flops(config.model, config.data.global_batch)
    return Utilization(flops.model, flops.hardware, 1, chip)


def _train(
    config: Config, num_steps: int, utilization: Utilization, metrics_file: pathlib.Path, device: jax.Device
) -> tuple[str, int, bool]:
    """Trains on one device without saving; returns how attention was computed, parameters, whether it was stopped."""
    from launch import session
    from overlapfx import mesh as meshes
    from overlapfx.train import loop
    from overlapfx.train.console import Console

    with contextlib.ExitStack() as opened:
        mesh = meshes.make_mesh(config.mesh, [device])
        model = session.make_model(config)
        require_room(config, device, STATE_BYTES * model.num_params(), "parameters, gradients and Adam's moments")
        inputs = session.open_inputs(config, mesh, opened)
        writer = MetricsWriter(metrics_file, about={"convention": utilization.convention()})
        opened.callback(writer.close)
        step = _Watched(session.make_step(config, mesh, model), config, device)
        _, summary = loop.run(
            state=session.initial_state(config, mesh, model),
            train_step=step,
            batches=inputs.batches,
            place=inputs.place,
            schedule=loop.Schedule(num_steps),
            log=loop.RunLog(writer, Console(num_steps), utilization),
        )
    return step.attention, model.num_params(), summary.interrupted


class _Watched:
    """A jitted step that remembers how its program computes attention, and is not run where there is no room for it."""

    def __init__(self, step: Any, config: Config, device: jax.Device) -> None:
        self._step, self._config, self._device = step, config, device
        self.attention = ""

    def lower(self, *operands: Any) -> _Watched:
        self._step = self._step.lower(*operands)
        self.attention = attention_in(self._step.as_text())
        return self

    def compile(self) -> Any:
        compiled = self._step.compile()
        # Accelerators refuse by themselves; a CPU takes what there is, until the system ends the process.
        require_room(self._config, self._device, compiled.memory_analysis().temp_size_in_bytes, "a step's temporaries")
        return compiled


def require_room(config: Config, device: jax.Device, needed_bytes: int, what: str) -> None:
    """Raises ValueError if a device has not as much free memory."""
    stats = device.memory_stats()
    free = stats["bytes_limit"] - stats["bytes_in_use"] if stats else this_machine().free_bytes
    if free is not None and needed_bytes > free:
        reason = f"{what} take {needed_bytes / 1e9:.3g} GB, {free / 1e9:.3g} GB are free"
        raise ValueError(does_not_fit(config, device, reason))


def attention_in(program: str) -> str:
    """How a lowered program computes attention."""
    return next((kernels for call, kernels in KERNELS.items() if call in program), PLAIN)


def summarise(records: Sequence[Mapping[str, Any]], skip: int, utilization: Utilization) -> dict[str, Any]:
    """Figures of the steps after the first `skip`; times in seconds, the rates those of the median step.

    records: of a metrics file; times and losses of all steps are kept.
    """
    steps = [record for record in records if record["kind"] == "train"]
    counted = [record for record in steps if record["step"] > skip]
    times_s = [record["step_s"] for record in counted]
    step_s = statistics.median(times_s)
    low, _, high = statistics.quantiles(times_s, n=4, method="inclusive")
    rates = utilization.rates(steps[-1]["step"], step_s)
    return {
        "skipped_steps": skip,
        "counted_steps": len(counted),
        "step_s": step_s,
        "step_s_quartiles": [low, high],
        "tokens_per_s": statistics.median(record["tokens"] for record in counted) / step_s,
        "model_tflops": rates.model_tflops_per_device,
        "mfu_percent": rates.mfu_percent,
        "hfu_percent": rates.hfu_percent,
        "peak_flops": None if utilization.chip is None else utilization.chip.peak_bf16_flops,
        "peak_source": None if utilization.chip is None else utilization.chip.source,
        "compile_s": next(record["compile_s"] for record in records if record["kind"] == "compile"),
        "step_times_s": [record["step_s"] for record in steps],
        "losses": [record["loss"] for record in steps],
    }


def describe(record: Mapping[str, Any]) -> str:
    """A record for a person."""
    low, high = record["step_s_quartiles"]
    lines = [
        f"{record['config']['name']}, {record['num_params'] / 1e9:.3g} billion parameters, on one "
        f"{record['device_kind']}; attention: {record['attention']}",
        f"median of {record['counted_steps']} steps after {record['skipped_steps']}: {record['step_s'] * 1e3:.2f} ms "
        f"(half of them {low * 1e3:.2f} to {high * 1e3:.2f}), {record['tokens_per_s']:,.0f} tokens/s, "
        f"{record['model_tflops']:.4g} TFLOP/s",
    ]
    if record["mfu_percent"] is not None:
        lines.append(
            f"MFU {percent(record['mfu_percent'])}, HFU {percent(record['hfu_percent'])} of "
            f"{record['peak_flops'] / 1e12:.4g} TFLOP/s ({record['peak_source']})"
        )
    elif record["platform"] == "cpu":
        lines.append("MFU n/a: a CPU shows that the command works, its time says nothing about an accelerator.")
    else:
        lines.append(
            f"MFU n/a: the peak of {record['device_kind']} is not known; give its dense FLOP/s in "
            f"{record['config']['model']['compute_dtype']} as --peak-flops=FLOPS."
        )
    return "\n".join(lines)


def does_not_fit(config: Config, device: jax.Device, reason: str) -> str:
    """The sentence about a step for which a device has no room."""
    return (
        f"{config.name} with {config.data.global_batch} sequences of {config.model.seq_len} tokens a step and "
        f"recomputation {config.model.remat} does not fit into the memory of one {device.device_kind} "
        f"({reason.splitlines()[0]}); lower --config.data.global_batch, set --config.model.remat=all or choose a "
        "smaller model with --config, for example configs/gpt.py:tiny."
    )


if __name__ == "__main__":
    sys.exit(main())
