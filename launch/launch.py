"""Starts a training job: on a TPU slice by GKE or Cloud TPU VMs, or as several processes on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from launch import cloud_tpu, commands, flags, gke, job, local
from launch import plan as planning
from launch.accelerators import CloudSlice
from launch.arguments import Parser, config_parser, one_sentence, parse_overrides
from launch.commands import Command, CommandFailed
from launch.config_file import load_config
from launch.identity import STARTUP_TIMEOUT_S
from launch.train import SWITCHES
from overlapfx.aot import slices, variants
from overlapfx.config import Config, from_config_dict

SUBMISSION_FAILED = 1  # exit code
_COMMAND_S = 600.0  # for one command to finish
_POLL_S = 15.0
_END = "END_OF_MANIFEST"


def main(argv: Sequence[str] | None = None) -> int:
    """Checks the arguments, plans, shows or submits; returns 2 for an error of the user's, 3 if it does not fit.

    A local run returns what its processes return.
    """
    parser = config_parser("launch", "Start training on a TPU slice, or as several processes on this machine.", False)
    _add_arguments(parser)
    with one_sentence(parser.prog):
        arguments, overrides = parse_overrides(parser, sys.argv[1:] if argv is None else argv)
        config = from_config_dict(load_config(arguments.config, overrides))
        words = (
            f"--config={arguments.config}",
            *(f"--config.{override}" for override in overrides),
            *_train_switches(arguments.train),
        )
        settings = flags.place(variants.parse_settings("--flag", arguments.flag))
        if arguments.local:
            local.check(config, arguments.processes, arguments.devices_per_process)
            command, environs = _local(arguments, words, settings)
    if arguments.local:
        return _run_locally(arguments, command, environs)
    with one_sentence(parser.prog):
        submitted, hints, topology = _prepare(config, arguments, words, settings)
        if not arguments.dry_run:
            commands.require_programs(submitted)
        slices.require_compiler()
    if code := _plan(config, topology, settings):
        print(f"{parser.prog}: {config.name} does not fit on {topology}; nothing was submitted.", file=sys.stderr)
        return code
    if arguments.dry_run:
        _show(submitted)
        return 0
    return _submit(submitted, hints, arguments)


def _add_arguments(parser: Parser) -> None:
    add = parser.add_argument
    road = parser.add_mutually_exclusive_group(required=True)
    road.add_argument("--gke", action="store_true", help="as a JobSet on Google Kubernetes Engine")
    road.add_argument("--cloud-tpu", action="store_true", help="as a queued resource of Cloud TPU VMs")
    road.add_argument("--local", action="store_true", help="as processes on this machine, on CPU devices")
    add("--dry-run", action="store_true", help="plan, then show what would be submitted, byte for byte")
    add("--flag", action="append", default=[], metavar="NAME=VALUE", help="a compiler flag; its variable is known")
    add(
        "--train",
        action="append",
        default=[],
        metavar="SWITCH",
        help="a switch of overlapfx train, for example --train=--check-replicas",
    )
    add("--run_dir", metavar="DIR", help="where results go (default: MOUNT/NAME, or runs/NAME with --local)")
    add(
        "--startup-timeout",
        type=float,
        default=STARTUP_TIMEOUT_S,
        metavar="SECONDS",
        help="how long the processes wait for each other at the start (default: %(default)g)",
    )
    add("--processes", type=int, default=2, metavar="N", help="with --local (default: %(default)s)")
    add("--devices-per-process", type=int, default=4, metavar="N", help="with --local (default: %(default)s)")
    cloud = parser.add_argument_group("on a TPU slice")
    add = cloud.add_argument
    add("--topology", metavar="SLICE", help="for example v4:4x4x4, v5e:16x16, v5p:4x4x4,slices=2")
    add("--project", metavar="ID", help="the Google Cloud project")
    add("--zone", metavar="ZONE", help="where the TPUs are; with --gke where the cluster is, which may be a region")
    add("--image", metavar="IMAGE", help="a container image in which overlapfx and the config file are installed")
    add("--mount", metavar="DIR", help="the directory that all hosts share, where runs are kept")
    add("--name", metavar="NAME", help="of the job (default: the name of the config)")
    add("--spot", action="store_true", help="capacity that may be preempted")
    add("--reserved", action="store_true", help="with --cloud-tpu: capacity of a reservation")
    add("--max-restarts", type=int, default=10, metavar="N", help="after failures (default: %(default)s)")
    add("--grace", type=int, default=job.GRACE_S, metavar="SECONDS", help="to save when stopped (default: %(default)s)")
    add("--wait", type=float, default=24.0, metavar="HOURS", help="with --cloud-tpu: for capacity (default: 24)")
    add("--cluster", metavar="NAME", help="with --gke: the cluster")
    add("--claim", metavar="NAME", help="with --gke: the persistent volume claim behind --mount")
    add("--namespace", default="default", metavar="NAME", help="with --gke (default: %(default)s)")


def _train_switches(given: Sequence[str]) -> Sequence[str]:
    """`given`; raises ValueError unless all are switches of `overlapfx train`."""
    for word in given:
        if word not in SWITCHES:
            raise ValueError(f"--train is {word!r}; it must be one of {', '.join(SWITCHES)}.")
    return given


def _prepare(
    config: Config, arguments: argparse.Namespace, words: tuple[str, ...], settings: dict[str, str]
) -> tuple[list[Command], list[Command], slices.Slice]:
    """The commands that submit, those that follow up, the slice; everything checked that can be checked here."""
    text = job.require("--topology", arguments.topology, "the slice, for example v4:4x4x4")
    topology = slices.parse_slice(text)
    cloud_slice = CloudSlice(topology)
    job.check_fills(config, cloud_slice)
    project, zone = job.project(arguments.project), job.zone(arguments.zone, regions=arguments.gke)
    name = job.job_name("--name", arguments.name or config.name.lower().replace("_", "-").replace(".", "-"))
    mount, run_dir = job.shared_directory(arguments.mount, arguments.run_dir, name)
    for option, value in (("--max-restarts", arguments.max_restarts), ("--grace", arguments.grace)):
        if value < 0:
            raise ValueError(f"{option} is {value}; it must be 0 or more.")
    _check_positive(arguments)
    made = job.Job(
        name=name,
        topology=cloud_slice,
        image=job.image(arguments.image),
        train_arguments=words,
        mount=mount,
        run_dir=run_dir,
        # On a host without a TPU JAX would go on with the CPU.
        variables={"JAX_PLATFORMS": "tpu,cpu", **settings},
        spot=arguments.spot,
        max_restarts=arguments.max_restarts,
        grace_s=arguments.grace,
        timeout_s=arguments.startup_timeout,
    )
    if arguments.cloud_tpu:
        submitted = cloud_tpu.commands(made, project=project, zone=zone, reserved=arguments.reserved)
        return submitted, cloud_tpu.hints(made, project=project, zone=zone), topology
    if arguments.reserved:
        raise ValueError("--reserved belongs to --cloud-tpu; with --gke the node pool uses the reservation.")
    gke.check(made)
    place = {
        "project": project,
        "zone": zone,
        "cluster": job.job_name("--cluster", job.require("--cluster", arguments.cluster, "the name of the cluster")),
        "namespace": job.job_name("--namespace", arguments.namespace),
    }
    claim = job.job_name("--claim", job.require("--claim", arguments.claim, "the claim of the shared volume"))
    return gke.commands(made, claim, **place), gke.hints(made, **place), topology


def _check_positive(arguments: argparse.Namespace) -> None:
    for option, value in (("--startup-timeout", arguments.startup_timeout), ("--wait", arguments.wait)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{option} is {value:g}; it must be more than 0.")


def _plan(config: Config, topology: slices.Slice, settings: dict[str, str]) -> int:
    """Prints the full plan with the compiler flags of the job; 0 if the step fits."""
    chosen = flags.parse(flags.LIBTPU, settings.get(flags.LIBTPU, ""))
    # Flags of the runtime between slices are not the compiler's.
    options = {name: value for name, value in chosen.items() if name.startswith("xla_")}
    slices.prepare_environment()
    parser = Parser()
    planning.add_arguments(parser)
    defaults = parser.parse_args([f"--topology={topology}"])
    return planning.plan(config, topology, (variants.OURS,), options, {}, defaults)


def _show(submitted: Sequence[Command]) -> None:
    print("\n# What would be submitted (--dry-run):")
    for command in submitted:
        if command.until:
            print(f"# again and again, until it prints {command.until[0]}:")
        if command.stdin:
            print(f"{command.shown()} <<'{_END}'\n{command.stdin}{_END}")
        else:
            print(command.shown())


def _submit(submitted: Sequence[Command], hints: Sequence[Command], arguments: argparse.Namespace) -> int:
    follow, remove = (command.shown() for command in hints)
    try:
        commands.run_all(
            submitted,
            timeout_s=_COMMAND_S,
            wait_s=arguments.wait * 3600,
            poll_s=_POLL_S,
            say=lambda text: print(text, flush=True),
        )
    except CommandFailed as error:
        print(f"overlapfx launch: {error}", file=sys.stderr)
        print(f"overlapfx launch: what exists by now is removed by: {remove}", file=sys.stderr)
        return SUBMISSION_FAILED
    print(f"Submitted.\n  follow it: {follow}\n  end it:    {remove}")
    return 0


def _local(
    arguments: argparse.Namespace, words: tuple[str, ...], settings: dict[str, str]
) -> tuple[list[str], list[dict[str, str]]]:
    """The command of every process of a local run, with the environment of each."""
    _check_positive(arguments)
    if flags.LIBTPU in settings:
        raise ValueError(
            f"--flag has {settings[flags.LIBTPU]}, which the compiler for CPUs does not know; leave it out."
        )
    command = [sys.executable, "-m", "launch.train", *words]
    if arguments.run_dir:
        command.append(f"--run_dir={arguments.run_dir}")
    both = f"{os.environ.get(flags.XLA, '')} {settings.get(flags.XLA, '')}".strip()
    environ = {**os.environ, flags.XLA: both}
    flags.check(environ)
    environs = local.environments(
        arguments.processes, arguments.devices_per_process, arguments.startup_timeout, local.free_port(), environ
    )
    return command, environs


def _run_locally(arguments: argparse.Namespace, command: list[str], environs: list[dict[str, str]]) -> int:
    if not arguments.dry_run:
        return local.run(command, environs)
    for environ in environs:
        _show([Command(("env", *(f"{k}={v}" for k, v in environ.items() if os.environ.get(k) != v), *command))])
    return 0


if __name__ == "__main__":
    sys.exit(main())
