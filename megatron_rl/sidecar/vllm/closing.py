"""Files and sockets of a worker on a CPU that other processes could open, closed once they have been used."""

import os
import socket
from pathlib import Path

_FOLDER = Path("/dev/shm")
# The prefix of files that vLLM's kernels make. Python's own tracker process removes the files that Python makes.
_PREFIX = "vllm_dist_"


def take_names_off(maps: Path = Path("/proc/self/maps"), folder: Path = _FOLDER) -> int:
    """Unlink the kernels' shared-memory files that this process maps; return their number."""
    mapped = {Path(fields[5]) for line in maps.read_text().splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    # Another worker may have unlinked a file already.
    found = [path for path in mapped if path.parent == folder and path.name.startswith(_PREFIX) and path.exists()]
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def close_listeners() -> int:
    """Close every listening TCP socket of this process; return their number.

    An unconnected socket takes over each file descriptor, because gloo still uses the number as its own.
    """
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    listening = [number for number in numbers if _listens(number)]
    for number in listening:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            os.dup2(ours.fileno(), number, inheritable=False)
    return len(listening)


def _listens(number: int) -> bool:
    try:
        copy = socket.socket(fileno=os.dup(number))
    except OSError:
        return False
    with copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
