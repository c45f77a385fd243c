"""The process of a rollout as the sidecar sees it: its descendants, their sockets, and their end."""

import contextlib
import errno
import ipaddress
import os
import signal
import socket
import struct
import sys
from collections.abc import Collection, Iterator, Sequence

from megatron_rl.confined.worker import find_parent

# Of linux/netlink.h, sock_diag.h and inet_diag.h.
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_ANY_COOKIE = 0xFFFFFFFF
_HEADER = struct.Struct("=IHHII")
# The place of the inode in an `inet_diag_msg`: after four bytes, the ends of the connection, and four numbers.
_INODE_OFFSET = 4 + 48 + 16
_PIECE = 1 << 13
_PROTOCOL = socket.IPPROTO_TCP

Address = tuple[str, int]

CALLERS = "calls of other processes"
DESCENDANTS = "processes that agents leave"


def find_socket(server: Address, client: Address) -> int | None:
    """Return the inode of a TCP connection's client; 0 if its process has closed it, None if it is on another host.

    Raise an OSError if the kernel does not tell. A kernel without CONFIG_INET_TCP_DIAG finds no connection.
    """
    ends = [ipaddress.ip_address(host.partition("%")[0]) for host, _ in (client, server)]
    family = socket.AF_INET if ends[0].version == 4 else socket.AF_INET6
    ports = struct.pack("!HH", client[1], server[1])
    addresses = b"".join(end.packed.ljust(16, b"\0") for end in ends)
    body = struct.pack("=4BI", family, _PROTOCOL, 0, 0, _ANY_COOKIE)
    body += ports + addresses + struct.pack("=III", 0, _ANY_COOKIE, _ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
        link.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body)
        answer = link.recv(_PIECE)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind != _NLMSG_ERROR:
        return int.from_bytes(answer[_HEADER.size + _INODE_OFFSET :][:4], sys.byteorder)
    code = -int.from_bytes(answer[_HEADER.size :][:4], sys.byteorder, signed=True)
    if code != errno.ENOENT:
        raise OSError(code, f"sock_diag: {os.strerror(code)}")
    return 0 if ends[0].is_loopback else None


def list_children(pid: int) -> list[int]:
    """List the children of a process, those that have ended too; none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def list_tree(pid: int) -> Iterator[int]:
    yield pid
    for child in list_children(pid):
        yield from list_tree(child)


def list_ancestors(pid: int) -> Iterator[int]:
    """Yield a process, its parent, and so on, up to the first process or one that is gone."""
    # Unlike lists of children, this is exact while siblings end.
    while pid > 0:
        yield pid
        pid = find_parent(pid)


def list_files(pid: int) -> Iterator[str]:
    """Yield what a process has open; nothing if it has ended."""
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def find_owner(inode: int, first: Sequence[int]) -> int | None:
    """Return a process that has this socket; None if none has. It looks at `first` before all others."""
    name = f"socket:[{inode}]"
    if (owner := next((pid for pid in first if name in list_files(pid)), None)) is not None:
        return owner
    # Most callers are young, and their numbers high.
    others = sorted((int(entry) for entry in os.listdir("/proc") if entry.isdigit()), reverse=True)
    return next((pid for pid in others if name in list_files(pid)), None)


def find_unknown() -> dict[str, str]:
    """Find what the kernel does not tell about processes; return each with the reason."""
    unknown: dict[str, str] = {}
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
        ):
            if find_socket(server.getsockname(), client.getsockname()) != os.fstat(client.fileno()).st_ino:
                unknown[CALLERS] = "the kernel does not find connections (CONFIG_INET_TCP_DIAG)"
    except OSError as error:
        unknown[CALLERS] = str(error)
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        unknown[DESCENDANTS] = "the kernel lists no children of processes (CONFIG_PROC_CHILDREN)"
    return unknown


def end_tree(pid: int) -> None:
    """Kill a process and its descendants; all of them are stopped before, so that none starts another one."""
    stopped: set[int] = set()
    while new := set(list_tree(pid)) - stopped:
        for one in new:
            _send(one, signal.SIGSTOP)
        stopped |= new
    for one in stopped:
        _send(one, signal.SIGKILL)


def end_strays(worker: int, known: Collection[int]) -> None:
    """Kill children of a worker that are in other sessions than its own, but for known ones, with their descendants.

    They are the worker's because the rollout's process that they were left by has ended.
    """
    for child in set(list_children(worker)) - set(known):
        with contextlib.suppress(OSError):
            if os.getsid(child) != os.getsid(worker):
                end_tree(child)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
