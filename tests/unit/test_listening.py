"""The addresses that a sidecar listens on, the one that others are told, and the connections to engines' servers."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx
import pytest

from megatron_rl.errors import UsageError
from megatron_rl.shared.protocol.client import RolloutClient, RolloutError
from megatron_rl.shared.protocol.hosts import is_loopback, parse_place
from megatron_rl.sidecar.engines import hosts
from megatron_rl.sidecar.engines.hosts import OWN_HOST, SERVER_KEEPS_SECONDS
from megatron_rl.sidecar.serving import find_url, open_listener
from megatron_rl.sidecar.temporary import make_socket_folder


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("host-7.cluster:65535", ("host-7.cluster", 65535)),
        ("[::]:80", ("::", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
        ("::1:80", None),
        ("[127.0.0.1]:80", None),
        ("127.0.0.1", None),
        (":80", None),
        ("[]:80", None),
        ("127.0.0.1:65536", None),
        ("127.0.0.1:-1", None),
        ("127.0.0.1:\uff18", None),
    ],
)
def test_a_place_is_a_host_and_a_port(text: str, place: tuple[str, int] | None) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    ("host", "is_alone"),
    [("localhost", True), ("127.9.9.9", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("host-7", False)],
)
def test_hosts_that_only_this_one_reaches_are_known(host: str, is_alone: bool) -> None:
    assert is_loopback(host) == is_alone


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_the_address_that_is_told_reaches_the_listener(host: str) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("this host has no IPv6")
    with open_listener(host, 0) as listener:
        url = find_url(listener)
        assert "//0.0.0.0:" not in url
        assert "[::]" not in url
        place = parse_place(url.removeprefix("http://"))
        assert place is not None
        with socket.create_connection(place, timeout=10):
            pass


def test_connections_before_the_listener_is_served_are_kept() -> None:
    with open_listener("127.0.0.1", 0) as listener, contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(listener.getsockname(), timeout=10))


def test_a_place_that_is_taken_is_said_as_it_is_written() -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"--rollout-listen 127\.0\.0\.1:{port} cannot be opened"):
            open_listener("127.0.0.1", port)


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """Start a proxy; yield its address, and the requests it was handed."""
    handed: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    handed.append(connection.recv(65536))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", handed
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_a_proxy_of_the_environment_is_not_handed_the_token(
    proxy: tuple[str, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, handed = proxy
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, address)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    # No process listens there.
    with RolloutClient("http://127.0.0.2:9", "the-token", patience=0.1) as client, pytest.raises(RolloutError):
        client.take_lease("run")
    assert handed == []


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(("is_ours", "num_connections"), [(True, 1), (False, 3)])
def test_requests_to_a_server_of_ours_share_a_connection(is_ours: bool, num_connections: int) -> None:
    met: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(writer)
        while await reader.readline():
            while (await reader.readline()).strip():
                pass
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def ask() -> None:
        address = str(make_socket_folder() / "socket")
        transport = OWN_HOST.connect(address, is_ours)
        async with (
            await asyncio.start_unix_server(serve, address),
            httpx.AsyncClient(transport=transport, base_url="http://e") as client,
        ):
            for _ in range(3):
                assert (await client.get("/health")).status_code == 200

    asyncio.run(ask())
    assert len(met) == num_connections


def test_a_server_keeps_connections_longer_than_they_are_used() -> None:
    expiry = hosts._KEEPING.keepalive_expiry
    assert expiry is not None
    assert 100 * expiry < SERVER_KEEPS_SECONDS
