"""Set the cores that the threads of a running process may use."""

import contextlib
import os
from collections.abc import Iterable

import psutil


def pin(process: psutil.Process, cores: Iterable[int]) -> None:
    """Keep all threads of a process on these cores. Threads end while they are listed, and so do processes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)
