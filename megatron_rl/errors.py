"""Every error a person can cause or meet, and the exit code it ends a command with.

An error's text says three things: which value (the flag, the tensor, the file), which bound it broke, and what to do.
"""

import enum


class ExitCode(enum.IntEnum):
    """What a command of this package returns to the shell; documented in docs/operations.md."""

    OK = 0
    CRASH = 1
    USAGE = 2
    ENVIRONMENT = 3
    INPUT = 4
    RUN = 5
    INTERRUPTED = 130
    """Ended by SIGINT; as in a shell, 128 plus the signal's number."""
    OUT_OF_GRACE = 143
    """Ended by SIGTERM, before the first iteration or because the iteration was not over in time."""


class MegatronRLError(Exception):
    """Base of the errors that are reported as one message, without a traceback."""

    exit_code = ExitCode.RUN

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, one line for each problem."""
        return (str(self),)


class UsageError(MegatronRLError, ValueError):
    """Flags are unknown, contradict each other, or ask for what is not supported; has all that is known to be wrong."""

    exit_code = ExitCode.USAGE

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self._problems = problems

    @property
    def problems(self) -> tuple[str, ...]:
        return self._problems


class PlatformError(MegatronRLError, RuntimeError):
    """A package is missing, of the wrong version, or was imported in the wrong order."""

    exit_code = ExitCode.ENVIRONMENT


class InputError(MegatronRLError, ValueError):
    """A checkpoint, a configuration file or a data set cannot be used as it is."""

    exit_code = ExitCode.INPUT
