"""Where the processes of a job meet before they start JAX, so that who is missing or different can be named."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from launch.identity import Identity
from overlapfx.train.stops import EXIT_INTERRUPTED, RunStopped

EXIT_NOT_TOGETHER = 69
"""Exit code of a process whose job is not complete: start again (sysexits' "service unavailable")."""

_MAX_BYTES = 2**20  # of one message
_RETRY_S = 0.2
_LOOK_S = 0.2  # how often a wait looks whether it was interrupted
_ANSWER_S = 5.0  # more than process 0 waits for the others
_SHOWN = 8  # differences and processes in one sentence


class NotTogether(RunStopped):
    """A process of the job did not come, or left; the message names it."""

    exit_code = EXIT_NOT_TOGETHER


class Interrupted(RunStopped):
    """A signal ended the wait for the others; there was nothing to save yet."""

    exit_code = EXIT_INTERRUPTED


class _Wait:
    """A deadline that an interruption cuts short."""

    def __init__(self, seconds: float, interrupted: Callable[[], bool]) -> None:
        self._end, self._interrupted = time.monotonic() + seconds, interrupted

    def left_s(self) -> float:
        """Seconds until this wait should look again, at most `_LOOK_S`.

        Raises TimeoutError at the deadline, Interrupted after an interruption.
        """
        if self._interrupted():
            raise Interrupted("a signal was received while waiting for the other processes; there is nothing to save.")
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return min(left_s, _LOOK_S)


class _Line:
    """JSON values, one to a line, over a socket; nothing that arrives is ever executed or unpickled."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._rest = b""

    def send(self, value: Any) -> None:
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, wait: _Wait) -> Any:
        """The next value. Raises TimeoutError, EOFError (the other side is gone), ValueError (it talks nonsense)."""
        while b"\n" not in self._rest:
            self._socket.settimeout(wait.left_s())
            try:
                more = self._socket.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError as error:
                raise EOFError from error
            if not more:
                raise EOFError
            self._rest += more
            if len(self._rest) > _MAX_BYTES:
                raise ValueError("the message is too long")
        line, self._rest = self._rest.split(b"\n", 1)
        return json.loads(line)

    def close(self) -> None:
        self._socket.close()


class Rendezvous:
    """The connection between the processes of a job: process 0 compares what all of them say, and answers each.

    Every wait is bounded by `identity.timeout_s` on process 0, and by somewhat more than twice that elsewhere. All
    processes call `agree` equally often; the constructor is the first such call.
    """

    def __init__(
        self, identity: Identity, job: str, facts: Mapping[str, str], interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """Meets the others; raises NotTogether, which names who is missing, and what `agree` raises.

        Raises Interrupted once `interrupted` says so; later waits are not interrupted, since all processes stop
        together from then on.
        """
        self._identity, self._interrupted = identity, interrupted
        self._lines: dict[int, _Line] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if identity.index == 0:
                self.told = self._host(job, facts)
            else:
                self.told = self._visit(job, facts)
            undo.pop_all()
        self._interrupted = lambda: False

    def agree(self, what: str, facts: Mapping[str, str] | None = None, *, error: str = "", tell: Any = None) -> Any:
        """Waits until every process has got as far as `what`; returns what process 0 tells.

        Raises ValueError with the same sentence everywhere if the processes differ in one of the `facts`, or if one of
        them reports an `error`; NotTogether if one is gone or does not come in time.
        """
        mine = {"facts": dict(facts or {}), "error": error}
        if self._identity.index:
            line = self._lines[0]
            try:
                line.send(mine)
            except OSError as closed:
                raise NotTogether(f"{self._name(0)} ended before {what}; see its own messages.") from closed
            return self._answer(line, what)
        said = {0: mine}
        wait = self._wait()
        gone: list[int] = []
        late: list[int] = []
        for index, line in self._lines.items():
            try:
                said[index] = line.receive(wait)
            except TimeoutError:
                late.append(index)
            except (EOFError, ValueError):
                gone.append(index)
        return self._reply(self._missing(what, gone, late), said, tell)

    def close(self) -> None:
        """Leaves; the others learn of it when they next wait for this process."""
        for line in self._lines.values():
            line.close()
        self._lines = {}

    # ---- process 0 ----

    def _host(self, job: str, facts: Mapping[str, str]) -> Any:
        wait = self._wait()
        said: dict[int, Any] = {0: {"facts": dict(facts), "error": ""}}
        with _listen(self._identity) as listener, contextlib.suppress(TimeoutError):
            while len(said) < self._identity.count:
                listener.settimeout(wait.left_s())
                with contextlib.suppress(TimeoutError):
                    self._welcome(_Line(listener.accept()[0]), job, said)
        missing = [index for index in range(self._identity.count) if index not in said]
        tell = {"jax_port": _free_port(self._identity.port + 1)}
        return self._reply(self._missing("the start of the job", [], missing), said, tell)

    def _welcome(self, line: _Line, job: str, said: dict[int, Any]) -> None:
        """Takes in a process of this job; whoever else calls is sent away and does no harm."""
        try:
            hello = line.receive(_Wait(min(_ANSWER_S, self._identity.timeout_s), self._interrupted))
            index, count = hello["process"], hello["count"]
        except (TimeoutError, EOFError, ValueError, KeyError, TypeError):
            line.close()
            return
        if hello.get("job") != job or count != self._identity.count or index not in range(1, count):
            with contextlib.suppress(OSError):
                line.send({"error": f"a job {job!r} of {self._identity.count} processes uses this port", "tell": None})
            line.close()
            return
        if index in self._lines:  # it has started again: what it said before is void
            self._lines[index].close()
        self._lines[index], said[index] = line, hello

    def _reply(self, missing: str, said: Mapping[int, Any], tell: Any) -> Any:
        errors = [f"{self._name(index)}: {said[index]['error']}" for index in sorted(said) if said[index]["error"]]
        sentence = errors[0] if errors else self._differences({index: said[index]["facts"] for index in sorted(said)})
        # An error explains why its process is gone, so it goes first.
        answer = {"error": sentence or missing, "missing": not sentence and bool(missing), "tell": tell}
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(answer)
        return _judge(answer)

    def _missing(self, what: str, gone: list[int], late: list[int]) -> str:
        parts = []
        if late:
            parts.append(f"{self._names(late)} did not come within {self._identity.timeout_s:g} s")
        if gone:
            parts.append(f"{self._names(gone)} ended before that")
        if not parts:
            return ""
        return f"of {self._identity.count} processes, at {what} {' and '.join(parts)}; see their own messages."

    def _differences(self, facts: Mapping[int, Mapping[str, str]]) -> str:
        """One sentence that says who differs from whom in what; "" if nobody does."""
        different = []
        for key in dict.fromkeys(key for own in facts.values() for key in own):
            holders: dict[str, list[int]] = {}
            for index, own in facts.items():
                holders.setdefault(own.get(key, "absent"), []).append(index)
            if len(holders) > 1:
                shown = ", ".join(f"{value} on {self._names(indices)}" for value, indices in holders.items())
                different.append(f"{key} is {shown}")
        if not different:
            return ""
        more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        return f"the processes differ: {'; '.join(different[:_SHOWN])}{more}; start all of them alike."

    # ---- the others ----

    def _visit(self, job: str, facts: Mapping[str, str]) -> Any:
        identity = self._identity
        wait = self._wait()
        hello = {"job": job, "process": identity.index, "count": identity.count, "facts": dict(facts), "error": ""}
        while True:
            try:
                connection = socket.create_connection((identity.host, identity.port), timeout=_ANSWER_S)
                break
            except OSError as error:  # not started yet, or its name is not known yet
                try:
                    time.sleep(min(_RETRY_S, wait.left_s()))
                except TimeoutError:
                    raise NotTogether(
                        f"{self._name(identity.index)} did not reach {self._name(0)} at "
                        f"{identity.host}:{identity.port} within {identity.timeout_s:g} s ({error}); see the messages "
                        f"of {self._name(0)}."
                    ) from error
        self._lines[0] = line = _Line(connection)
        line.send(hello)
        return self._answer(line, "the start of the job")

    def _answer(self, line: _Line, what: str) -> Any:
        try:
            # Process 0 may itself come late, and then waits for the others.
            answer = line.receive(_Wait(2 * self._identity.timeout_s + _ANSWER_S, self._interrupted))
        except TimeoutError as error:
            raise NotTogether(f"{self._name(0)} did not answer at {what}; see its own messages.") from error
        except EOFError as error:
            raise NotTogether(f"{self._name(0)} ended at {what}; see its own messages.") from error
        return _judge(answer)

    def _wait(self) -> _Wait:
        return _Wait(self._identity.timeout_s, self._interrupted)

    def _name(self, index: int) -> str:
        return self._identity.name(index)

    def _names(self, indices: list[int]) -> str:
        names = [self._name(index) for index in indices[:_SHOWN]]
        more = [f"{len(indices) - _SHOWN} more"] if len(indices) > _SHOWN else []
        *others, last = names + more
        return f"{', '.join(others)} and {last}" if others else last


def _judge(answer: Mapping[str, Any]) -> Any:
    if answer["error"]:
        raise NotTogether(answer["error"]) if answer.get("missing") else ValueError(answer["error"])
    return answer["tell"]


@contextlib.contextmanager
def _listen(identity: Identity) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server(("", identity.port), backlog=1024)
    except OSError as error:
        raise ValueError(
            f"port {identity.port}, where the processes are to meet, cannot be opened ({error.strerror}); end what "
            "uses it, or launch with another port."
        ) from error
    with listener:
        yield listener


def _free_port(preferred: int) -> int:
    """`preferred`, or any other port if that one is in use."""
    for port in (preferred, 0):
        with contextlib.suppress(OSError), socket.create_server(("", port)) as listener:
            return int(listener.getsockname()[1])
    raise ValueError("no port is free on this machine; end something that holds many.")
