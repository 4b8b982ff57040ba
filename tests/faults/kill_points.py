"""Where a run gets its signal: hooks planted into a forked run, never into the program itself."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

_number = signal.SIGKILL  # in a forked run: what it is struck with


@dataclasses.dataclass(frozen=True)
class Blow:
    """A signal at a point of a run: SIGKILL ends it as a power failure would, SIGTERM asks it to stop."""

    point: Callable[[random.Random], None]
    number: signal.Signals

    def plant(self, chance: random.Random) -> None:
        """Makes this process, which is about to become a run, be struck."""
        global _number
        _number = self.number
        self.point(chance)

    def __str__(self) -> str:
        return f"{self.number.name} {self.point.__name__}"


def die(*_: object, **__: object) -> None:
    """Sends the signal to this process."""
    os.kill(os.getpid(), _number)


def die_within(seconds: float) -> None:
    """Sends the signal from another thread, `seconds` from now."""

    def later() -> None:
        time.sleep(seconds)
        die()

    threading.Thread(target=later, daemon=True).start()


def wrap(owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None):
    """Calls `before` and `after` around `owner.name`, with its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after:
            after(*args, **kwargs)
        return result

    setattr(owner, name, wrapped)


def count(number: int, act: Callable[[], None]) -> Callable[..., None]:
    """A hook that acts the `number`-th time, counted from 1."""
    calls = 0

    def hook(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            act()

    return hook


def start_up(chance: random.Random) -> None:
    from launch import session
    from overlapfx.train import rundir

    owner, name = chance.choice(
        [(session, "open_inputs"), (session, "open_run"), (session, "open_checkpoints"), (session, "first_state"),
         (session, "open_log"), (rundir, "_write_versioned")]
    )  # fmt: skip
    wrap(owner, name, **{chance.choice(["before", "after"]): die})


def compiling(chance: random.Random) -> None:
    from overlapfx.train.loop import RunLog

    seconds = chance.uniform(0, 0.5)
    wrap(RunLog, "compile", before=lambda *_: die_within(seconds))


def step(chance: random.Random) -> None:
    from overlapfx.train.loop import RunLog

    number, seconds = chance.randint(1, 11), chance.choice([0, chance.uniform(0, 0.02)])
    wrap(RunLog, "step", after=count(number, lambda: die_within(seconds) if seconds else die()))


def evaluation(chance: random.Random) -> None:
    from overlapfx.train.loop import RunLog

    seconds = chance.uniform(0, 0.05)
    wrap(RunLog, "evaluate", before=count(chance.randint(1, 3), lambda: die_within(seconds)))


def writing(chance: random.Random) -> None:
    from overlapfx.train.checkpoint import Checkpointer

    seconds = chance.uniform(0, 0.1)
    wrap(Checkpointer, "save", before=count(chance.randint(1, 6), lambda: die_within(seconds)))


def committing(chance: random.Random) -> None:
    """Between the writing of the arrays and the commit, or right after it."""
    when, number = chance.choice(["before", "after"]), chance.randint(1, 6)
    hook = count(number, die)
    wrap(os, "rename", **{when: lambda _, target, **__: os.path.basename(target).isdigit() and hook()})


def cleaning(chance: random.Random) -> None:
    """While an old checkpoint is being deleted, which happens file by file."""
    hook = count(chance.randint(1, 50), die)
    wrap(os, "unlink", after=lambda path, *, dir_fd=None: dir_fd is not None and hook())


def anywhere(chance: random.Random) -> None:
    die_within(chance.uniform(0, 5))


POINTS = (start_up, compiling, step, evaluation, writing, committing, cleaning, anywhere)
