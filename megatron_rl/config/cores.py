"""The shares of a host's cores that the ranks and engines on it compute with.

Both compute at the same time, so with more threads than cores they take caches and time slices from each other.
"""

import dataclasses
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclasses.dataclass(frozen=True)
class CoreShares:
    """Threads of each process on this host that computes on its cores."""

    num_cores: int
    """The cores that the run may use."""
    threads_of_rank: int
    threads_of_worker: int
    """Threads of one worker of an engine, which has a worker for each device."""


def count_cores(quota: Path = _QUOTA) -> int:
    """Count the cores that this process may use, by its affinity and its container's quota."""
    num_cores = len(os.sched_getaffinity(0))
    try:
        limit, period = quota.read_text().split()
        return max(1, min(num_cores, int(limit) // int(period)))
    except (OSError, ValueError):
        # The quota is missing, or it is "max".
        return num_cores


def share_cores(num_cores: int, num_ranks: int, num_workers: int, threads_of_worker: int | None = None) -> CoreShares:
    """Divide the cores of a host: half for engines, the rest for ranks, and a thread for each process at least."""
    if threads_of_worker is None:
        of_engines = num_cores // 2 if num_ranks else num_cores
        threads_of_worker = max(1, of_engines // max(1, num_workers))
    left = num_cores - threads_of_worker * num_workers
    return CoreShares(num_cores, max(1, left // max(1, num_ranks)), threads_of_worker)


def find_asked_threads() -> int | None:
    """Return the threads that a person asked for, for a rank: OMP_NUM_THREADS, unless torchrun set it by itself."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    if not said.isdecimal() or ("TORCHELASTIC_RUN_ID" in os.environ and not _has_parent_been_told()):
        return None
    return int(said)


def _has_parent_been_told() -> bool:
    """Return whether OMP_NUM_THREADS was set when torchrun began."""
    try:
        begun_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in begun_with)
