"""A process that ends with the one that started it, whatever ended that one. Linux only; nothing but the standard
library, so that an engine can have it in its first millisecond."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent ends; end it now if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"this process cannot be tied to the one that started it: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        os._exit(1)


def children_die_with_this_process() -> None:
    """The same for every process that is forked from this one, and from those."""

    parents = [os.getpid()]

    def in_child() -> None:
        parent, parents[0] = parents[0], os.getpid()
        die_with_parent(parent)

    os.register_at_fork(after_in_child=in_child)
