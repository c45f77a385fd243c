"""Folders of tensors that several processes fill, and others read meanwhile.

One process lays the files out with their full size and their headers, and renames the folder in one step. Each writer
counts the elements that it has written of each tensor, in a file beside the tensors. The file has a line
for each tensor, sorted by name, and each line has a number for each writer. One process holds a lock on the file until
all writers are done. The system takes the lock from a process that ends. So a reader that finds the lock free and a
tensor incomplete knows that the rest will not come.

Invariant: a tensor whose counts are complete can be read. The system writes and reads a count after the elements.

This module does not import torch: the sidecar uses it without.
"""

import contextlib
import fcntl
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megatron_rl.errors import InputError, NoRoom, find_no_room
from megatron_rl.shared.weights.mapping import TensorSpec

COUNTS_FILE = "arrived"
_NUMBER_BYTES = 8
_POLL_SECONDS = 0.0005
_POLLS_PER_LOOK = 100
"""Looks at the counts between two looks at the writers' lock, while a reader waits."""
_READ_BYTES = 1 << 12
"""The bytes of counts that a look reads: those of a tensor, and as many of the tensors after it."""


@contextlib.contextmanager
def writing(folder: Path, num_tensors: int, num_writers: int) -> Iterator[None]:
    """Begin with counts of zero; within this context, readers of the folder wait for missing elements."""
    path = folder / COUNTS_FILE
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.truncate(descriptor, num_tensors * num_writers * _NUMBER_BYTES)
        yield
    finally:
        os.close(descriptor)


class Counter(contextlib.AbstractContextManager["Counter"]):
    def __init__(self, folder: Path, specs: Sequence[TensorSpec], writer: int, num_writers: int):
        self._lines = {name: line for line, name in enumerate(sorted(spec.name for spec in specs))}
        self._counts = dict.fromkeys(self._lines, 0)
        self._place = (writer, num_writers)
        self._descriptor = os.open(folder / COUNTS_FILE, os.O_WRONLY)

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def add(self, name: str, num_elements: int) -> None:
        """Count elements, which must have been written before."""
        self._counts[name] += num_elements
        writer, num_writers = self._place
        offset = (self._lines[name] * num_writers + writer) * _NUMBER_BYTES
        os.pwrite(self._descriptor, self._counts[name].to_bytes(_NUMBER_BYTES, "little"), offset)


class Arrival(contextlib.AbstractContextManager["Arrival"]):
    """A reader's view of the counts; a folder without counts is complete."""

    def __init__(self, folder: Path, specs: Sequence[TensorSpec], sleep: Callable[[float], None] = time.sleep):
        sizes = {spec.name: spec.num_elements for spec in specs}
        self._lines = {name: line for line, name in enumerate(sorted(sizes))}
        self._sleep = sleep
        self._whole: set[int] = set()
        # By their lines.
        self._sizes = [sizes[name] for name in self._lines]
        self._descriptor: int | None = None
        with contextlib.suppress(FileNotFoundError):
            self._descriptor = os.open(folder / COUNTS_FILE, os.O_RDONLY)
            self._line_bytes = os.fstat(self._descriptor).st_size // max(1, len(self._lines))

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def wait_for(self, name: str) -> bool:
        """Wait until the tensor is complete; return False, at once, if its writers have ended before."""
        num_polls = 0
        while not self._is_whole(name):
            if num_polls % _POLLS_PER_LOOK == 0 and not self._is_written_to():
                # The last elements may have arrived just before the lock was released.
                return self._is_whole(name)
            num_polls += 1
            self._sleep(_POLL_SECONDS)
        return True

    def is_coming(self) -> bool:
        """Return whether each tensor is complete or may still become so."""
        return self._is_written_to() or all(map(self._is_whole, self._lines))

    def _is_whole(self, name: str) -> bool:
        if self._descriptor is None or (line := self._lines[name]) in self._whole:
            return True
        num_lines = min(max(1, _READ_BYTES // self._line_bytes), len(self._sizes) - line)
        counts = os.pread(self._descriptor, num_lines * self._line_bytes, line * self._line_bytes)
        numbers = struct.unpack(f"<{len(counts) // _NUMBER_BYTES}Q", counts)
        num_writers = self._line_bytes // _NUMBER_BYTES
        for number, size in enumerate(self._sizes[line : line + num_lines]):
            if sum(numbers[number * num_writers : (number + 1) * num_writers]) == size:
                self._whole.add(line + number)
        return line in self._whole

    def _is_written_to(self) -> bool:
        return self._descriptor is not None and is_locked(self._descriptor)


def is_being_written(folder: Path) -> bool:
    """Return whether a running writer may still write into the folder."""
    try:
        descriptor = os.open(folder / COUNTS_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Return whether a writer holds the lock on the open file of counts."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def is_in_memory(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Return whether the folder lies in this host's memory, where all processes see the same bytes at once."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    return any(line.split()[2] == number and line.partition(" - ")[2].split()[0] == "tmpfs" for line in lines)


DIGESTS_FILE = "digests.json"
"""The file of the tensors' digests beside the tensors."""


class LaidOutFiles(Protocol):
    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of bytes of each file."""
        ...

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The first bytes of each file."""
        ...


def create(folder: Path, plan: LaidOutFiles, private: bool = False, is_sparse: bool = False) -> None:
    """Create the plan's files in a new folder, with full size and headers; `private` gives them to this user only.

    Sparse files take room only for what is written into them.
    """
    folder.mkdir(parents=True, mode=0o700 if private else 0o777)
    try:
        _lay_out(folder, plan, private, is_sparse)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _lay_out(folder: Path, plan: LaidOutFiles, private: bool, is_sparse: bool) -> None:
    free, num_bytes = shutil.disk_usage(folder).free, sum(plan.sizes.values())
    if free < num_bytes:
        raise NoRoom(
            f"{folder} cannot be written: the weights take {num_bytes} bytes, {free} are free; make room there, "
            "then resume"
        )
    for file, size in plan.sizes.items():
        descriptor = os.open(folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)
        try:
            # Room that is missing when a page is written through a mapping ends the process, without an error.
            if is_sparse:
                os.truncate(descriptor, size)
            else:
                os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, plan.headers[file], 0)
        finally:
            os.close(descriptor)


def put_in_place(staged: Path, folder: Path) -> None:
    """Rename a finished folder, in one step."""
    try:
        staged.rename(folder)
    except OSError as error:
        no_room = find_no_room(error, folder)
        raise no_room or InputError(
            f"{folder} cannot be created ({error.strerror}): name a folder that does not exist"
        ) from None
