"""Run a function on N ranks, each a process of its own, and never hang.

    def losses(layout): ...             # at the top level of a module

    def test_it():
        first, second = run_ranks(losses, 2, "tp2")

Every rank has what torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); the function starts
torch.distributed itself. Ranks are on the CPU platform, or with `platform="rehearsed"` on the emulated device, or with
`platform=nursery.WITH_TRANSFORMER_ENGINE` on the CPU beside a stand-in for TransformerEngine. The platform is installed
before any module of theirs is imported.
"""

import contextlib
import functools
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from tests.nursery import NUM_THREADS, Failure, Job

ROOT = Path(__file__).resolve().parent.parent
_POLL_SECONDS = 0.02
# Seconds that ranks get to write where they hang before they are killed.
_DUMP_SECONDS = 1.0
_OUTPUT_CHARACTERS = 4000
# Linux gives connections ports from 32768 on.
_FIRST_PORT, _NUM_PORTS = 12000, 8000
_held_ports: list[socket.socket] = []
_started: list[subprocess.Popen[bytes]] = []


class RanksError(AssertionError):
    """A rank failed, or did not finish in time; the text holds its own traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 600,
    num_threads: int = NUM_THREADS,
    platform: str = "cpu",
) -> list[Any]:
    """Run `function(*args)` on each rank and return the results, in the order of ranks.

    When a rank fails, the others are ended at once and the error shows that rank's traceback. When `timeout` seconds
    have passed, all ranks are ended and the error shows where each of them was.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(function.__module__, function.__qualname__, args, num_threads)
        (Path(folder) / "job").write_bytes(pickle.dumps(job))
        ranks = [_Rank(rank, world_size, Path(folder), num_threads, platform) for rank in range(world_size)]
        try:
            address = f"127.0.0.1:{free_port()}"
            for rank in ranks:
                rank.start(address)
            _wait(ranks, time.monotonic() + timeout, timeout)
            return [rank.result() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()


@functools.cache
def _nursery(platform: str) -> IO[bytes]:
    """Return the pipe to the process that a platform's ranks are forked from.

    It is started here, and ends when this process does; a process that was forked off one takes that.
    """
    if (pipe := os.environ.get(_variable(platform))) is not None:
        return open(pipe, "wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.nursery", str(os.getpid()), platform],
        cwd=ROOT,
        env={**os.environ, **_threads(1)},
        stdin=subprocess.PIPE,
    )
    _started.append(process)
    assert process.stdin is not None
    return process.stdin


def _variable(platform: str) -> str:
    """Return the variable that names the pipe to a platform's nursery."""
    return f"TEST_NURSERY_{platform.replace(' ', '_').upper()}"


def _is_gone(nursery: IO[bytes]) -> bool:
    """Tell whether no process reads the pipe."""
    poll = select.poll()
    poll.register(nursery, 0)
    return bool(poll.poll(0))


def fork(folder: Path, environment: Mapping[str, str], platform: str = "cpu") -> None:
    """Fork a rank for the job in the folder; `process-RANK` and `exit-RANK` will hold its process and its end."""
    nursery = _nursery(platform)
    pipe = {_variable(platform): f"/proc/{os.getpid()}/fd/{nursery.fileno()}"}
    nursery.write(json.dumps([str(folder), {**environment, **pipe}]).encode() + b"\n")
    nursery.flush()


def check_nursery(platform: str = "cpu") -> None:
    if _is_gone(_nursery(platform)):
        raise RanksError("the process that ranks are forked off is gone; its output is above")


def read(path: Path) -> Any:
    """Read what a rank or its keeper wrote; return None before the file exists."""
    with contextlib.suppress(FileNotFoundError):
        return pickle.loads(path.read_bytes())
    return None


def _threads(number: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(number), "MKL_NUM_THREADS": str(number)}


class _Rank:
    """One process, which leads a process group of its own so that its children end with it."""

    def __init__(self, rank: int, world_size: int, folder: Path, num_threads: int, platform: str) -> None:
        self.rank = rank
        self._world_size = world_size
        self._folder = folder
        self._num_threads = num_threads
        self._platform = platform
        self._is_started = False

    def start(self, address: str) -> None:
        host, port = address.split(":")
        environment = {
            **os.environ,
            **_threads(self._num_threads),
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": host,
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo",
        }
        fork(self._folder, environment, self._platform)
        self._is_started = True

    def exit_code(self) -> int | None:
        check_nursery(self._platform)
        return self._read("exit")

    def failure(self) -> Failure | None:
        """Return why this rank failed; None while it runs and if it did not fail."""
        if failure := self._read("failure"):
            return failure
        code = self.exit_code()
        if code is None or code == 0:
            return None
        reason = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Failure(time.monotonic(), f"{reason}, without a Python exception")

    def result(self) -> Any:
        return self._read("result")

    def output(self) -> str:
        text = (self._folder / f"output-{self.rank}").read_text(errors="replace")
        return text if len(text) <= _OUTPUT_CHARACTERS else "...\n" + text[-_OUTPUT_CHARACTERS:]

    def ask_where(self) -> None:
        """Let the rank write the stacks of its threads into its output."""
        self._signal_group(signal.SIGUSR1)

    def kill(self) -> None:
        # The file may still be on its way.
        while self._is_started and self._read("exit") is None and not _is_gone(_nursery(self._platform)):
            self._signal_group(signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
        # Children may outlive the rank itself.
        self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: int) -> None:
        if (process := self._read("process")) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, number)

    def _read(self, kind: str) -> Any:
        return read(self._folder / f"{kind}-{self.rank}")


def _wait(ranks: list[_Rank], deadline: float, timeout: float) -> None:
    """Return when every rank has succeeded; raise when one has failed or the deadline has passed."""
    while True:
        codes = [rank.exit_code() for rank in ranks]
        if any(code not in (None, 0) for code in codes):
            raise RanksError(_describe_failures(ranks))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            raise RanksError(_describe_hang(ranks, timeout))
        time.sleep(_POLL_SECONDS)


def _describe_failures(ranks: list[_Rank]) -> str:
    """Describe the failures in the order of their times: a rank often fails only because another one did."""
    failures = [(rank, failure) for rank in ranks if (failure := rank.failure()) is not None]
    failures.sort(key=lambda pair: pair[1].time)
    return "\n".join(
        f"rank {rank.rank} of {len(ranks)} failed:\n{failure.text}\nits output:\n{rank.output()}"
        for rank, failure in failures
    )


def _describe_hang(ranks: list[_Rank], timeout: float) -> str:
    running = [rank for rank in ranks if rank.exit_code() is None]
    for rank in running:
        rank.ask_where()
    time.sleep(_DUMP_SECONDS)
    where = "\n".join(f"rank {rank.rank} was here:\n{rank.output()}" for rank in running)
    names = ", ".join(str(rank.rank) for rank in running)
    return f"after {timeout} seconds rank {names} of {len(ranks)} had not finished\n{where}"


def free_port() -> int:
    """Find a port that no process listens on, and reserve it among processes that ask here while this one lives.

    It is below those that the system gives out by itself: a rank listens on it only later, when others have had the
    time to take it.
    """
    for port in range(_FIRST_PORT + os.getpid() % _NUM_PORTS, _FIRST_PORT + 2 * _NUM_PORTS):
        held = socket.socket(socket.AF_UNIX)
        try:
            # A name without a file, which ends with this process.
            held.bind(f"\0megatron_rl test port {port}")
            with socket.socket() as listener:
                listener.bind(("127.0.0.1", port))
        except OSError:
            held.close()
            continue
        _held_ports.append(held)
        return port
    raise AssertionError("no port is free")
