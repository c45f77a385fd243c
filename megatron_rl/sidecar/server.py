"""The ASGI server that the service runs in: on a unix socket or an address, until it is told to end."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import uvicorn


async def serve(
    app: Any, *, until: asyncio.Event, uds: Path | None = None, listener: socket.socket | None = None
) -> None:
    """Answer requests until the event is set; then finish those that are being answered, and return."""
    config = uvicorn.Config(
        app,
        uds=str(uds) if uds is not None else None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
    )
    server = uvicorn.Server(config)
    # Signals belong to the sidecar, which has engines to end.
    task = asyncio.create_task(server._serve([listener] if listener is not None else None))
    ended = asyncio.create_task(until.wait())
    await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    ended.cancel()
    await task
