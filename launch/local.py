"""Runs a training job as several processes on this machine, with CPU collectives between them."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, TextIO

from launch.config_file import PROJECT
from launch.environment import DEVICE_COUNT, simulated
from launch.identity import PREFIX, variables
from overlapfx.config import Config
from overlapfx.train.stops import EXIT_INTERRUPTED

_TAIL = 20  # lines that a failed process wrote to each of its outputs, and that are shown again
_POLL_S = 0.05
_GRACE_S = 5.0  # for the others to end after one has failed
_NOISE = "[Gloo] Rank"  # what the CPU collectives print, at every new group


def check(config: Config, processes: int, devices_per_process: int) -> None:
    """Raises ValueError unless the mesh of the config fills the devices of the processes."""
    for option, value in (("--processes", processes), ("--devices-per-process", devices_per_process)):
        if value < 1:
            raise ValueError(f"{option} is {value}; it must be at least 1.")
    devices = processes * devices_per_process
    if config.mesh.num_devices != devices:
        mesh = config.mesh
        raise ValueError(
            f"the mesh replica={mesh.replica}, y={mesh.y}, x={mesh.x} has {mesh.num_devices} devices but {processes} "
            f"processes with {devices_per_process} devices each have {devices}; change one of them."
        )


def environments(
    processes: int, devices_per_process: int, timeout_s: float, port: int, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of every process."""
    kept = [word for word in environ.get("XLA_FLAGS", "").split() if not word.startswith(DEVICE_COUNT)]
    shared = {
        **environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": simulated(devices_per_process, " ".join(kept)),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), environ.get("PYTHONPATH", "")])),
        **variables(host="127.0.0.1", port=port, slices=1, workers=processes, timeout_s=timeout_s),
    }
    return [{**shared, f"{PREFIX}WORKER": str(index)} for index in range(processes)]


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class _Child:
    """One process, whose output is read as it comes: process 0's is shown, the end of everybody's is kept."""

    def __init__(self, index: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.index = index
        self.process = subprocess.Popen(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C reaches it through us, once
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        # Apart, since what was written to both has no order, and much of one must not push out the other.
        self._tails: list[collections.deque[str]] = [collections.deque(maxlen=_TAIL) for _ in streams]
        self._readers = [
            threading.Thread(target=self._read, args=(*pair, tail), daemon=True)
            for pair, tail in zip(streams, self._tails, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: IO[str], shown: TextIO, tail: collections.deque[str]) -> None:
        for line in stream:
            if line.startswith(_NOISE):
                continue
            tail.append(line)
            if self.index == 0:
                print(line, end="", file=shown, flush=True)

    def last_lines(self) -> list[str]:
        """The end of both outputs; what went wrong is last."""
        return [line.rstrip() for tail in self._tails for line in tail]

    def finish(self) -> None:
        """Reads what is left of the output of a process that has ended."""
        for reader in self._readers:
            reader.join(timeout=_GRACE_S)

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def run(command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> int:
    """Runs `command` once per environment and waits; returns 0, or the exit code of the process that failed first.

    If one fails the others are ended, and its last lines are shown. A process that was interrupted and has saved (exit
    code 75) is no failure. SIGTERM and Ctrl-C are handed on to all processes. A process that a signal ended counts as
    128 and the number of the signal, as in a shell.
    """
    children: list[_Child] = []
    try:
        with _forwarding(children):
            for index, environ in enumerate(environs):  # one by one, so that each is known to whoever ends them
                children.append(_Child(index, command, environ))
            failed = _first_failure(children)
            if failed is None:
                codes = [child.process.returncode for child in children]
                return max(codes)
            _end(children)
            _show(failed)
            code: int = failed.process.returncode
            return 128 - code if code < 0 else code
    finally:
        _end(children)


def _first_failure(children: Sequence[_Child]) -> _Child | None:
    """Waits until one has failed, or all have ended."""
    while True:
        codes = [child.process.poll() for child in children]
        failed = [child for child, code in zip(children, codes, strict=True) if code not in (None, 0, EXIT_INTERRUPTED)]
        if failed or None not in codes:
            # A process that another's failure ended says less than the one that failed by itself.
            return min(failed, key=lambda child: child.process.returncode < 0, default=None)
        time.sleep(_POLL_S)


def _end(children: Sequence[_Child]) -> None:
    """Ends the processes that still run, first politely; nothing is left behind."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [child for child in children if child.process.poll() is None]
        for child in running:
            child.send(number)
        deadline = time.monotonic() + _GRACE_S
        for child in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.finish()


def _show(failed: _Child) -> None:
    code = failed.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"overlapfx launch: process {failed.index} {how}; its last lines:", file=sys.stderr)
    for line in failed.last_lines():
        print(f"  {line}", file=sys.stderr)
    sys.stderr.flush()


@contextlib.contextmanager
def _forwarding(children: Sequence[_Child]) -> Iterator[None]:
    """Hands signals on to the processes, which save and end by themselves."""

    def hand_on(number: int, _: FrameType | None) -> None:
        for child in children:
            child.send(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, hand_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
