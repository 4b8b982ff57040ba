"""Trains a model: the whole path from a config file to a report."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.arguments import config_parser, one_sentence, parse
from launch.distributed import join
from launch.environment import prepare
from launch.identity import identify
from overlapfx.config import Config
from overlapfx.train.preemption import StopOnSignal
from overlapfx.train.stops import RunStopped

SWITCHES = {
    "--check-replicas": "compare all copies of the state before each save",
    "--use-older-checkpoint": "where the newest checkpoint is damaged, set it aside and resume from one before it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the arguments, sets the environment, trains; the exit code is 2 for an error of the user's."""
    parser = config_parser("train", "Train a model.")
    parser.add_argument(
        "--run_dir",
        metavar="DIR",
        help="where results go (default: runs/NAME); an existing run with this config is resumed",
    )
    for name, what in SWITCHES.items():
        parser.add_argument(name, action="store_true", help=what)
    with one_sentence(parser.prog):
        arguments, config = parse(parser, sys.argv[1:] if argv is None else argv)
        prepare(config.mesh.num_devices // identify(os.environ).count, arguments.devices)
    try:
        return train(config, Path(arguments.run_dir or f"runs/{config.name}"), arguments)
    except RunStopped as reason:
        print(f"{parser.prog}: {reason}", file=sys.stderr, flush=True)
        return reason.exit_code


def train(config: Config, run_path: Path, arguments: argparse.Namespace) -> int:
    """The plain path: config -> mesh -> model -> state -> step -> loop -> report; returns the exit code."""
    with contextlib.ExitStack() as opened:
        stop = opened.enter_context(StopOnSignal())
        with one_sentence("overlapfx train"):
            peers = opened.enter_context(join(config, identify(os.environ), os.environ, lambda: stop.name is not None))
        # JAX starts here, after the environment is set.
        from launch import session
        from overlapfx.train import loop, replicas, step

        with one_sentence("overlapfx train"):  # what the user can mend, before anything is compiled or overwritten
            with peers.together("opening data and run directory"):
                mesh = session.make_mesh(config)
                model = session.make_model(config)
                inputs = session.open_inputs(config, mesh, opened)
                run = opened.enter_context(session.open_run(config, run_path))
            peers.check_shared(run.path)
            checkpoints = opened.enter_context(session.open_checkpoints(config, run))
            train_state, start_step = session.first_state(
                config, mesh, model, checkpoints, inputs, fall_back=arguments.use_older_checkpoint
            )
        chip = session.chip_of(config)
        log = session.open_log(config, mesh, model, chip, run, checkpoints, inputs, start_step, opened)
        watchdog = opened.enter_context(session.open_watchdog(config, run, log))
        train_state, summary = loop.run(
            state=train_state,
            train_step=peers.agreeing(session.make_step(config, mesh, model)),
            batches=inputs.batches,
            place=inputs.place,
            schedule=loop.Schedule(config.train.num_steps, config.train.eval_every, config.train.checkpoint_every),
            log=log,
            start_step=start_step,
            eval_fn=loop.make_eval_fn(step.make_eval_step(mesh, model), inputs.eval_batches, inputs.place, watchdog),
            checkpointer=checkpoints,
            check=replicas.check_replicas if arguments.check_replicas else None,
            stop=stop,
            watchdog=watchdog,
        )
        session.report(config, mesh, model, chip, run, train_state, summary)
    return summary.exit_code


if __name__ == "__main__":
    sys.exit(main())
