"""Ways out of the network confinement of agents: each is tried in an agent's own process, next to a real receiver."""

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.confined.confinement import NETWORK, landlock_version
from megatron_rl.environments.types import OnError
from tests.agents import acting
from tests.reward_pools import in_event_loop

AGENT = """
import ctypes, json, os, socket, struct, urllib.request

LIBC = ctypes.CDLL(None, use_errno=True)
FAST_OPEN = 0x20000000

def call(number, *arguments):
    if (result := LIBC.syscall(number, *arguments)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result

class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_char_p), ("length", ctypes.c_size_t)]

class Message(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("name_length", ctypes.c_uint), ("vectors", ctypes.POINTER(Vector)),
                ("num_vectors", ctypes.c_size_t), ("control", ctypes.c_void_p), ("control_length", ctypes.c_size_t),
                ("flags", ctypes.c_int), ("num_sent", ctypes.c_uint)]

def send_many(connection, address, flags):
    name = struct.pack("=H", socket.AF_INET) + struct.pack("!H", address[1]) + socket.inet_aton(address[0]) + bytes(8)
    message = Message(name, len(name), ctypes.pointer(Vector(b"x", 1)), 1)
    if LIBC.sendmmsg(connection.fileno(), ctypes.byref(message), 1, flags) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def tcp(protocol=0):
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)

def udp():
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

def connect(connection, address):
    connection.connect(address)
    connection.send(b"x")

def connect_later(at):
    connection = tcp()
    connection.setsockopt(socket.IPPROTO_TCP, 30, 1)
    connect(connection, at)

def listen(at):
    connection = tcp()
    connection.listen()
    return connection

def send_from_pair(kind, path):
    socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"x", path)

def copy_descriptor(parent, descriptor):
    call(438, call(434, parent, 0), descriptor, 0)

def list_attacks(tcp_port, udp_port, path, datagrams, abstract, netlink, parent, descriptor):
    at, by_datagram = ("127.0.0.1", tcp_port), ("127.0.0.1", udp_port)
    return {
        "tcp": lambda: connect(tcp(), at),
        "tcp of IPv6": lambda: connect(socket.socket(socket.AF_INET6), ("::ffff:127.0.0.1", tcp_port)),
        "mptcp": lambda: connect(tcp(262), at),
        "fast open": lambda: tcp().sendto(b"x", FAST_OPEN, at),
        "fast open of a message": lambda: tcp().sendmsg([b"x"], [], FAST_OPEN, at),
        "fast open of messages": lambda: send_many(tcp(), at, FAST_OPEN),
        "fast open of a connection": lambda: connect_later(at),
        "listen": lambda: listen(at),
        "udp": lambda: udp().sendto(b"x", by_datagram),
        "udp connection": lambda: connect(udp(), by_datagram),
        "udp messages": lambda: send_many(udp(), by_datagram, 0),
        "raw": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2).sendto(b"x", (netlink, 0)),
        "vsock": lambda: connect(socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM), (1, tcp_port)),
        "another protocol over tcp": lambda: tcp().setsockopt(socket.IPPROTO_TCP, 31, b"tls"),
        "unix": lambda: connect(socket.socket(socket.AF_UNIX), path),
        "abstract unix": lambda: connect(socket.socket(socket.AF_UNIX), abstract),
        "unix from a pair": lambda: send_from_pair(socket.SOCK_DGRAM, datagrams),
        "unix from a raw pair": lambda: send_from_pair(socket.SOCK_RAW, datagrams),
        "io_uring": lambda: call(425, 4, ctypes.create_string_buffer(256)),
        "trace": lambda: LIBC.ptrace(16, parent, None, None) == 0 or call(-1),
        "descriptor": lambda: copy_descriptor(parent, descriptor),
        "inherited": lambda: [connect(socket.socket(fileno=os.dup(number)), by_datagram)
                              for number in range(64) if is_free_socket(number)] or call(-1),
    }

def is_free_socket(number):
    try:
        connection = socket.socket(fileno=os.dup(number))
        return connection.family != socket.AF_UNIX
    except OSError:
        return False

def act(base_url, api_key, model, task, **row):
    found = {}
    for name, attack in list_attacks(**json.loads(task)).items():
        try:
            attack()
        except OSError:
            found[name] = 0.0
        else:
            found[name] = 1.0
    socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "7 8"}]}).encode()
    request = urllib.request.Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
    urllib.request.urlopen(request).read()
    return found
"""


class Receivers:
    """Everything outside that an agent could reach."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(folder / "s"))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(name := f"\0doors-{os.getpid()}")
        datagrams = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagrams.bind(str(folder / "d"))
        netlink = stack.enter_context(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 2))
        netlink.bind((0, 0))
        self.listening = {"tcp": tcp, "unix": unix, "abstract": abstract}
        self.reading = {"udp": udp, "datagrams": datagrams, "netlink": netlink}
        for one in (*self.listening.values(), *self.reading.values()):
            one.setblocking(False)
        unix.listen()
        abstract.listen()
        self.places = {
            "tcp_port": tcp.getsockname()[1],
            "udp_port": udp.getsockname()[1],
            "path": str(folder / "s"),
            "datagrams": str(folder / "d"),
            "abstract": name,
            "netlink": netlink.getsockname()[0],
            "parent": os.getpid(),
            "descriptor": tcp.fileno(),
        }

    def list_heard(self) -> Iterator[str]:
        """Yield the name of each receiver that something has reached."""
        for name, one in self.listening.items():
            with contextlib.suppress(BlockingIOError):
                one.accept()[0].close()
                yield name
        for name, one in self.reading.items():
            with contextlib.suppress(BlockingIOError):
                one.recv(16)
                yield name


async def try_all(folder: Path, receivers: Receivers, network: str) -> tuple[dict[str, float], dict[str, str]]:
    """Have an agent try each way out; return those that worked, as 1, and the measures that are missing."""
    async with acting(folder, AGENT, agent_timeout=60.0, agent_network=network) as world:
        (response,) = await world.act(on_error=OnError(stops=True), task=json.dumps(receivers.places))
        return response.components, world.agents.missing


@in_event_loop
async def test_no_way_out_leads_past_the_gateway(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        # A unix socket has a short path.
        receivers = Receivers(stack, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="doors-"))))
        found, missing = await try_all(tmp_path, receivers, "gateway")
        if landlock_version() < 4:
            assert NETWORK in missing
            pytest.skip("this kernel lacks Landlock for TCP ports, which Linux has from 6.7 on")
        assert {name for name, got_out in found.items() if got_out} == set()
        assert list(receivers.list_heard()) == []
        # The same calls reach these receivers where the network is open, so the test can fail.
        found, _ = await try_all(tmp_path, receivers, "any")
        got_out = {name for name, got_out in found.items() if got_out}
        assert {"tcp", "mptcp", "fast open", "fast open of messages", "listen", "udp", "udp messages"} <= got_out
        assert {"tcp", "udp", "netlink"} <= set(receivers.list_heard())
        assert not {name for name in got_out if "unix" in name}
