"""Why a run may end before its last step, each reason with the exit code that a scheduler can act on."""

from __future__ import annotations

EXIT_DIVERGED = 65
"""The numbers are wrong (not finite, or replicas that differ): starting again alone will not help."""
EXIT_STORAGE = 74
"""A file could not be written or read: make room or mend the disk, then start again."""
EXIT_INTERRUPTED = 75
"""A signal ended the run after it was saved: start again (sysexits' "temporary failure")."""
EXIT_HUNG = 76
"""The watchdog ended a run whose step did not finish: start again, and look at the stacks it left."""


class RunStopped(Exception):
    """The run cannot go on; the message is one sentence for the user, `exit_code` what the process should return."""

    exit_code = 1


class StorageError(RunStopped):
    """A file of the run could not be written or read."""

    exit_code = EXIT_STORAGE


class DataError(StorageError, ValueError):
    """A record cannot be read: an error of the user's at the start, the end of a run that is under way."""


class NumericalError(RunStopped):
    """The numbers of the run are not to be trusted any more."""

    exit_code = EXIT_DIVERGED
