"""Removes the folders of a process at its end, also if it is killed."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

# Its input ends when this process closes it, or when the kernel does so. A scheduler sends SIGTERM to all processes of
# a job.
_SCRIPT = 'trap "" TERM; cat > /dev/null; rm -rf -- "$@"'


@contextlib.contextmanager
def removed_afterwards(*folders: Path) -> Iterator[None]:
    """Remove folders with all that is in them, at the end of the context or of this process."""
    # In a session of its own, it does not get the signals of a terminal.
    guard = subprocess.Popen(
        ["sh", "-c", _SCRIPT, "sh", *map(str, folders)], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    try:
        yield
    finally:
        guard.stdin.close()
        guard.wait()
