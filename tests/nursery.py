"""Fork the ranks of tests/ranks.py off a process that has imported megatron: the import takes seconds, a fork none.

    tests ---a line for each rank---> nursery ---forks---> keeper ---forks---> rank

Each dies with the one to its left. A keeper writes down which process its rank is, and how that ended.
"""

import atexit
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from megatron_rl import platforms

NUM_THREADS = int(os.environ.get("TEST_THREADS", "1"))
"""The number of threads that torch has in tests, and in their ranks."""
_PR_SET_PDEATHSIG = 1
# The platform cpu, with a stand-in for TransformerEngine that megatron-core finds.
WITH_TRANSFORMER_ENGINE = "cpu with transformer_engine"
# Modules that take long to import, and that most ranks use. A fault that a run's test plants in a function that other
# modules import by name is planted before they are imported: those modules of `command_line` and `trainer.loop`
# are left out.
_PRELOADED = (
    "megatron.core.dist_checkpointing", "megatron.core.distributed", "megatron.core.models.gpt",
    "megatron.core.optimizer", "megatron.core.pipeline_parallel",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama", "httpcore", "hypothesis", "pytest", "rich.progress",
    "megatron_rl.sidecar.child", "megatron_rl.sidecar.main", "megatron_rl.trainer.loop.learner",
    "megatron_rl.trainer.loop.saver", "megatron_rl.trainer.mcore.checkpoint.checkpointer",
    "megatron_rl.trainer.mcore.step.roles",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Job:
    """A function by name, with its arguments."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    num_threads: int


@dataclasses.dataclass(frozen=True)
class Failure:
    """A rank's reason for failing, and its time on the clock that all processes of the host share."""

    time: float
    text: str


def platform_name() -> str:
    """Return the platform that this rank runs on."""
    return next(name for name in platforms.NAMES if platforms.is_installed(name))


def main(parent: int, platform: str) -> None:
    """Fork a rank for each line: a folder, with the rank's job in it, and the rank's environment."""
    end_with(parent)
    if platform == "rehearsed":
        importlib.import_module("tests.rehearsal.platform").install()
    else:
        if platform == WITH_TRANSFORMER_ENGINE:
            importlib.import_module("tests.stand_in_transformer_engine").install()
            platform = "cpu"
        platforms.select(platform).install()
    for name in _PRELOADED:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the other threads"
    # Collections of garbage in a rank would look at all that was imported here, and copy its memory.
    gc.freeze()
    # No process waits for a keeper, so the system may drop it when it ends.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.stdout.flush()
    for line in sys.stdin:
        folder, environment = json.loads(line)
        nursery = os.getpid()
        if os.fork() == 0:
            _keep(Path(folder), environment, nursery)


def _keep(folder: Path, environment: dict[str, str], nursery: int) -> NoReturn:
    end_with(nursery)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_rank(folder, environment, keeper)
    _write(folder / f"process-{environment['RANK']}", pid)
    _, status = os.waitpid(pid, 0)
    _write(folder / f"exit-{environment['RANK']}", os.waitstatus_to_exitcode(status))
    os._exit(0)


def _be_rank(folder: Path, environment: dict[str, str], keeper: int) -> NoReturn:
    """Run as a rank, and lead a process group of its own, so that its children end with it."""
    os.setsid()
    end_with(keeper)
    os.environ.clear()
    os.environ.update(environment)
    rank = environment["RANK"]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 0
    try:
        _write(folder / f"result-{rank}", _run(pickle.loads((folder / "job").read_bytes())))
    except BaseException:
        # Before the process ends: the other ranks notice that this one is gone only after its reason stands.
        _write(folder / f"failure-{rank}", Failure(time.monotonic(), traceback.format_exc()))
        code = 1
    sys.stdout.flush()
    # Threads of a communicator whose peers are gone would keep the interpreter from ending.
    os._exit(code)


def _run(job: Job) -> Any:
    import torch

    torch.set_num_threads(job.num_threads)
    function = functools.reduce(getattr, job.qualname.split("."), importlib.import_module(job.module))
    return function(*job.args)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when the one that started it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Undo `end_with`."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, 0)


def end_like_python(action: Callable[[], object]) -> NoReturn:
    """Run the action, and end as Python would: non-daemon threads, functions registered for the exit, the code."""
    code = 1
    try:
        action()
        code = 0
    except SystemExit as error:
        code = _find_code(error)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _find_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return (error.code or 0) & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _write(path: Path, value: Any) -> None:
    """Write all of the file or none of it: another process may look at any time."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(value))
    unfinished.rename(path)


if __name__ == "__main__":
    # Under its importable name, so that pickle finds its functions there.
    from tests.nursery import main as importable_main

    importable_main(int(sys.argv[1]), sys.argv[2])
