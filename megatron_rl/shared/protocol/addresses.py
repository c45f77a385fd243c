"""Names and addresses of hosts."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Check whether a host of this name can be reached from this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
