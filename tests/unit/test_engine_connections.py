"""Connections to an engine's server are used again if the server is ours, and can keep them."""

import asyncio

import httpx
import pytest

from megatron_rl.sidecar.engines import hosts
from megatron_rl.sidecar.engines.hosts import OWN_HOST, SERVER_KEEPS_SECONDS
from megatron_rl.sidecar.temporary import make_socket_folder


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
