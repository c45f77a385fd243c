"""Closes the sockets that torch's gloo leaves listening in a worker on a CPU.

Each of torch's process groups listens for its peers, on loopback, where every user of the host reaches it. When vLLM
answers its first request the groups are made and their peers connected: nobody has to reach them any more.
"""

import os
import socket


def close_listeners() -> int:
    """Close every listening TCP socket of this process; how many there were.

    The number of each stays taken, by a socket without a peer: gloo goes on to own it.
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
