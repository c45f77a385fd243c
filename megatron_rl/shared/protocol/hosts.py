"""Hosts: their addresses, the sockets of services there, and those to which a trainer's ranks deliver weights."""

import ipaddress
import socket

import msgspec

from megatron_rl.errors import UsageError


def is_loopback(host: str) -> bool:
    """Check whether a host of this name can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# Addresses for documentation alone (RFC 5737, RFC 3849): the route to them is the one to any other network.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def parse_place(text: str) -> tuple[str, int] | None:
    """Split HOST:PORT or, with IPv6, [HOST]:PORT; None if the text is neither."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            return None
    elif ":" in host:
        return None
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        return None
    return host, int(port)


def open_listener(host: str, port: int, flag: str = "--rollout-listen") -> socket.socket:
    """Open a socket for a service, whose connections inherit TCP_NODELAY; `flag` gave the address.

    asyncio sets that only on sockets that it makes itself. Without it the body of an answer would wait 40 ms until its
    head is acknowledged.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # The address of IPv6 also has a scope, for which create_server has no type.
        listener = socket.create_server(place[:2], family=family)  # type: ignore[arg-type]
    except OSError as error:
        written = f"[{host}]" if ":" in host else host
        raise UsageError(f"{flag} {written}:{port} cannot be opened: {error}; write another port") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def find_url(listener: socket.socket) -> str:
    """Return the address at which other hosts reach a listening socket.

    If it listens on all addresses of the host (0.0.0.0, ::), that is the address from which this host reaches other
    networks.
    """
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = _find_own_address(listener.family)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _find_own_address(family: socket.AddressFamily) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # This chooses a route and sends nothing.
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            # Without a route, no other address is known to lead to this host.
            return _LOOPBACK[family]
        return probe.getsockname()[0]


class DeliveryHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host that takes weights over a port of its own."""

    name: str
    """The name of the host in errors and logs."""
    address: str
    port: int


class DeliveryHosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All hosts that take weights now."""

    epoch: int
    """A number that grows whenever a host joins or is lost."""
    token: str
    """The secret that the hosts of this service and the trainer's ranks share."""
    hosts: list[DeliveryHost]
    num_own_engines: int = 0
    """The number of engines on the service's own host, which load the folder of the trainer's rank 0."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The trainer's news that a version was not delivered to a host."""

    version: int
    reason: str
