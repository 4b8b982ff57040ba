"""Starts the processes of a job together, and makes sure that they run the same thing."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.flags import VARIABLES
from launch.identity import ALONE, Identity
from launch.rendezvous import Rendezvous
from overlapfx.config import Config, to_dict
from overlapfx.train import rundir

_HEARTBEAT_S = 30  # after which JAX ends the processes that outlive another one
# Of compiled programs: attributes of instructions, and the tables that they point into.
_SOURCES = re.compile(
    r", metadata=\{[^{}]*\}|^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:\d+ .*\n)*", re.MULTILINE
)
# Names of instructions and computations, and of the parameters in a computation's first line.
_NAMES = re.compile(r"%[\w.-]+|(?<=[(\s])[\w.-]+(?=: )")


class Peers:
    """The processes of this job; for a process that is alone every method returns at once."""

    def __init__(self, identity: Identity, rendezvous: Rendezvous | None) -> None:
        self.identity = identity
        self._rendezvous = rendezvous

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block that all processes run; the ValueError of one is raised on every process, with its name."""
        if self._rendezvous is None:
            yield
            return
        try:
            yield
        except ValueError as error:
            with contextlib.suppress(Exception):  # whatever the others say, this is the error to show here
                self._rendezvous.agree(what, error=str(error))
            raise
        self._rendezvous.agree(what)

    def check_shared(self, directory: Path) -> None:
        """Raises ValueError on all processes unless they see the same `directory`, which process 0 has made."""
        if self._rendezvous is None:
            return
        token = directory / f".shared-{secrets.token_hex(8)}"
        primary = self.identity.index == 0
        with contextlib.ExitStack() as opened:
            if primary:
                opened.callback(token.unlink, missing_ok=True)
                token.touch()
            name = self._rendezvous.agree("opening the run directory", tell=token.name)
            with self.together("looking into the run directory"):
                if not (directory / name).exists():
                    raise ValueError(
                        f"the run directory {directory} is not the one that process 0 has; put it on a file system "
                        "that all processes share."
                    )

    def agreeing(self, train_step: Any) -> Any:
        """The jitted step; with several processes its compilation ends only when all have compiled the same program."""
        return train_step if self._rendezvous is None else _AgreeingStep(train_step, self._rendezvous)


class _AgreeingStep:
    """A jitted function that is compiled ahead of time, by all processes to the same program."""

    def __init__(self, jitted: Any, rendezvous: Rendezvous) -> None:
        self._jitted, self._rendezvous = jitted, rendezvous

    def lower(self, *args: Any) -> _AgreeingLowered:
        return _AgreeingLowered(self._jitted.lower(*args), self._rendezvous)


class _AgreeingLowered:
    def __init__(self, lowered: Any, rendezvous: Rendezvous) -> None:
        self._lowered, self._rendezvous = lowered, rendezvous

    def compile(self) -> Any:
        """Compiles, then compares with the other processes: programs that differ would wait for each other forever."""
        traced = self._lowered.as_text()
        compiled = self._lowered.compile()
        text = same_names(without_sources(compiled.as_text() or ""))
        facts = {"the traced program": _digest(traced), "the compiled program": _digest(text)}
        self._rendezvous.agree("the end of compilation", facts)
        return compiled


def without_sources(text: str) -> str:
    """A compiled program without where in the source its instructions come from.

    A program from the compilation cache tells of the lines as they were when it was compiled; it is the same program.
    """
    return _SOURCES.sub("", text)


def same_names(text: str) -> str:
    """A compiled program whose names are numbered in the order of their first appearance.

    JAX leaves out of the cache's key what the names are numbered by: a cached program has the names of its own time.
    """
    numbers: dict[str, str] = {}
    return _NAMES.sub(lambda found: numbers.setdefault(found[0].lstrip("%"), f"%{len(numbers)}"), text)


@contextlib.contextmanager
def join(
    config: Config, identity: Identity, environ: Mapping[str, str], interrupted: Callable[[], bool]
) -> Iterator[Peers]:
    """Meets the other processes of the job, compares config and versions, then starts JAX's own coordination.

    To be entered before JAX is imported. Raises ValueError where the processes differ and NotTogether where one is
    missing, each with its name; Interrupted once `interrupted` says so. When the block fails in a job of several
    processes, this process ends at once: JAX would wait minutes at exit for the others, which wait for this one.
    """
    if identity.count == 1:
        yield Peers(ALONE, None)
        return
    with contextlib.closing(Rendezvous(identity, config.name, _facts(config, environ), interrupted)) as rendezvous:
        _initialize_jax(identity, rendezvous.told["jax_port"])
        try:
            yield Peers(identity, rendezvous)
        except BaseException as error:
            rendezvous.close()
            _leave(error)


def _initialize_jax(identity: Identity, port: int) -> None:
    import jax

    # It would catch SIGTERM in place of our own handler, which saves before the process ends.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator_address=f"{identity.host}:{port}",
        num_processes=identity.count,
        process_id=identity.index,
        initialization_timeout=max(1, int(identity.timeout_s)),
        heartbeat_timeout_seconds=_HEARTBEAT_S,
    )


def _leave(error: BaseException) -> None:
    """Ends the process with the exit code that Python would give to `error`."""
    code: Any = getattr(error, "exit_code", 1)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif hasattr(error, "exit_code"):
        print(f"overlapfx train: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _facts(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """What has to be the same on all processes: every field of the config, versions, compiler flags."""
    facts = {f"config.{name}": json.dumps(value) for name, value in _flat(to_dict(config))}
    installed = {**rundir.versions(), "libtpu": _version("libtpu")}
    # The kernel may differ from host to host; the interpreter and the processor's kind may not.
    installed["platform"] = f"{platform.system()} {platform.machine()}"
    facts |= {f"version of {name}": str(value) for name, value in installed.items()}
    facts |= {name: environ.get(name, "") for name in (*VARIABLES, "JAX_PLATFORMS")}
    return facts


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
