"""Worker processes that work off a list of tasks; one that dies takes no other task with it."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import pathlib
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

# Started afresh, not forked: JAX has threads that a fork would leave behind.
_context = multiprocessing.get_context("spawn")

_GRACE_S = 10.0  # for a process to end after its connection has
Task = Mapping[str, Any]
Outcome = dict[str, Any]
Serve = Callable[[Connection, str], None]


@dataclasses.dataclass(frozen=True)
class Limits:
    """num_workers: processes at a time. timeout_s: of one task. recycle_bytes: a worker that used more memory than this
    is replaced before its next task, since compilers do not give everything back.
    """

    num_workers: int
    timeout_s: float
    recycle_bytes: int


class StartError(Exception):
    """A worker ended before it was ready for its first task; the message is one sentence."""


class _Worker:
    """One process. `key` is the task in hand, None before it is ready and between tasks."""

    def __init__(self, serve: Serve, log: pathlib.Path) -> None:
        self.log = log
        self.log_begins = log.stat().st_size if log.exists() else 0
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=serve, args=(theirs, str(log)), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        self.is_ready = self.is_gone = False
        self.key: str | None = None
        self.begun_s = 0.0

    def give(self, key: str, task: Task) -> None:
        self.key, self.begun_s = key, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it died while idle: its connection will say so
            self.connection.send(dict(task))

    def stop(self) -> None:
        """Ends the process at once, whatever it does: nothing it has not sent is worth waiting for."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.is_gone = True

    def last_words(self) -> str:
        """The last line of its log that is not empty."""
        if not self.log.exists():
            return "it ended before it could write to its log"
        with self.log.open("rb") as file:
            file.seek(self.log_begins)
            lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it left no message"


class Pool:
    """Runs tasks in workers.

    serve: what a worker runs, with its end of a connection and the path of its log: it sends anything when it is ready,
        then answers every task that it receives with an outcome.
    started: called with the key of every task that a worker begins.
    """

    def __init__(
        self, serve: Serve, limits: Limits, logs: pathlib.Path, started: Callable[[str], None] = lambda key: None
    ) -> None:
        self._serve, self._limits, self._logs, self._started = serve, limits, logs, started
        self._workers: list[_Worker | None] = [None] * limits.num_workers

    def run(self, tasks: Mapping[str, Task]) -> Iterator[tuple[str, Outcome]]:
        """Yields (key, outcome) as they come. All workers are gone when the iterator ends or is closed.

        Where a worker did not answer, the outcome has "outcome": "killed" (by a signal), "timeout" or "error" (by an
        exception), and "why". Raises StartError.
        """
        self._logs.mkdir(parents=True, exist_ok=True)
        waiting = deque(tasks)
        left = len(waiting)
        try:
            while left:
                self._employ(waiting, tasks)
                for key, outcome in self._collect():
                    left -= 1
                    yield key, outcome
        finally:
            for worker in self._workers:
                if worker is not None and not worker.is_gone:
                    worker.stop()
            self._workers = [None] * self._limits.num_workers

    def _employ(self, waiting: deque[str], tasks: Mapping[str, Task]) -> None:
        """Starts workers for as many tasks as wait, gives tasks to those that are idle."""
        for place, worker in enumerate(self._workers):
            idle_or_starting = sum(w is not None and w.key is None for w in self._workers)
            if worker is None and idle_or_starting < len(waiting):
                self._workers[place] = _Worker(self._serve, self._logs / f"worker-{place}.log")
            elif worker is not None and worker.is_ready and worker.key is None and waiting:
                key = waiting.popleft()
                worker.give(key, tasks[key])
                self._started(key)

    def _collect(self) -> Iterator[tuple[str, Outcome]]:
        """Waits until some worker says something, ends or takes too long; yields what became of its task."""
        there = [worker for worker in self._workers if worker is not None]
        now = time.monotonic()
        until = [worker.begun_s + self._limits.timeout_s - now for worker in there if worker.key is not None]
        speaking = set(wait([w.connection for w in there], max(0.0, min(until)) if until else None))
        for place, worker in enumerate(self._workers):
            if worker is None:
                continue
            key, outcome = worker.key, None
            if worker.connection in speaking:
                outcome = self._hear(worker)
            elif key is not None and time.monotonic() > worker.begun_s + self._limits.timeout_s:
                worker.stop()
                outcome = {"outcome": "timeout", "why": f"it took more than {self._limits.timeout_s:g} s."}
            if outcome is not None and outcome.get("peak_rss_bytes", 0) > self._limits.recycle_bytes:
                worker.stop()
            if worker.is_gone:
                self._workers[place] = None
            if key is not None and outcome is not None:
                yield key, {**outcome, "took_s": round(time.monotonic() - worker.begun_s, 3)}

    def _hear(self, worker: _Worker) -> Outcome | None:
        """What a worker has to say about its task: its answer, or how it died; None if it has none."""
        try:
            said = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(_GRACE_S)
            outcome = _death(worker)
            worker.stop()
            return outcome
        outcome = said if worker.is_ready else None
        worker.is_ready = True
        worker.key = None
        return outcome


def _death(worker: _Worker) -> Outcome | None:
    """The outcome of the task of a worker that ended, None between two tasks. Raises StartError before the first."""
    code = worker.process.exitcode or 0
    if not worker.is_ready:
        raise StartError(f"a worker of the sweep could not start: {worker.last_words()} (more in {worker.log}).")
    if worker.key is None:
        return None
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", by the system if memory ran out" if name == "SIGKILL" else f": {worker.last_words()}"
        return {"outcome": "killed", "why": f"the worker was killed by {name}{hint}; its log is {worker.log}."}
    return {"outcome": "error", "why": f"{worker.last_words()} (exit code {code}; more in {worker.log})"}
