"""Trains a model: the whole path from a config file to a report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.arguments import config_parser, one_sentence, parse
from launch.environment import prepare
from overlapfx.config import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the arguments, sets the environment, trains; the exit code is 2 for an error of the user's."""
    parser = config_parser("train", "Train a model.")
    parser.add_argument(
        "--run_dir",
        metavar="DIR",
        help="where results go (default: runs/NAME); an existing run with this config is resumed",
    )
    with one_sentence(parser.prog):
        arguments, config = parse(parser, sys.argv[1:] if argv is None else argv)
        prepare(config.mesh.num_devices, arguments.devices)
    return train(config, Path(arguments.run_dir or f"runs/{config.name}"))


def train(config: Config, run_path: Path) -> int:
    """The plain path: config -> mesh -> model -> state -> step -> loop -> report; returns the exit code."""
    # JAX starts here, after the environment is set.
    from launch import session
    from overlapfx.train import loop, step

    with contextlib.ExitStack() as opened:
        with one_sentence("overlapfx train"):  # what the user can mend, before anything is compiled or overwritten
            mesh = session.make_mesh(config)
            model = session.make_model(config)
            inputs = session.open_inputs(config, mesh, opened)
            run = opened.enter_context(session.open_run(config, run_path))
            checkpoints = opened.enter_context(session.open_checkpoints(config, run))
            train_state, start_step = session.first_state(config, mesh, model, checkpoints, inputs)
        chip = session.chip_of(config)
        log = session.open_log(config, mesh, model, chip, run, checkpoints, start_step, opened)
        train_state, summary = loop.run(
            state=train_state,
            train_step=session.make_step(config, mesh, model),
            batches=inputs.batches,
            place=inputs.place,
            schedule=loop.Schedule(config.train.num_steps, config.train.eval_every, config.train.checkpoint_every),
            log=log,
            start_step=start_step,
            eval_fn=loop.make_eval_fn(step.make_eval_step(mesh, model), inputs.eval_batches, inputs.place),
            checkpointer=checkpoints,
        )
        session.report(config, mesh, model, chip, run, train_state, summary)
    return summary.exit_code


if __name__ == "__main__":
    sys.exit(main())
