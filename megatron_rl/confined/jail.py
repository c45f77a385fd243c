"""A Python program alone in a folder: `python -m megatron_rl.confined.jail JSON` becomes it.

It is one process with one thread, and can start no other, so that one SIGKILL ends all of it and the limits of a
process are the limits of the program. It reads the system's libraries and Python's, writes files of its folder, and has
no socket. Landlock does not cover all calls that change what is outside; seccomp refuses the others.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_rl.confined.confinement import (
    Access,
    RefusedCall,
    drop_capabilities,
    landlock_version,
    no_new_privileges,
    refuse_calls,
    restrict_files,
    restrict_sockets,
    signal_at_parents_death,
)

MAIN = "main.py"
LARGEST_FILE = 4 << 20
"""Bytes of a file that it writes, its output included."""
STARTED = b"+"
_NUM_FILES = 64
# It removes none: a file that is open or mapped would use memory and disk, and no longer be counted.
_OWN_FILES = Access.READ | Access.WRITE_FILE | Access.TRUNCATE | Access.MAKE_REG
# Numbers on x86_64 and aarch64; a call with one number is on x86_64 alone.
_NEVER = {
    # Processes and threads, and namespaces, in which a process has root's powers.
    "fork": (57,), "vfork": (58,), "clone": (56, 220), "unshare": (272, 97), "setns": (308, 268), "ptrace": (101, 117),
    # Signals and priorities of others.
    "tkill": (200, 130), "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # Modes, owners, times and attributes of files, and their contents by name.
    "chmod": (90,), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92,),
    "fchown": (93, 55), "lchown": (94,), "fchownat": (260, 54), "utime": (132,), "utimes": (235,), "futimesat": (261,),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469), "truncate": (76, 45),
    # Files that are in no folder, and room in a file beyond its size.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "fallocate": (285, 47),
    # Memory and queues that processes share by a number or a name, keys, sockets, and what only debuggers need.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "socket": (41, 198), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282),
}  # fmt: skip
_TO_ITSELF = {"kill": (62, 129), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240)}
_SOMETIMES = {
    "prlimit64": (302, 261), "prctl": (157, 167), "fcntl": (72, 25), "ioctl": (16, 29), "openat": (257, 56),
    "open": (2,),
}  # fmt: skip
# Their arguments are in memory, which no filter can read: clone3 and openat2.
_MISSING = (435, 437)
# The bit of O_TMPFILE, for a file that is in no folder.
_UNNAMED = 0o20000000
_OPENING = os.O_TRUNC | os.O_ACCMODE
_ARGUMENTS = (
    # PR_SET_PDEATHSIG.
    RefusedCall("prctl", 0, (1,), True),
    # F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP: signals to others. F_SETLEASE keeps others from opening.
    # FS_IOC_SETFLAGS and FS_IOC_FSSETXATTR set attributes.
    RefusedCall("fcntl", 1, (8, 10, 15, 1024), True),
    RefusedCall("ioctl", 1, (0x8901, 0x8902, 0x40086602, 0x401C5820), True),
    RefusedCall("open", 1, (_UNNAMED,), True, _UNNAMED),
    RefusedCall("openat", 2, (_UNNAMED,), True, _UNNAMED),
    # Before Linux 6.2, Landlock lets a file be emptied that may only be read.
    RefusedCall("open", 1, (os.O_TRUNC, _OPENING), True, _OPENING),
    RefusedCall("openat", 2, (os.O_TRUNC, _OPENING), True, _OPENING),
)


def become_program(
    folder: str, read: Sequence[str], seconds: int, memory_bytes: int, parent: int, report: int
) -> NoReturn:
    """Confine the calling process, and run the folder's program in it.

    The seconds count a processor's time. STARTED is written to the descriptor `report`, or else why it cannot start.
    """
    try:
        signal_at_parents_death(signal.SIGKILL)
        if os.getppid() != parent:
            raise OSError("its parent has ended")
        os.set_inheritable(report, False)
        _confine(folder, read)
        # At last: less memory may be left than Python has already.
        for what, most in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_FSIZE, LARGEST_FILE),
            (resource.RLIMIT_NOFILE, _NUM_FILES),
            (resource.RLIMIT_AS, memory_bytes),
        ):
            hard = resource.getrlimit(what)[1]
            resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard),) * 2)
    except OSError as error:
        os.write(report, str(error).encode())
        os._exit(1)
    os.write(report, STARTED)
    os.execv(sys.executable, [sys.executable, MAIN])


def _confine(folder: str, read: Sequence[str]) -> None:
    no_new_privileges()
    allowed = [(path, Access.READ) for path in read]
    restrict_files(landlock_version(), [*allowed, (folder, _OWN_FILES), ("/dev/null", Access.OF_FILES)])
    drop_capabilities()
    restrict_sockets(is_only_tcp=False)
    own = os.getpid()
    refusals = [*map(RefusedCall, _NEVER), *(RefusedCall(name, 0, (own,)) for name in _TO_ITSELF), *_ARGUMENTS]
    calls = _NEVER | _TO_ITSELF | _SOMETIMES
    machines = {
        machine: {name: numbers[place] for name, numbers in calls.items() if place < len(numbers)}
        for place, machine in enumerate(("x86_64", "aarch64"))
    }
    refuse_calls([*refusals, RefusedCall("prlimit64", 0, (0, own))], machines, _MISSING)


if __name__ == "__main__":
    become_program(*json.loads(sys.argv[1]))
