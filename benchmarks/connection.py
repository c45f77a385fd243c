"""An HTTP connection that asks and reads; a client library would cost more than the server that is measured."""

import asyncio
from pathlib import Path


class Connection:
    """One connection to a unix socket, kept open."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, socket: Path) -> "Connection":
        return cls(*await asyncio.open_unix_connection(str(socket), limit=1 << 22))

    async def ask(self, method: str, path: str, body: bytes, *headers: str) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Host: sidecar", f"Content-Length: {len(body)}", *headers, "", ""]
        self._writer.write("\r\n".join(lines).encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        fields = dict(line.decode().lower().split(": ", 1) for line in answer.split(b"\r\n")[1:] if b": " in line)
        data = await self._reader.readexactly(int(fields.get("content-length", 0)))
        if status not in (200, 204):
            raise RuntimeError(f"{method} {path} was answered {status}: {data[:300]!r}")
        return data

    def close(self) -> None:
        self._writer.close()
