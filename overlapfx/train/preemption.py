"""Stops a run at a step on which all of its processes agree, once any of them was asked to stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal:
    """Turns the first SIGTERM or Ctrl-C within the block into a flag; a second one has its usual effect.

    Every process of a job has one. `agree` is a collective: all processes call it at the same points of the run.
    `name` is the signal that this process received, None before that.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._largest: Callable[[Any], Any] | None = None
        self._sharding: Any = None

    def __enter__(self) -> StopOnSignal:
        # Python delivers signals to the main thread only; elsewhere the loop runs without this service.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        self.__exit__()

    def ask(self) -> Callable[[], bool]:
        """Asks all processes whether any of them was signalled; returns at once a function that waits for the answer.

        Dispatched behind a step, the question travels with it and costs no wait of its own. With several processes a
        signal that arrives after the question is answered by the next one.
        """
        # Here and not above: the signals have to be caught before JAX is imported, which takes seconds.
        import jax

        if jax.process_count() == 1:
            return lambda: self.name is not None
        import numpy as np

        if self._largest is None:
            self._largest, self._sharding = _make_largest()
        mine = np.full(jax.local_device_count(), self.name is not None, np.int32)
        answer = self._largest(jax.make_array_from_process_local_data(self._sharding, mine))
        return lambda: bool(np.asarray(answer))

    def agree(self) -> bool:
        """Whether any process has been signalled; waits for all of them."""
        return self.ask()()

    @property
    def reason(self) -> str:
        """What made this process stop, for a message."""
        return f"{self.name} received" if self.name else "another process received a signal"


def _make_largest() -> tuple[Callable[[Any], Any], Any]:
    """A jitted maximum over one number per device of all processes, with the sharding of its argument."""
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

    # Ordered by process, so that what each contributes is one run of the array.
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(devices, ("device",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda x: x.max(), out_shardings=whole), NamedSharding(mesh, PartitionSpec("device"))
