"""Clients without a token: they stop neither a host's agent, nor its receiver of weights, nor the gateway."""

import asyncio
import contextlib
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import FastAPI

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.gateway.chats import NumberChats
from megatron_rl.shared.weights.delivery.channel import connect
from megatron_rl.shared.weights.delivery.greetings import GREETING_SECONDS, raise_file_limit
from megatron_rl.shared.weights.delivery.messages import DeliveryError, Hello
from megatron_rl.sidecar.agent.messages import LeaseRequest
from megatron_rl.sidecar.agent_rollouts import GatewayOpening
from megatron_rl.sidecar.serving import open_listener, serve
from megatron_rl.tool_calls import PlainReader
from tests.processes import ROOT
from tests.unit.test_remote_host import make_certificate

TOKEN = "a token of an agent"
SOON = 120.0
NUM_IDLE = 1100
NUM_AT_ONCE = 3000
MIB = 1 << 20
HEADERS = [b"X-Endless: ", *[b"a" * MIB] * 64], [b"X-%d: %s\r\n" % (number, b"a" * 1000) for number in range(64_000)]


@pytest.fixture(scope="module")
def files() -> Iterator[None]:
    """Let this process have as many files open as an attack needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * NUM_IDLE:
        pytest.skip(f"this user may have only {hard} files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Agent:
    """An agent's process, which begins with the usual limit of 1,024 open files."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, most_files: int) -> None:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        command = ["-m", "megatron_rl.sidecar.agent", "--listen", "127.0.0.1:0", "--token-file", str(token)]
        limit = f"import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({min(1024, most_files)}, "
        limit += f"{most_files})); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        words = [sys.executable, "-c", limit, *command, "--folder", str(folder / "logs")]
        self.log = folder / "agent.log"
        with self.log.open("wb") as log:
            self.process = stack.enter_context(subprocess.Popen(words, cwd=ROOT, stderr=log))
        stack.callback(self.process.send_signal, signal.SIGCONT)
        stack.callback(self.process.terminate)
        wait_for(lambda: "serves at" in self.log.read_text())
        self.port = int(re.findall(r"serves at http://127.0.0.1:(\d+)", self.log.read_text())[0])
        self.status = psutil.Process(self.process.pid)

    def lease(self) -> int:
        """Take the lease with the token, and return the port of the receiver of weights."""
        request = LeaseRequest(run="run", seconds=600.0, token=TOKEN)
        answer = httpx.post(
            f"http://127.0.0.1:{self.port}/v1/lease",
            json={"run": request.run, "seconds": request.seconds, "token": TOKEN, "protocol": request.protocol},
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=SOON,
        )
        assert answer.status_code == 200, answer.text
        return int(answer.json()["port"])


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, files: None) -> Iterator[Agent]:
    with contextlib.ExitStack() as stack:
        yield Agent(tmp_path_factory.mktemp("agent"), stack, 4096)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=SOON)


