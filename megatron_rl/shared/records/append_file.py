"""Files that only their owner reads: those that one writer appends whole records to, and those written at once.

The journal, the audit log and the metrics are appended to.

Once `append` has returned, its record survives the death of the process, kill -9 included: the kernel has the bytes.
A loss of power may take it. A process that dies inside `append` leaves a prefix of the record.

A `LineFile` holds JSON lines that each name their version; a resumed run continues it as if it had never stopped:

- a torn last line is cut off when the file is opened again;
- versions never decrease from line to line, so a resumed run drops the end of the file, in one step.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from megatron_rl.errors import InputError, MegatronRLError, describe_failed_write, room_checked


class AppendFailed(MegatronRLError):
    """A record could not be written; the file is as it was before."""


class FileInUse(MegatronRLError):
    """The file has another writer, in this process or another."""


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read; a reader finds the old content or the whole new one."""
    unfinished = path.with_name(f".{path.name}")
    with room_checked(path):
        descriptor = os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    unfinished.replace(path)


class Closing:
    """Closes itself at the end of a context."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError


class AppendFile(Closing):
    """A file that is open for appending until `close`, locked against other writers, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_torn = False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Links are not followed. Children do not inherit the file: a child that outlives us would keep the lock.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise AppendFailed(f"{path} cannot be opened: {describe_failed_write(error, path)}") from None
        try:
            _check_private(path, os.fstat(self._descriptor))
            self._lock()
            self.size = os.fstat(self._descriptor).st_size
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, *pieces: bytes) -> None:
        """Write the pieces as one record; AppendFailed leaves the file as it was."""
        if self._is_torn:
            self.cut(self.size)
        try:
            _write_all(self._descriptor, pieces)
        except OSError as error:
            self._is_torn = True
            with contextlib.suppress(AppendFailed):
                self.cut(self.size)
            raise AppendFailed(
                f"{self.path} cannot grow from {self.size} bytes: {describe_failed_write(error, self.path)}"
            ) from None
        self.size += sum(map(len, pieces))

    def cut(self, size: int) -> None:
        """Keep the first `size` bytes only."""
        try:
            os.ftruncate(self._descriptor, size)
        except OSError as error:
            raise AppendFailed(f"{self.path} cannot be cut to {size} bytes: {error.strerror}") from None
        self.size = size
        self._is_torn = False

    def read(self, offset: int, size: int) -> bytes:
        """Read `size` bytes at `offset`; fewer at the end of the file."""
        return os.pread(self._descriptor, size, offset)

    def close(self) -> None:
        """Close the file, and with it release the lock; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileInUse(
                f"{self.path} is written by another process: end that sidecar, or name another folder for this one"
            ) from None


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner only; InputError if it exists and others can read it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder, folder.stat())


def _check_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise InputError(f"{path} belongs to user {status.st_uid}: name a folder of your own")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise InputError(f"{path} is open to others (mode {mode:o}): chmod go= {path}")


def _write_all(descriptor: int, pieces: Sequence[bytes]) -> None:
    # One call is nearly always enough; a full disk or a limit shows first as a short count, then as an error.
    written = os.writev(descriptor, pieces)
    if written < sum(map(len, pieces)):
        rest = memoryview(b"".join(pieces))[written:]
        while rest:
            rest = rest[os.write(descriptor, rest) :]


_T = TypeVar("_T")


class _Versioned(msgspec.Struct):
    """The key that every line has; other keys are skipped."""

    version: int


class LineFile(Closing):
    """A file of JSON lines, open for appending until `close`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = AppendFile(path)
        except FileInUse:
            raise FileInUse(
                f"{path} is written by another process: end that run, or name another folder for this one"
            ) from None
        self.last_version: float = -math.inf
        """Version of the last line; minus infinity without a line."""
        try:
            self._keep_below(math.inf)
        except BaseException:
            self._file.close()
            raise

    def restart(self, version: int) -> int:
        """Drop the lines of this version and of later ones; return their number."""
        return self._keep_below(version)

    def set_aside(self) -> Path | None:
        """Copy the file beside itself, with a number after its name; return the copy, or None if the file is empty."""
        if not self._file.size:
            return None
        copies = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
        copy = next(path for path in copies if not path.exists())
        shutil.copy(self.path, copy)
        return copy

    def append(self, version: int, record: Mapping[str, Any]) -> None:
        """Write one line; AppendFailed, as on a full disk, leaves the file as it was."""
        text = json.dumps({"version": version, **record}, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair, which UTF-8 cannot hold, becomes a question mark.
        self.append_encoded(version, text.encode("utf-8", "replace"))

    def append_encoded(self, version: int, line: bytes) -> None:
        """Write one line that is already encoded and names its version, as `append` does."""
        if version < self.last_version:
            raise ValueError(
                f"{self.path}: version {version} cannot follow {self.last_version}: call restart({version}) first"
            )
        self._file.append(line, b"\n")
        self.last_version = version

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def sizes(self) -> list[tuple[int, int]]:
        """Return each line's version and number of bytes."""
        return [(_decoded(self.path, *found, _Versioned).version, len(found[1])) for found in _whole_lines(self.path)]

    def keep(self, is_kept: Callable[[int], bool]) -> None:
        """Drop the lines of versions that are not kept. A kill meanwhile leaves the file as it was."""
        unfinished = self.path.with_name(f".{self.path.name}")
        unfinished.unlink(missing_ok=True)
        kept = AppendFile(unfinished)
        for number, line in _whole_lines(self.path):
            if is_kept(_decoded(self.path, number, line, _Versioned).version):
                kept.append(line)
        unfinished.replace(self.path)
        kept.path = self.path
        self._file.close()
        self._file = kept

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()

    def _keep_below(self, bound: float) -> int:
        kept_bytes = num_dropped = 0
        self.last_version = -math.inf
        for number, line in _whole_lines(self.path):
            version = _decoded(self.path, number, line, _Versioned).version
            if num_dropped or version >= bound:
                num_dropped += 1
                continue
            kept_bytes += len(line)
            self.last_version = version
        self._file.cut(kept_bytes)
        return num_dropped


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the records of a file, which may grow meanwhile; an incomplete last line is left out."""
    try:
        lines = list(_whole_lines(path))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in lines:
        _decoded(path, number, line, _Versioned)
    return [_decoded(path, number, line, dict) for number, line in lines]


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                yield number, line


def _decoded(path: Path, number: int, line: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise InputError(f"{path}, line {number}: {error}; correct the line, or move the file away") from None
