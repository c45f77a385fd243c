"""The hardware of this host as the processes of a run divide it: the accelerators for engines, and the cores.

Devices are numbered among the visible ones, as torch numbers them: with CUDA_VISIBLE_DEVICES=4,5 they are 0 and 1.
Engines take devices that no rank computes on, unless they share the ranks' own. Ranks and engines compute on cores at
the same time, so with more threads than cores they take caches and time slices from each other.
"""

import dataclasses
import glob
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
_FILES = {"cuda": "/dev/nvidia[0-9]*", "npu": "/dev/davinci[0-9]*"}

Kind = Literal["cuda", "npu"]
_GROUP = Path("/sys/fs/cgroup")
_QUOTA = _GROUP / "cpu.max"
_MEMORY = Path("/proc/meminfo")


def list_visible_devices(kind: Kind, environment: Mapping[str, str] = os.environ) -> list[str]:
    """List the names of the visible devices, as the variable of this kind has them."""
    given = environment.get(VARIABLES[kind])
    if given is None:
        return [str(number) for number in range(len(list_files(kind)))]
    # CUDA ignores all that follows a name that is not a device's.
    names = (name.strip() for name in given.split(","))
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


def list_files(kind: Kind) -> list[str]:
    """List the kernel's files of the devices on this host."""
    return glob.glob(_FILES[kind])


def pick_devices(kind: Kind, first: int, num_wanted: int, used: Sequence[int] = ()) -> list[int] | None:
    """Pick devices that are not used for engines, from number `first` on; return None if too few are left."""
    free = [number for number in range(first, len(list_visible_devices(kind))) if number not in used]
    return free[:num_wanted] if 0 < num_wanted <= len(free) else None


def name_devices(kind: Kind, numbers: tuple[int, ...]) -> str:
    """Return the value of the variable with which a process sees these devices alone."""
    visible = list_visible_devices(kind)
    # If none is known to be visible, the numbers are those of the host.
    return ",".join(visible[number] if visible else str(number) for number in numbers)


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


def read_free_memory(meminfo: Path = _MEMORY, group: Path = _GROUP) -> int | None:
    """Read the bytes of memory that processes of this host can still take; None if the kernel does not say.

    A control group with a limit may leave less than the host has.
    """
    try:
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # No group, or one without a limit.
        return free
    # Pages of files that are not in use are given back.
    return min(free, max(0, limit - used + int(statistics.get("inactive_file", 0))))
