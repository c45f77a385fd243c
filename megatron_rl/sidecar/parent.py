"""Ties a process to its parent, so that it ends with it, however the parent ends. Linux only.

Only the standard library is imported, so that an engine can import this in its first millisecond. A process learns its
parent's number from the environment: if the parent is already gone, the kernel names another process.
"""

import ctypes
import os
import signal
import sys

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
