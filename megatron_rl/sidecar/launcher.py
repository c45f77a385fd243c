"""Where an engine's processes run: on this host here; whatever else starts engines follows the same two classes.

Invariants of local processes:

- an engine's processes are one process group, and a session, of their own;
- each ends when the process that started it ends (`sidecar/parent.py`), so that nothing outlives the sidecar, whatever
  killed it;
- what an engine prints is kept in a file that never grows beyond a bound, and its last lines are at hand for errors.
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Protocol

from megatron_rl.sidecar import parent

LOG_BYTES = 16 << 20
LOG_FILES = 3
TAIL_LINES = 40
# The processes of an engine follow each other's death; then the one that tracks its shared memory removes what they
# left, hundreds of megabytes. It must not be killed before, and a busy host gives it its turn late.
GRACE_SECONDS = 15.0
_POLL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """What is to be started."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it: nothing is inherited that is not named here."""
    log: Path
    """Where its output goes."""
    address: str
    """Where it will answer: the path of a unix socket."""


class Handle(Protocol):
    """Something that was started."""

    address: str

    def poll(self) -> str | None:
        """How it ended; None while it runs."""
        ...

    def kill(self) -> None:
        """End it with all it started; returns when nothing of it is left."""
        ...

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines it printed."""
        ...


class Launcher(Protocol):
    """What starts engines."""

    def start(self, spec: ProcessSpec) -> Handle:
        """Start it; returns at once."""
        ...


class LocalLauncher:
    """Starts processes on this host.

    The kernel ends a process when the *thread* that started it ends: call `start` from a thread that lives as long as
    the engine is to live.
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
        self._process = process
        self._log = log

    def poll(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        shared_memory = _shared_memory(self.pid)
        with contextlib.suppress(ProcessLookupError):
            # Only while it has not been waited for is the number surely still its own.
            if self._process.poll() is None:
                self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + GRACE_SECONDS
        while _group_exists(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for path in shared_memory:
            # What compiled code made is not tracked.
            path.unlink(missing_ok=True)
        self._log.close()

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        return self._log.tail(num_lines)


class Log:
    """Copies what a process prints into a file; a full one is renamed, and the oldest goes."""

    def __init__(self, source: IO[bytes], path: Path, max_bytes: int = LOG_BYTES, num_files: int = LOG_FILES) -> None:
        self._source = source
        self._path = path
        self._max_bytes = max_bytes
        self._num_files = num_files
        self._lines: collections.deque[bytes] = collections.deque(maxlen=1000)
        self._thread = threading.Thread(target=self._copy, name=f"log of {path.stem}", daemon=True)
        self._thread.start()

    def tail(self, num_lines: int) -> str:
        lines = list(self._lines)[-num_lines:]
        return b"".join(lines).decode(errors="replace")

    def close(self) -> None:
        """Wait for what is still in the pipe; nobody writes to it any more."""
        self._thread.join(GRACE_SECONDS)

    def _copy(self) -> None:
        size = self._max_bytes
        file: IO[bytes] | None = None
        with self._source:
            for line in self._source:
                self._lines.append(line)
                # A disk that is full costs the log, not the engine, which would stop at a pipe that nobody reads.
                with contextlib.suppress(OSError):
                    if size >= self._max_bytes or file is None:
                        file, size = self._rotate(file), 0
                    file.write(line)
                    file.flush()
                    size += len(line)
        if file is not None:
            file.close()

    def _rotate(self, file: IO[bytes] | None) -> IO[bytes]:
        if file is not None:
            file.close()
        names = [self._path, *(self._path.with_suffix(f".log.{number}") for number in range(1, self._num_files))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            with contextlib.suppress(FileNotFoundError):
                newer.rename(older)
        return os.fdopen(os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb")


def _shared_memory(group: int) -> set[Path]:
    """The files that the processes of a group share memory through; not what lies there in folders, like weights."""
    found = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and os.getpgid(int(name)) == group:
                lines = Path(f"/proc/{name}/maps").read_text().splitlines()
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
