"""Scalars for TensorBoard, written by the thread that has them."""

from __future__ import annotations

import pathlib
import time

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.summary import scalar

_FLUSH_S = 10.0


class EventFile:
    """One event file of a directory, on disk every ten seconds and at the end.

    tensorboardX's own SummaryWriter has a thread and a queue of ten: when the disk is full the thread dies, and the
    next records wait for it forever. Here such an error is raised where it happens.

    Args:
      directory: made if missing.
      name: ends the name of the file, so that two attempts within a second do not share one.
      purge_step: TensorBoard forgets what earlier files say of this step and later ones; None forgets nothing.

    Raises:
      OSError: here, in `add` and in `close`, the file cannot be written.
    """

    def __init__(self, directory: pathlib.Path, name: str, purge_step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        # An absolute path, since tensorboardX takes a name such as s3:x for a place elsewhere.
        self._writer = EventsWriter(str(directory.absolute() / "events"), f".{name}")
        self._flushed = time.monotonic()
        if purge_step is not None:
            self._writer.write_event(Event(step=purge_step, file_version="brain.Event:2"))
            self._writer.write_event(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, tag: str, value: float, step: int) -> None:
        """Writes one number."""
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=scalar(tag, value)))
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()
