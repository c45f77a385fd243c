"""Private folders outside a run's folder, for sockets and shared memory: each belongs to the process that makes it.

A process keeps a lock on its folder until it ends. So a folder without a lock is left by a process that was killed, and
the next start on this host removes it. systemd leaves a locked folder alone when it tidies /tmp.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import zlib
from pathlib import Path

SOCKET_FOLDER_BYTES = 70
"""The longest path of a folder for sockets. A socket's path may have 107 bytes, and vLLM's have names of 36."""
# Below a folder that `make_socket_folder` returns, each engine has a folder with its name.
_ENGINE_NAME_BYTES = 16
_SOCKETS = "mrl-"


def make_socket_folder() -> Path:
    """Make a folder for the sockets of engines, whose path is short whatever TMPDIR and the run's folder are.

    Not in XDG_RUNTIME_DIR, which is removed when its user logs out, while a run continues.
    """
    made = len(f"/{_SOCKETS}{_name_host()}xxxxxxxx/") + _ENGINE_NAME_BYTES
    places = (Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm"))
    short = [place for place in places if len(os.fsencode(place)) + made <= SOCKET_FOLDER_BYTES]
    return make_folder(_SOCKETS, next((place for place in short if os.access(place, os.W_OK | os.X_OK)), short[0]))


def make_folder(prefix: str, parent: Path) -> Path:
    """Make a folder of mode 700 that is locked until this process ends, and remove those that killed ones have left."""
    prefix += _name_host()
    for path in parent.glob(f"{prefix}*"):
        _remove_if_left(path)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # Never closed: the lock ends with the process, however it ends.
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        # A file system without locks keeps what is left there.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # Another start may have taken it for a leftover before it was locked.
        if folder.exists():
            return folder
        os.close(lock)


def _remove_if_left(path: Path) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _name_host() -> str:
    """Name this host in a few characters: hosts that share a folder may not see each other's locks."""
    return f"{zlib.crc32(socket.gethostname().encode()) & 0xFFFF:04x}-"