def idle(port: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Open connections that say nothing."""
    return [stack.enter_context(dial(port)) for _ in range(NUM_IDLE)]


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other end closes a connection."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def flood(port: int, path: str, headers: list[bytes]) -> None:
    """Send headers without an end, until the other end closes the connection."""
    with dial(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n".encode())
        for header in headers:
            connection.sendall(header)
        pytest.fail("all headers were taken")


def test_connections_that_say_nothing_do_not_stop_an_agent(agent: Agent) -> None:
    with contextlib.ExitStack() as stack:
        attack = idle(agent.port, stack)
        assert agent.lease()
        assert all(map(is_closed, attack))
        assert agent.lease()


def test_more_connections_than_an_agent_may_have_files_do_not_stop_it(tmp_path: Path, files: None) -> None:
    with contextlib.ExitStack() as stack:
        agent = Agent(tmp_path, stack, 600)
        attack = idle(agent.port, stack)
        assert agent.lease()
        assert all(map(is_closed, attack))


@pytest.mark.parametrize("most_files", [4096, 16_384])
def test_clients_that_greet_at_once_are_all_answered(tmp_path: Path, files: None, most_files: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < most_files:
        pytest.skip(f"this user may not have {most_files} files open")
    with contextlib.ExitStack() as stack:
        agent = Agent(tmp_path, stack, most_files)
        clients = []
        # The kernel's queue is full of requests when the agent continues.
        agent.process.send_signal(signal.SIGSTOP)
        for number in range(NUM_AT_ONCE):
            if number == 2000:
                agent.process.send_signal(signal.SIGCONT)
            clients.append(stack.enter_context(dial(agent.port)))
            clients[-1].sendall(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
        assert sum(is_answered(client) for client in clients) == NUM_AT_ONCE


def is_answered(client: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
    return False


@pytest.mark.parametrize("headers", HEADERS, ids=["one", "many"])
def test_headers_without_an_end_are_not_kept(agent: Agent, headers: list[bytes]) -> None:
    before = agent.status.memory_info().rss
    for _ in range(3):
        flood(agent.port, "/health", headers)
    assert agent.status.memory_info().rss - before < 16 * MIB
    assert agent.lease()


def test_an_answer_to_a_client_without_a_token_ends_its_connection(agent: Agent) -> None:
    for path in ("/health", "/v1/beat", "/nothing"):
        for more in ("", "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"):
            with dial(agent.port) as connection:
                connection.sendall(f"GET {path} HTTP/1.1\r\nHost: here\r\n{more}\r\n".encode())
                assert b"connection: close\r\n" in connection.recv(1 << 16)
                assert is_closed(connection)


def greet(port: int) -> None:
    """Greet a receiver as a rank does, which tries again."""
    hello = Hello(purpose="stream", run="run", lease=1, version=0, fingerprint="none", sender="rank 0")
    wait_for(lambda: greets(port, hello))


def greets(port: int, hello: Hello) -> bool:
    try:
        connect("127.0.0.1", port, TOKEN.encode(), hello).connection.close()
    except DeliveryError:
        return False
    return True


def test_connections_that_say_nothing_do_not_fill_a_receiver(agent: Agent) -> None:
    port = agent.lease()
    with contextlib.ExitStack() as stack:
        attack = idle(port, stack)
        greet(port)
        assert agent.status.num_threads() < 400
        assert all(map(is_closed, attack))


def drip(connection: socket.socket) -> None:
    """Send a byte again and again until the other end closes the connection."""
    with contextlib.suppress(ConnectionError):
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            connection.sendall(b"m")
            time.sleep(0.5)
        pytest.fail("the connection is still open")


def test_a_greeting_has_one_deadline_however_its_bytes_come(agent: Agent) -> None:
    # The first bytes are right, and announce a long message.
    opening = b"mrlweights\1\0" + bytes(32) + (1 << 16).to_bytes(4, "little")
    with dial(agent.lease()) as connection:
        connection.sendall(opening)
        drip(connection)
    with dial(agent.port) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        drip(connection)


def test_clients_that_drip_hold_no_place_of_another_address_and_their_own_for_one_deadline(agent: Agent) -> None:
    port = agent.lease()
    opening = b"mrlweights\1\0" + bytes(32) + (1 << 16).to_bytes(4, "little")
    with contextlib.ExitStack() as stack:
        attack = [socket.create_connection(("127.0.0.1", port), SOON, ("127.0.0.2", 0)) for _ in range(300)]
        for connection in map(stack.enter_context, attack):
            connection.sendall(opening)
        begun = time.monotonic()
        greet(port)
        assert time.monotonic() - begun < GREETING_SECONDS / 2
        while not all(map(has_ended, attack)):
            assert time.monotonic() < begun + 6 * GREETING_SECONDS
            for connection in attack:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"m")
            time.sleep(0.1)


def has_ended(connection: socket.socket) -> bool:
    """Check whether the other end has closed a connection."""
    with contextlib.suppress(ConnectionError):
        connection.setblocking(False)
        try:
            return not connection.recv(1 << 16)
        except BlockingIOError:
            return False
        finally:
            connection.settimeout(SOON)
    return True


def test_a_receiver_goes_on_after_a_thread_could_not_start(agent: Agent) -> None:
    port = agent.lease()
    limit = agent.status.rlimit(psutil.RLIMIT_AS)
    agent.status.rlimit(psutil.RLIMIT_AS, (agent.status.memory_info().vms + MIB, limit[1]))
    with contextlib.ExitStack() as stack:
        attack = [stack.enter_context(dial(port)) for _ in range(8)]
        wait_for(lambda: "can't start" in agent.log.read_text())
        agent.status.rlimit(psutil.RLIMIT_AS, limit)
        greet(port)
        assert attack


def test_the_gateway_closes_what_says_nothing_or_too_much(tmp_path: Path) -> None:
    async def run() -> None:
        (tmp_path / "agent.py").touch()
        with contextlib.ExitStack() as stack:
            opening = GatewayOpening.open(EnvironmentConfig(agent=f"{tmp_path}/agent.py:act"), PoolSettings())
            gateway = opening.build(NumberChats(), PlainReader(), reads_tools=False)
            port = opening.listener.getsockname()[1]
            async with opening.serve(gateway):
                for headers in HEADERS:
                    await asyncio.to_thread(flood, port, "/v1/models", headers)
                silent = stack.enter_context(dial(port))
                unknown = stack.enter_context(dial(port))
                unknown.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
                assert await asyncio.to_thread(is_closed, unknown)
                assert await asyncio.to_thread(is_closed, silent)

    asyncio.run(run())


def test_the_gateway_survives_a_client_that_resets_before_it_is_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        (tmp_path / "agent.py").touch()
        opening = GatewayOpening.open(EnvironmentConfig(agent=f"{tmp_path}/agent.py:act"), PoolSettings())
        gateway = opening.build(NumberChats(), PlainReader(), reads_tools=False)
        port = opening.listener.getsockname()[1]
        async with opening.serve(gateway):
            # The loop cannot accept the connection before it is reset, but can read the request afterwards.
            with dial(port) as connection:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with dial(port) as connection:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: here\r\n\r\n")
                assert await asyncio.to_thread(is_closed, connection)
            assert gateway.counters.refused == 2

    asyncio.run(run())
    assert "TypeError" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="this host has no openssl to make certificates")
def test_a_handshake_of_tls_has_the_deadline_of_a_greeting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The event loop's deadline comes too late to end these connections.
    monkeypatch.setattr(asyncio.constants, "SSL_HANDSHAKE_TIMEOUT", 10 * SOON)

    async def run() -> None:
        ended, listener = asyncio.Event(), open_listener("127.0.0.1", 0)
        port = listener.getsockname()[1]
        task = asyncio.create_task(
            serve(FastAPI(), until=ended, listener=listener, tls=make_certificate(tmp_path, "agent"))
        )
        with dial(port) as silent, dial(port) as partial:
            # The head of a record, and no record.
            partial.sendall(b"\x16\x03\x01\x02\x00")
            assert await asyncio.to_thread(is_closed, silent)
            assert await asyncio.to_thread(is_closed, partial)
        ended.set()
        await task

    asyncio.run(run())


@pytest.mark.parametrize("soft", [1024, resource.RLIM_INFINITY])
def test_an_infinite_limit_of_files_counts_as_many(monkeypatch: pytest.MonkeyPatch, soft: int) -> None:
    # The kernel has no such limit for files, but kernels in user space may.
    monkeypatch.setattr(resource, "getrlimit", lambda name: (soft, resource.RLIM_INFINITY))
    raised = []
    monkeypatch.setattr(resource, "setrlimit", lambda name, limits: raised.append(limits))
    assert raise_file_limit() == 1 << 16
    assert raised == ([((1 << 16), resource.RLIM_INFINITY)] if soft == 1024 else [])
