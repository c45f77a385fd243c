"""An engine over several hosts: vLLM's own processes of several hosts, without Ray. Each host runs a part.

The first part is the server. The others are headless: they have workers, and no socket. All parts meet at a port of the
first part's host, then at ports that the kernel chooses, on the hosts' addresses.
"""

import dataclasses
import ipaddress
import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.errors import InputError, PlatformError

HEADLESS = "--headless"


@dataclasses.dataclass(frozen=True)
class EnginePart:
    """The part of an engine that one of its several hosts runs."""

    rank: int
    """Its place among the parts; 0 is the server."""
    num_parts: int
    address: str
    """The address at which the other hosts of the engine reach this one."""
    leader: str
    """The address of the server's host."""
    port: int
    """The port of the server's host at which the parts meet."""


def list_flags(part: EnginePart) -> list[str]:
    flags = [
        "--distributed-executor-backend", "mp",
        "--nnodes", str(part.num_parts),
        "--node-rank", str(part.rank),
        "--master-addr", part.leader,
        "--master-port", str(part.port),
    ]  # fmt: skip
    return flags if part.rank == 0 else [*flags, HEADLESS]


def set_variables(environment: dict[str, str], part: EnginePart) -> None:
    """Keep the connections between parts on the interface that has this host's address.

    Devices may have a network of their own, if the user has named it.
    """
    interface = find_interface(part.address)
    environment |= {"VLLM_HOST_IP": part.address, "GLOO_SOCKET_IFNAME": interface}
    for name in ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"):
        environment.setdefault(name, interface)


def find_interface(host: str) -> str:
    """Return the name of the network interface that has an address of this host."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(f"{host!r}, an address of this host, cannot be found: {error}") from None
    wanted = {_read_address(str(info[4][0])) for info in infos}
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6) and _read_address(address.address) in wanted:
                return interface
    raise InputError(
        f"no network interface of this host has the address {host}: an engine over several hosts needs it, so name the "
        "host in the file of --rollout-hosts by an address of its own"
    )


def encode_places(places: Sequence[tuple[str, int]]) -> str:
    """Encode the folders of a version and their owners, one of each of an engine's hosts, for its workers."""
    return json.dumps([list(place) for place in places])


def pick_place(places: str, parallel: Any) -> tuple[Path, int]:
    """Return the folder and its owner on the host of a worker, which has this parallel configuration."""
    folder, user = json.loads(places)[getattr(parallel, "node_rank", 0)]
    return Path(folder), user


def run_headless(words: list[str]) -> None:
    """Run the workers of a part without a server, until one of them ends."""
    from megatron_rl.sidecar.vllm.flags import build_parser

    parser = build_parser()
    try:
        from vllm.entrypoints.cli.serve import run_headless
    except ImportError as error:
        raise PlatformError(f"this vLLM runs no engine over several hosts: {error}: install another one") from None
    if parser is None:
        raise PlatformError("this vLLM has the parser of its flags in another place: install another one")
    arguments = parser.parse_args(words)
    arguments.api_server_count = 0
    run_headless(arguments)


def _read_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Read an address without its zone."""
    return ipaddress.ip_address(text.partition("%")[0])
