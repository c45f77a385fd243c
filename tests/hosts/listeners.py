"""Addresses of this machine, and listeners there that answer as an agent's health does."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator


def find_free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def answering(address: str, status: str = "200 OK") -> AsyncIterator[None]:
    """Answer every request with a status."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /health ")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    host, port = address.split(":")
    async with await asyncio.start_server(answer, host, int(port)):
        yield
