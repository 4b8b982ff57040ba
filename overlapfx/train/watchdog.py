"""Ends a process whose step does not finish, after writing down where all of its threads stand."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from overlapfx.train.stops import EXIT_HUNG

STACKS = "stacks.{process}.txt"
_GRACE = 1.5  # times the limit after which the process is ended even if Python cannot run


class Watchdog:
    """Watches one piece of work at a time, such as a step, from a thread of its own.

    If the work takes longer than `limit_s`, the stacks of all threads go to `directory`/stacks.PROCESS.txt and to
    standard error, `on_hang` may mark the run, and the process exits at once with EXIT_HUNG: what hangs inside a
    collective cannot be interrupted. Every process of a job has its own watchdog with the same limit, so that one
    process that hangs ends all of them within one limit. Where the hanging code keeps Python from running at all, the
    stacks are written and the process exits with code 1 after 1.5 limits.

    Args:
      limit_s: seconds that one piece of work may take; 0 watches nothing.
      directory: an existing directory for the stacks.
      process: number of this process.
      on_hang: called with the sentence that says what hung, before the process exits.
      leave: ends the process; replaced by tests.
    """

    def __init__(
        self,
        limit_s: float,
        directory: pathlib.Path,
        *,
        process: int = 0,
        on_hang: Callable[[str], None] = lambda _: None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._limit_s, self._path, self._process = limit_s, directory / STACKS.format(process=process), process
        self._on_hang, self._leave = on_hang, leave
        self._changed = threading.Condition()
        self._what: str | None = None
        self._deadline = 0.0
        self._ended = False
        self._stacks: TextIO | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self._limit_s > 0:
            self._stacks = self._path.open("a", encoding="utf-8")  # opened now: a full disk must not stop the dump
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.rest()
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._stacks is not None:
            self._stacks.close()
            if self._path.exists() and self._path.stat().st_size == 0:
                self._path.unlink()

    def expect(self, what: str) -> None:
        """From now on `what` (such as "step 7") has `limit_s` to finish; replaces what was watched before."""
        if self._limit_s > 0:
            self._set(what, time.monotonic() + self._limit_s)
            assert self._stacks is not None
            faulthandler.dump_traceback_later(_GRACE * self._limit_s, exit=True, file=self._stacks)

    def again(self) -> None:
        """What is being watched made progress: its limit starts again."""
        if self._what is not None:
            self.expect(self._what)

    def rest(self) -> None:
        """Watches nothing until the next `expect`."""
        if self._limit_s > 0:
            self._set(None, 0.0)
            faulthandler.cancel_dump_traceback_later()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """A block that may take any time, such as a compilation; what was watched has its full limit again after it."""
        what = self._what
        self.rest()
        yield
        if what is not None:
            self.expect(what)

    def _set(self, what: str | None, deadline: float) -> None:
        with self._changed:
            if self._what is None:
                self._changed.notify()  # else the thread wakes at the earlier deadline and sees the new one
            self._what, self._deadline = what, deadline

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                left_s = None if self._what is None else self._deadline - time.monotonic()
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                what, self._what = self._what, None
                self._end(f"{what} did not finish within {self._limit_s:g} s on process {self._process}")

    def _end(self, sentence: str) -> None:
        assert self._stacks is not None
        text = f"{sentence}; the stacks of all threads are in {self._path}."
        for file in (self._stacks, sys.__stderr__):
            if file is not None:
                print(text, file=file, flush=True)
                faulthandler.dump_traceback(file=file, all_threads=True)
        try:
            self._on_hang(text)
        finally:  # a mark that cannot be made must not keep a hung process alive
            self._leave(EXIT_HUNG)
