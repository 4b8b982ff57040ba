"""The console command `overlapfx`: hands its arguments to one of the sub-commands."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name: (module with a `main(argv) -> exit code`, what it does). `overlapfx train ...` is `python -m launch.train ...`.
COMMANDS = {
    "train": ("launch.train", "train a model"),
    "launch": ("launch.launch", "train on a TPU slice, or in several processes"),
    "doctor": ("launch.doctor", "examine the installation, the devices and the first step of a config"),
    "plan": ("launch.plan", "predict a training step on a TPU slice, on any machine"),
    "sweep": ("launch.sweep", "find the mesh and the overlap setting for a model on a slice"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sub-command that the first argument names; returns its exit code, 2 if there is no such command."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help"):
        print("usage: overlapfx COMMAND ... (overlapfx COMMAND --help says more)\n")
        print("\n".join(f"  {name:8} {what}" for name, (_, what) in COMMANDS.items()))
        return 0
    if command not in COMMANDS:
        print(f"overlapfx: {command!r} is not a command; choose one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[command][0])  # only now: some commands import JAX, which takes seconds
    code: int = module.main(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
