"""What a rank of tests/ranks.py runs: `python -m tests.ranks_worker FOLDER PARENT`."""

import ctypes
import dataclasses
import faulthandler
import functools
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Job:
    """A function by name, with its arguments."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    platform: str | None


@dataclasses.dataclass(frozen=True)
class Failure:
    """When a rank failed, on the clock that all processes of the host share, and why."""

    time: float
    text: str


def main(folder: Path, parent: int) -> int:
    _end_with(parent)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    rank = os.environ["RANK"]
    try:
        job = pickle.loads((folder / "job").read_bytes())
        _write(folder / f"result-{rank}", _run(job))
    except BaseException:
        # Before the process ends: the other ranks notice that this one is gone only after its reason stands.
        _write(folder / f"failure-{rank}", Failure(time.monotonic(), traceback.format_exc()))
        return 1
    return 0


def _run(job: Job) -> Any:
    if job.platform is not None:
        from megatron_rl import platforms

        platforms.select(job.platform).install()
    function = functools.reduce(getattr, job.qualname.split("."), importlib.import_module(job.module))
    return function(*job.args)


def _end_with(parent: int) -> None:
    """Let the kernel kill this process when the one that started it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this rank is gone")


def _write(path: Path, value: Any) -> None:
    """All of the file or none of it: another process may look at any time."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(path)


if __name__ == "__main__":
    # Under its importable name, so that what it pickles is found there.
    from tests.ranks_worker import main as importable_main

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = importable_main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    # Threads of a communicator whose peers are gone would keep the interpreter from ending.
    os._exit(code)
