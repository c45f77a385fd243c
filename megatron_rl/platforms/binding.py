"""Which cores this process runs on."""

import os
from pathlib import Path


def read_core_list(path: Path) -> set[int]:
    """Read cores as the kernel lists them, "0-31,64-95"; the set is empty if the file does not say."""
    try:
        parts = [part.split("-") for part in path.read_text().split(",")]
        return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def is_bound() -> bool:
    """Whether somebody has bound this process to some of the host's cores."""
    return len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)


def bind_to(cores: set[int]) -> None:
    """Bind this process to these cores, unless it is bound already, or they are not there."""
    if cores and not is_bound() and cores <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, cores)
