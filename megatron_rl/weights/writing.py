"""Tells whether a folder of tensors is still being written.

One process holds a lock on the file that counts what has been written until all writers are done. The system takes the
lock from a process that ends. This needs only the standard library, so that the sidecar can ask without torch.
"""

import fcntl
import os
from pathlib import Path

COUNTS_FILE = "arrived"


def is_being_written(folder: Path) -> bool:
    """Return whether a writer that has not ended may still write into the folder."""
    try:
        descriptor = os.open(folder / COUNTS_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return is_locked(descriptor)
    finally:
        os.close(descriptor)


def is_locked(descriptor: int) -> bool:
    """Return whether a writer holds the lock on the open file of counts."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
