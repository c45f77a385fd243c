"""Starts and ends an engine's processes on this host. Other launchers implement the same two protocols.

Invariants of local processes:

- an engine's processes form a process group and a session of their own;
- each ends when the process that started it ends (`sidecar/parent.py`), so that no process outlives the sidecar,
  however it was killed;
- an engine's output is kept in files of bounded number and size, and its last lines are at hand for errors. An engine
  that is restarted begins a new file, so that the file with the reason of its death stays.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from megatron_rl.sidecar import parent
from megatron_rl.sidecar.processes import ProcessWatch, list_group

LOG_BYTES = 8 << 20
# More than the deaths in a row after which an engine is given up, so that the log of its first death stays.
LOG_FILES = 8
LOG_LINES = 1000
# When an engine's processes have ended, its tracker of shared memory removes the hundreds of megabytes that they left.
# The tracker must not be killed before that, and a busy host runs it late.
GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.02
# The capacity of a pipe.
_PIPE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """The whole environment: nothing is inherited."""
    log: Path
    """The file of its output."""
    address: str
    """The path of the unix socket at which the process answers once it is up."""


class Handle(Protocol):
    """A process that was started, with all processes that it started itself."""

    address: str

    @property
    def log(self) -> Path: ...

    def poll(self) -> str | None:
        """Say how the process ended; None while it runs."""
        ...

    def need(self, pids: Sequence[int]) -> None:
        """Count the engine's workers, in the order of their ranks, as needed."""
        ...

    def find_fault(self) -> str | None:
        """Say which of the process and those that it needs has ended or is stopped; None while all run.

        Call it several times a second.
        """
        ...

    def kill(self) -> None:
        """Kill it and all processes that it started; return when none is left."""
        ...

    def log_lines(self) -> list[str]:
        """Return the last lines that it has printed."""
        ...


class LocalLauncher:
    """Starts processes on this host.

    The kernel ends a process when the *thread* that started it ends. So call `start` from a thread that outlives the
    engine.
    """

    def start(self, spec: ProcessSpec) -> "LocalHandle":
        process = subprocess.Popen(
            spec.command,
            env={**spec.environment, parent.VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        return LocalHandle(process, spec.address, Log(process.stdout, spec.log))


class LocalHandle:
    """A process group on this host."""

    def __init__(self, process: "subprocess.Popen[bytes]", address: str, log: "Log") -> None:
        self.address = address
        self.pid = process.pid
        self.log = log.path
        self._process = process
        self._log = log
        self._watch = ProcessWatch(process.pid)

    @property
    def exit_code(self) -> int | None:
        """The exit code, or minus the number of the signal that ended the process; None while it runs."""
        return self._process.poll()

    def poll(self) -> str | None:
        code = self.exit_code
        if code is None:
            return None
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def need(self, pids: Sequence[int]) -> None:
        for pid in pids:
            self._watch.add(pid)

    def find_fault(self) -> str | None:
        ended = self.poll()
        return f"its server {ended}" if ended else self._watch.find_fault()

    def kill(self) -> None:
        shared_memory = _shared_memory(self.pid)
        with contextlib.suppress(ProcessLookupError):
            # After it has been waited for, its number may belong to another process.
            if self._process.poll() is None:
                self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + GRACE_SECONDS
        while _group_exists(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for path in shared_memory:
            # Python's tracker does not know the files that compiled code made.
            path.unlink(missing_ok=True)
        self._log.close()

    def log_lines(self) -> list[str]:
        return self._log.last_lines()

    def new_lines(self, num_seen: int) -> tuple[int, list[str]]:
        """Return the number of lines that it has printed, and the last of those after the first `num_seen`."""
        return self._log.new_lines(num_seen)


class Log:
    """Copies the output of a process into a file; a full file is renamed, and the oldest is deleted."""

    def __init__(self, source: IO[bytes], path: Path, max_bytes: int = LOG_BYTES, num_files: int = LOG_FILES) -> None:
        self.path = path
        self._source = source
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._lines: collections.deque[bytes] = collections.deque(maxlen=LOG_LINES)
        self._num_lines = 0
        self._unfinished = b""
        self._file: IO[bytes] | None = None
        self._size = 0
        # `last_lines` reads the pipe itself, so that it never misses output from before an event.
        self._lock = threading.Lock()
        os.set_blocking(source.fileno(), False)
        self._thread = threading.Thread(target=self._copy, name=f"log of {path.stem}", daemon=True)
        self._thread.start()

    def last_lines(self) -> list[str]:
        with self._lock:
            self._read()
            return [line.decode(errors="replace") for line in (*self._lines, *filter(None, [self._unfinished]))]

    def new_lines(self, num_seen: int) -> tuple[int, list[str]]:
        """Return the number of whole lines so far, and the last of those after the first `num_seen`."""
        with self._lock:
            self._read()
            num_new = min(len(self._lines), self._num_lines - num_seen)
            lines = itertools.islice(self._lines, len(self._lines) - num_new, None)
            return self._num_lines, [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Wait until the rest of the pipe is copied, once no process writes to it."""
        self._thread.join(GRACE_SECONDS)

    def _copy(self) -> None:
        readable = select.poll()
        readable.register(self._source, select.POLLIN)
        is_open = True
        while is_open:
            readable.poll()
            with self._lock:
                is_open = self._read()
        with self._lock:
            self._write(self._unfinished)
            self._source.close()
            if self._file is not None:
                self._file.close()

    def _read(self) -> bool:
        """Copy the content of the pipe; return False at its end."""
        if self._source.closed:
            return False
        try:
            data = os.read(self._source.fileno(), _PIPE_BYTES)
        except BlockingIOError:
            return True
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        self._num_lines += len(lines)
        for line in lines:
            self._lines.append(line)
            self._write(line + b"\n")
        return bool(data)

    def _write(self, line: bytes) -> None:
        # A full disk must cost only the log: the engine would block on a pipe that is not read.
        with contextlib.suppress(OSError):
            if self._file is None or self._size >= self._max_bytes:
                self._file, self._size = self._rotate(self._file), 0
            self._file.write(line)
            self._file.flush()
            self._size += len(line)

    def _rotate(self, file: IO[bytes] | None) -> IO[bytes]:
        if file is not None:
            file.close()
        names = [self.path, *(self.path.with_suffix(f".log.{number}") for number in range(1, self._num_files))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            with contextlib.suppress(FileNotFoundError):
                newer.rename(older)
        return os.fdopen(os.open(self.path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb")


def _shared_memory(group: int) -> set[Path]:
    """Find the files through which a group's processes share memory; not those in folders, such as weights."""
    found = set()
    for pid in list_group(group):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line}
    return {path for path in found if path.parent == Path("/dev/shm")}


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
