"""Fork a run's sidecar too, so that its start takes no seconds: off rank 0, before the rank runs anything.

    rank 0 ---the command and its environment, through a pipe---> seed, which becomes the sidecar

The seed is a child of the rank, as the sidecar is outside of tests. Its command line is the one that it would have.
"""

import ctypes
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_rl.sidecar import parent
from megatron_rl.sidecar.launcher import LocalHandle, LocalLauncher, Log, ProcessSpec
from tests.nursery import end_like_python, end_with, outlive_parent

_MODULE = "megatron_rl.sidecar"


class _Seed(subprocess.Popen):  # type: ignore[type-arg]
    """A forked process that the launcher takes for one that it has started."""

    def __init__(self) -> None:
        told, self._tell = os.pipe()
        output, written = os.pipe()
        rank = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._tell)
            os.close(output)
            _be_seed(told, written, rank)
        os.close(told)
        os.close(written)
        self.stdout = os.fdopen(output, "rb", 0)
        # The rest of what a Popen needs to poll, to wait and to kill.
        self.returncode = None
        self.stdin = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()

    def become(self, spec: ProcessSpec) -> None:
        environment = {**spec.environment, parent.VARIABLE: str(os.getpid())}
        with os.fdopen(self._tell, "wb") as tell:
            tell.write(json.dumps([spec.command, environment]).encode())


def plant() -> None:
    """Fork the seed of this rank's first sidecar, and let the launcher grow it."""
    seeds = [_Seed()]
    start = LocalLauncher.start

    def start_or_grow(self: LocalLauncher, spec: ProcessSpec) -> LocalHandle:
        if spec.command[1:3] != ("-m", _MODULE) or not seeds:
            return start(self, spec)
        seed = seeds.pop()
        seed.become(spec)
        assert seed.stdout is not None
        return LocalHandle(seed, spec.address, Log(seed.stdout, spec.log))

    LocalLauncher.start = start_or_grow  # type: ignore[method-assign]


def _be_seed(told: int, output: int, rank: int) -> NoReturn:
    end_with(rank)
    with os.fdopen(told, "rb") as pipe:
        text = pipe.read()
    if not text:
        # The rank starts no sidecar.
        os._exit(0)
    command, environment = json.loads(text)
    # The sidecar has to tie itself to the rank.
    outlive_parent()
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    _show_command(command)
    sys.argv = [_MODULE, *command[3:]]
    end_like_python(lambda: runpy.run_module(_MODULE, run_name="__main__"))


def _show_command(command: Sequence[str]) -> None:
    """Put a command into the memory that the system reads this process's command line from.

    Nothing else uses that memory: the variables of the first environment are gone.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end, _, last = (int(field) for field in fields[45:49])
    # A line that reaches beyond the first one is read up to its own end.
    line = " ".join(command).ljust(end - first + 1).encode()[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, line, len(line))
