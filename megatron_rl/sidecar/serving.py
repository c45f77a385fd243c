"""Serves an application until an event: with a token that every request must carry, and bounds for clients without one.

A client without a token or key may send one request, soon, with a short head. The answer to it ends the connection. So
the time to the end of a connection's first head is bounded here, the number of connections that wait for it, and the
size of any head.
"""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import select
import signal
import socket
from pathlib import Path
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from megatron_rl.errors import UsageError
from megatron_rl.shared.weights.delivery.greetings import GREETING_SECONDS, PAUSE_SECONDS, Greetings, raise_file_limit

# Addresses for documentation alone (RFC 5737, RFC 3849): the route to them is the one to any other network.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}
OPEN = "/health"


class Guard:
    """Checks the token of every request before its body is read. A plain ASGI layer, because every slot passes it."""

    def __init__(self, app: ASGIApp, token: str):
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "the token is missing or wrong"}, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


_MOST_GREETINGS = 4096
_LONGEST_HEAD = 1 << 16
# Connections that the kernel keeps until the service accepts them, from the moment at which it has an address.
_BACKLOG = 2048
_LOOK_SECONDS = 1.0
# The answers to requests without a token or key, and to those for routes that do not exist.
_UNAUTHORIZED = (401, 404, 405)


class BoundedListener(socket.socket):
    """A listening socket that notes each connection as one that has not greeted, and has room for a bounded number.

    The event loop watches a gate, an epoll instance around the socket. While the gate is shut, connections stay in the
    kernel's queue, and the loop is not woken by them again and again.
    """

    greetings: Greetings
    gate: select.epoll

    @classmethod
    def wrap(cls, listener: socket.socket) -> "BoundedListener":
        """Replace a listening socket, raise the limit of open files, and give a quarter of them to greetings."""
        most = min(_MOST_GREETINGS, raise_file_limit() // 4)
        bounded = cls(fileno=listener.detach())
        bounded.greetings = Greetings(GREETING_SECONDS, most, most // 2)
        bounded.gate = select.epoll()
        bounded.gate.register(socket.socket.fileno(bounded), select.EPOLLIN)
        return bounded

    def fileno(self) -> int:
        return -1 if self.gate.closed else self.gate.fileno()

    def close(self) -> None:
        self.gate.close()
        super().close()

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.greetings.make_room():
            self._set_gate(0)
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._set_gate, select.EPOLLIN)
            raise BlockingIOError
        connection, address = super().accept()
        self.greetings.begin(connection, address[0])
        return connection, address

    def _set_gate(self, events: int) -> None:
        if not self.gate.closed:
            self.gate.modify(super().fileno(), events)

    async def expire_until(self, ended: asyncio.Event) -> None:
        """Shut late connections until the event is set."""
        while not ended.is_set():
            self.greetings.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await ended.wait()


class CloseUnauthorized:
    """Closes the connection of a request that has shown no token. A plain ASGI layer, because every slot passes it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start" and (
                message["status"] in _UNAUTHORIZED or scope["path"] == OPEN
            ):
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_closing)


class _BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection, whose greeting is the end of its first head."""

    def __init__(self, greetings: Greetings, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._greetings = greetings
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        has_body = before is not None and before.more_body
        super().data_received(data)
        if self.cycle is not before:
            self._num_head_bytes = 0
            self._greetings.end(self.transport.get_extra_info("socket").fileno())
        elif not has_body:
            # These bytes belong to a head, which the parser keeps however long it is.
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _LONGEST_HEAD and not self.transport.is_closing():
                self.send_400_response(f"The head of a request may have {_LONGEST_HEAD} bytes.")


def open_listener(host: str, port: int, flag: str = "--rollout-listen") -> socket.socket:
    """Open a socket for a service, whose connections inherit TCP_NODELAY; `flag` gave the address.

    asyncio sets that only on sockets that it makes itself. Without it the body of an answer would wait 40 ms until its
    head is acknowledged.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # The address of IPv6 also has a scope, for which create_server has no type.
        listener = socket.create_server(place[:2], family=family, backlog=_BACKLOG)  # type: ignore[arg-type]
    except OSError as error:
        written = f"[{host}]" if ":" in host else host
        raise UsageError(f"{flag} {written}:{port} cannot be opened: {error}; write another port") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def find_url(listener: socket.socket, scheme: str = "http") -> str:
    """Return the address at which other hosts reach a listening socket.

    If it listens on all addresses of the host (0.0.0.0, ::), that is the address from which this host reaches other
    networks.
    """
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = _find_own_address(listener.family)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _find_own_address(family: socket.AddressFamily) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # This chooses a route and sends nothing.
            probe.connect((_ELSEWHERE[family], 9))
        except OSError:
            # Without a route, no other address is known to lead to this host.
            return _LOOPBACK[family]
        return probe.getsockname()[0]


def build_configuration(app: ASGIApp, listener: BoundedListener | None, **settings: Any) -> uvicorn.Config:
    """Build uvicorn's configuration; with a listener, clients without a token are bounded."""
    if listener is not None:
        app, settings["http"] = CloseUnauthorized(app), functools.partial(_BoundedProtocol, listener.greetings)
    return uvicorn.Config(app, ws="none", log_level="warning", access_log=False, lifespan="off", **settings)


def set_at_end(ended: asyncio.Event) -> None:
    """Set the event on SIGTERM, and on SIGINT if this process was not started to ignore it, as shells start jobs."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGINT, ended.set)


async def serve(
    app: Any,
    *,
    until: asyncio.Event,
    uds: Path | None = None,
    listener: socket.socket | None = None,
    tls: tuple[Path, Path] | None = None,
) -> None:
    """Serve until the event is set, then finish the requests in progress; `tls` is a certificate and its key."""
    cert, key = tls or (None, None)
    bounded = None if listener is None else BoundedListener.wrap(listener)
    config = build_configuration(
        app,
        bounded,
        uds=str(uds) if uds is not None else None,
        # The gateway must know the connection of a call, not the one that its headers claim.
        proxy_headers=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=2,
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(config)
    # Signals belong to the sidecar, which has engines to end.
    task = asyncio.create_task(server._serve([bounded] if bounded is not None else None))
    ended = asyncio.create_task(until.wait() if bounded is None else bounded.expire_until(until))
    await asyncio.wait([task, ended], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    ended.cancel()
    await task
