"""The errors that users can cause or meet, and the exit codes of commands that end with them.

The text of an error says three things: the value (the flag, the tensor, the file), the bound that it broke, and the
remedy.
"""

import contextlib
import enum
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn


class ExitCode(enum.IntEnum):
    """The exit codes of this package's commands; docs/operations.md documents them."""

    OK = 0
    CRASH = 1
    USAGE = 2
    ENVIRONMENT = 3
    INPUT = 4
    RUN = 5
    INTERRUPTED = 130
    """End by SIGINT; as in a shell, 128 plus the signal's number."""
    OUT_OF_GRACE = 143
    """End by SIGTERM, before the first iteration or because the iteration did not end in time."""


class MegatronRLError(Exception):
    """The base of errors that are reported as one message, without a traceback."""

    exit_code = ExitCode.RUN

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems that the error reports, one line each."""
        return (str(self),)


class UsageError(MegatronRLError, ValueError):
    """Flags are unknown, contradict each other, or ask for something unsupported; `problems` has all known problems."""

    exit_code = ExitCode.USAGE

    def __init__(self, *problems: str):
        super().__init__("\n".join(problems))
        self._problems = problems

    @property
    def problems(self) -> tuple[str, ...]:
        return self._problems


class PlatformError(MegatronRLError, RuntimeError):
    """A package is missing, has the wrong version, or was imported in the wrong order."""

    exit_code = ExitCode.ENVIRONMENT


class InputError(MegatronRLError, ValueError):
    """A checkpoint, a configuration file or a data set cannot be used as it is."""

    exit_code = ExitCode.INPUT


class ForeignVersion(InputError):
    """Another version of megatron_rl wrote a file."""


def check_writer(file: object, version: object, own: object, remedy: str) -> None:
    """Raise ForeignVersion unless this version of megatron_rl writes a file's format too."""
    if version != own:
        raise ForeignVersion(
            f"{file} was written by another version of megatron_rl (its format is {version}, and this version reads "
            f"{own}): {remedy}"
        )


def count_noun(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: "1 breach", "2 breaches"; without `plural` the plural has an "s"."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


class NoRoom(MegatronRLError):
    """A file cannot be written: its disk or a quota is full, or a limit on the size of files is reached."""


_WAYS_OUT = {
    errno.ENOSPC: "make room there, then resume",
    errno.EDQUOT: "remove files that count towards the quota or have it raised, then resume",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f), then resume",
}
"""Remedies, by the codes of errors that report a lack of room when a file is written."""


def find_no_room(error: BaseException | str, *places: Path) -> NoRoom | None:
    """Return the error to report if `error`, or one of its causes, reports a lack of room; None otherwise.

    If the error does not name its file, the file is in one of `places`. Another process's error is given as its text.
    """
    if isinstance(error, str):
        code = next((code for code in _WAYS_OUT if os.strerror(code) in error), None)
        return None if code is None else _build_no_room(code, places)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _WAYS_OUT:
            named = (Path(os.fsdecode(cause.filename)),) if isinstance(cause.filename, str | bytes) else places
            return _build_no_room(cause.errno, named)
        cause = cause.__cause__ or cause.__context__
    return None


def describe_failed_write(error: OSError, path: Path) -> str:
    """Describe why `path` could not be written; if room is lacking, add the free bytes and the remedy."""
    reason = error.strerror or str(error)
    if error.errno not in _WAYS_OUT:
        return f"{reason}; fix this, then resume"
    return f"{reason}{_describe_free(path)}; {_WAYS_OUT[error.errno]}"


@contextlib.contextmanager
def room_checked(*places: Path) -> Iterator[None]:
    """Raise NoRoom within this context in place of an error that reports a lack of room: see `find_no_room`."""
    try:
        yield
    except MegatronRLError:
        raise
    except Exception as error:
        no_room = find_no_room(error, *places)
        if no_room is None:
            raise
        raise no_room from None


# Packages whose names differ from those of their modules.
_PACKAGES = {"megatron": "megatron-core", "zmq": "pyzmq", "google": "protobuf"}


@contextlib.contextmanager
def packages_checked() -> Iterator[None]:
    """Raise a PlatformError within this context in place of an error that reports a missing package."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", __package__):
            raise
        package = _PACKAGES.get(module, module)
        raise PlatformError(
            f"the package {package} is not installed: pip install {package}; `megatron-rl doctor` lists all that a "
            "platform needs"
        ) from error


def exit_checked(name: str, run: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of `run`, which imports what it needs: a package may be missing."""
    try:
        with packages_checked():
            code = run()
    except PlatformError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


def _build_no_room(code: int, places: Sequence[Path]) -> NoRoom:
    reason, way_out = os.strerror(code), _WAYS_OUT[code]
    if len(places) == 1:
        return NoRoom(f"{places[0]} cannot be written: {reason}{_describe_free(places[0])}; {way_out}")
    free = [f"{place}{_describe_free(place)}" for place in places]
    where = f"a file in one of {'; '.join(free)}" if free else "a file"
    return NoRoom(f"{where} cannot be written: {reason}; {way_out}")


def _describe_free(path: Path) -> str:
    """Describe the free bytes of a path's disk, as text to follow a name or a reason."""
    existing = next((place for place in (path, *path.parents) if place.exists()), None)
    if existing is None:
        return ""
    try:
        return f" ({shutil.disk_usage(existing).free} bytes are free)"
    except OSError:
        return ""
