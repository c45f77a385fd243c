"""Hosts: their addresses and certificates, and those to which a trainer's ranks deliver weights."""

import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

import msgspec


def is_loopback(host: str) -> bool:
    """Check whether a host of this name can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


def check_certificate(cert: Path | None, key: Path | None, prefix: str) -> Iterator[str]:
    """Yield what is wrong with a certificate or its key, whose flags have this prefix."""
    if (cert is None) != (key is None):
        yield f"{prefix}-cert and {prefix}-key belong together: write both"
    elif cert is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
        except OSError as error:
            yield f"{prefix}-cert {cert} and {prefix}-key {key} cannot be used: {error}: write PEM files"


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
