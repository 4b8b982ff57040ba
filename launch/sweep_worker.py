"""A process that works off points of a sweep, one after the other, for as long as its parent lives."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait


def serve(connection: Connection, log: str, module: str = "launch.sweep_work") -> None:
    """Imports once what all tasks need, says so, then answers every task; see `launch.sweep_pool.Pool`.

    module: its function `do` answers a task. An exception that is no result of one ends the process, with its traceback
    in `log`.
    """
    start(log)
    work = importlib.import_module(module)  # JAX starts here
    connection.send("ready")
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the parent is gone
            return
        connection.send(work.do(task))


def start(log: str) -> None:
    """What every worker does first: writes to its log, ends with its parent and not before."""
    _redirect(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the parent is to decide
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _redirect(log: str) -> None:
    """Sends both outputs to the log, also those of compilers that know nothing of Python."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _end_with_parent() -> None:
    """Ends this process as soon as the parent is gone, even killed: its answer would reach nobody."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
