"""The command-line arguments that every command with a config understands."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from launch.config_file import load_config
from overlapfx.config import Config, from_config_dict

USER_ERROR = 2  # exit code


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Prints the sentence and leaves with the exit code of a user error."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(USER_ERROR)


def config_parser(command: str, description: str, simulates: bool = True) -> Parser:
    """A parser with the argument --config, and --devices if the command `simulates` any.

    --config.FIELD=VALUE is left to `parse`.
    """
    parser = Parser(
        prog=f"overlapfx {command}",
        description=description,
        epilog="--config.FIELD=VALUE replaces one field of the config, for example --config.mesh.x=4.",
    )
    parser.add_argument("--config", required=True, metavar="FILE[:NAME]", help="for example configs/gpt.py:tiny")
    if simulates:
        parser.add_argument(
            "--devices", type=int, metavar="N", help="simulate N CPU devices (default: as the mesh needs)"
        )
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, Config]:
    """The parsed arguments with the checked config they describe; a wrong config is a one-sentence ValueError."""
    arguments, overrides = parse_overrides(parser, argv)
    return arguments, from_config_dict(load_config(arguments.config, overrides))


def parse_overrides(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The parsed arguments with, for every "--config.mesh.x=4" or "--config.mesh.x 4", the "mesh.x=4".

    Anything else that the parser does not know is refused.
    """
    arguments, rest = parser.parse_known_args(argv)
    overrides: list[str] = []
    words = iter(rest)
    for word in words:
        if not word.startswith("--config."):
            parser.error(f"{word!r} is not an argument; see --help.")
        word = word.removeprefix("--config.")
        overrides.append(word if "=" in word else f"{word}={next(words, '')}")
    return arguments, overrides


@contextlib.contextmanager
def one_sentence(prog: str) -> Iterator[None]:
    """Turns a ValueError, which is the user's to mend, into its sentence on stderr and exit code 2.

    Wrap only what answers to the user: in the middle of a run a ValueError is a bug and its traceback is wanted.
    """
    try:
        yield
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(USER_ERROR) from error
