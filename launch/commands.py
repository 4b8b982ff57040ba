"""Commands for other programs, shown as they would be typed, run without a shell."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence


class CommandFailed(Exception):
    """A program failed; the message is one sentence with its last words."""


@dataclasses.dataclass(frozen=True)
class Command:
    """`argv` is handed to the program as it is; `stdin` is what it reads.

    until: the command only asks for a state: it is repeated until its answer is the first of these words, and given up
        if it is one of the others.
    """

    argv: tuple[str, ...]
    stdin: str = ""
    until: tuple[str, ...] = ()

    def shown(self) -> str:
        """The command as a line for a POSIX shell."""
        return shlex.join(self.argv)

    def run(self, timeout_s: float) -> str:
        """Runs the program and returns what it printed; raises CommandFailed if it fails or takes too long."""
        try:
            done = subprocess.run(
                self.argv, input=self.stdin, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise CommandFailed(f"{self.shown()} did not finish within {timeout_s:g} s.") from error
        except OSError as error:
            raise CommandFailed(f"{self.argv[0]} cannot be run ({error.strerror}).") from error
        if done.returncode:
            words = (done.stderr.strip() or done.stdout.strip() or "it printed nothing").splitlines()
            raise CommandFailed(f"{self.shown()} failed with exit code {done.returncode}: {' / '.join(words[-5:])}")
        return done.stdout


def require_programs(commands: Sequence[Command]) -> None:
    """Raises ValueError if a program that the commands need is not installed."""
    for program in dict.fromkeys(command.argv[0] for command in commands):
        if shutil.which(program) is None:
            raise ValueError(f"{program} is not installed or not on PATH; install it, or look with --dry-run.")


def run_all(
    commands: Sequence[Command],
    *,
    timeout_s: float,
    wait_s: float,
    poll_s: float,
    say: Callable[[str], None],
) -> None:
    """Runs the commands one after the other; raises CommandFailed at the first that fails, the rest is not run.

    timeout_s: for one command. wait_s: for a state to come. poll_s: between two looks at it.
    """
    for command in commands:
        say(f"$ {command.shown()}")
        if command.until:
            _wait(command, timeout_s, wait_s, poll_s, say)
        else:
            printed = command.run(timeout_s).strip()
            if printed:
                say(printed)


def _wait(command: Command, timeout_s: float, wait_s: float, poll_s: float, say: Callable[[str], None]) -> None:
    wanted, *hopeless = command.until
    deadline = time.monotonic() + wait_s
    last = ""
    while True:
        state = command.run(timeout_s).strip()
        if state != last:
            say(f"state: {state}")
        last = state
        if state == wanted:
            return
        if state in hopeless:
            raise CommandFailed(f"the state became {state}, from which it does not become {wanted}.")
        if time.monotonic() + poll_s > deadline:
            raise CommandFailed(f"the state is {state} after {wait_s:g} s, not {wanted}.")
        time.sleep(poll_s)
