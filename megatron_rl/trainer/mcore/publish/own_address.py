"""The address at which the engines' hosts reach rank 0's host, for a stream.

If all engines are on rank 0's own host, that is the loopback address. Otherwise it is the address from which rank 0's
host connects to all other hosts that have engines; engines of its own host reach that one too.
"""

import ipaddress
import socket
from collections.abc import Sequence

from megatron_rl.errors import UsageError

_LOOPBACK = "127.0.0.1"
_ANY_PORT = 9


def find_own_address(hosts: Sequence[str]) -> str:
    """Return the address at which all of these hosts, given by name or address, reach this one.

    Raise a UsageError if no single address of IPv4 is known to do so.
    """
    sources: dict[str, list[str]] = {}
    for host in dict.fromkeys(hosts):
        source = _find_source(host)
        if not ipaddress.ip_address(source.partition("%")[0]).is_loopback:
            sources.setdefault(source, []).append(host)
    if not sources:
        return _LOOPBACK
    if len(sources) > 1:
        named = "; ".join(f"{', '.join(reached)} from {source}" for source, reached in sources.items())
        raise UsageError(
            f"a stream needs one address of rank 0's host that the hosts of all engines reach, and it connects to "
            f"{named}: name these hosts by addresses of one network (--rollout-hosts, --rollout-endpoint), or write "
            "--rollout-transport shm"
        )
    (source,) = sources
    if ":" in source:
        raise UsageError(
            f"rank 0's host connects to {', '.join(sources[source])} from {source}, and a stream needs IPv4: name "
            "these hosts by addresses of IPv4 (--rollout-hosts, --rollout-endpoint), or write --rollout-transport shm"
        )
    return source


def find_free_port(address: str) -> int:
    """Return a port that is free at an address of this host."""
    with socket.socket(socket.AF_INET) as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port


def _find_source(host: str) -> str:
    """Return the address from which this host connects to another one."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # This chooses a route and sends nothing.
            probe.connect(place)
            source: str = probe.getsockname()[0]
            return source
    except OSError as error:
        raise UsageError(
            f"rank 0's host finds no way to {host}, which has engines ({error}): fix its name or route, or write "
            "--rollout-transport shm"
        ) from None
