"""Takes the names off the memory that the workers of an engine share on a CPU.

vLLM's workers find it by name when they start, and take the name off when they end in an orderly way; of those that are
killed it stays behind in /dev/shm. When vLLM answers its first request all of them have it: nobody looks for the name.
"""

from pathlib import Path

_FOLDER = Path("/dev/shm")
# What vLLM's kernels make. What Python makes is cleared away by a process of its own.
_PREFIX = "vllm_dist_"


def take_names_off(maps: Path = Path("/proc/self/maps"), folder: Path = _FOLDER) -> int:
    """Unlink what this process maps of it; how many there were."""
    mapped = {Path(fields[5]) for line in maps.read_text().splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    # Another worker may have been the first.
    found = [path for path in mapped if path.parent == folder and path.name.startswith(_PREFIX) and path.exists()]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)
