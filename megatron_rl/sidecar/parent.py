"""Ties a process to its parent, so that it ends with it, however the parent ends. Linux only.

Only the standard library is imported, so that an engine can import this in its first millisecond. A process learns its
parent's number from the environment: if the parent is already gone, the kernel names another process.

`python -m megatron_rl.sidecar.parent COMMAND NUMBER` runs a shell, all of whose processes end with it and with the
parent of this number.
"""

import contextlib
import ctypes
import os
import signal
import sys
from typing import Any, NoReturn

VARIABLE = "MEGATRON_RL_PARENT"
_PR_SET_PDEATHSIG = 1


def tie() -> None:
    """End this process when its parent ends, and likewise every process that is forked from it.

    A spawned process has to call this itself.
    """
    _die_with_parent()
    os.register_at_fork(after_in_child=_die_with_parent)


def _die_with_parent() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"this process cannot be tied to the one that started it: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(os.environ.get(VARIABLE, os.getppid())):
        os._exit(1)
    os.environ[VARIABLE] = str(os.getpid())


def run_shell(command: str, parent: int) -> int:
    """Run a command to its end; return its exit code as a shell does."""
    import subprocess

    shell = subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)

    def end(*_: Any) -> NoReturn:
        kill()
        # Who waits for this process then finds the shell's ended too. `Popen.wait` holds a lock where this interrupts.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(shell.pid, 0)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        end()
    code = shell.wait()
    kill()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run_shell(sys.argv[1], int(sys.argv[2])))
