"""The routes of a host's agent: the lease, its engines, and everything that these answer themselves.

Every request but that for the agent's health carries the token. Every request but the first also carries the lease.
Requests below an engine's name are passed on to its unix socket, and the answers back, bytes as they are. A request
that its caller gives up ends at the engine too, so that nothing is sampled in vain. Several requests may come as one:
then each answer goes back as soon as its engine has given it.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.protocol.wire import decode_json
from megatron_rl.sidecar.agent.engines import HostEngines, HostTaken, LeaseOver
from megatron_rl.sidecar.agent.messages import (
    FAULT_HEADER,
    LEASE_HEADER,
    MAX_BODY_BYTES,
    REQUESTS_ROUTE,
    AgentRefusal,
    Beat,
    EngineAnswer,
    EngineRequest,
    EngineStart,
    LeaseRequest,
    pack,
)
from megatron_rl.sidecar.serving import OPEN, Guard

_ENGINES = "/v1/engines/"
# The name becomes that of a folder and of a file.
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_STATUS: tuple[tuple[type[MegatronRLError], int], ...] = (
    (LeaseOver, 409),
    (HostTaken, 423),
    (MegatronRLError, 400),
)
"""The status of each error; the first row that fits counts."""

T = TypeVar("T")


def build_agent_application(engines: HostEngines, token: str) -> ASGIApp:
    app = Starlette(
        routes=[
            Route(OPEN, lambda _: JSONResponse({"status": "ok"})),
            *_lease_routes(engines),
            *_engine_routes(engines),
        ],
        exception_handlers={MegatronRLError: _report},
    )
    return Guard(_Forwarding(app, engines), token)


def _lease_routes(engines: HostEngines) -> list[Route]:
    async def take(request: Request) -> Response:
        return _answer(await engines.take_lease(await _read(request, LeaseRequest)))

    async def leave(request: Request) -> Response:
        _check_lease(engines, request)
        await engines.leave()
        return Response(status_code=204)

    async def beat(request: Request) -> Response:
        beat = await _read(request, Beat)
        _check_lease(engines, request)
        return _answer(engines.beat(beat))

    return [
        Route("/v1/lease", take, methods=["POST"]),
        Route("/v1/lease", leave, methods=["DELETE"]),
        Route("/v1/beat", beat, methods=["POST"]),
    ]


def _engine_routes(engines: HostEngines) -> list[Route]:
    async def start(request: Request) -> Response:
        # An engine's setting that this agent does not know must not be left out.
        start = decode_json(await _read_body(request), EngineStart)
        _check_lease(engines, request)
        return _answer(await engines.start(_find_name(request), start))

    async def end(request: Request) -> Response:
        _check_lease(engines, request)
        await engines.end(_find_name(request))
        return Response(status_code=204)

    async def ask(request: Request) -> Response:
        requests = await _read(request, list[EngineRequest], msgspec.msgpack.decode)
        _check_lease(engines, request)
        return StreamingResponse(ask_all(engines.find_client, requests))

    return [
        Route(REQUESTS_ROUTE, ask, methods=["POST"]),
        Route(f"{_ENGINES}{{name}}", start, methods=["PUT"]),
        Route(f"{_ENGINES}{{name}}", end, methods=["DELETE"]),
    ]


class _Forwarding:
    """Passes requests below an engine's name on to its socket. A plain ASGI layer, because every group passes it."""

    def __init__(self, app: ASGIApp, engines: HostEngines) -> None:
        self._app = app
        self._engines = engines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, slash, path = scope.get("path", "").removeprefix(_ENGINES).partition("/")
        if scope["type"] != "http" or not scope["path"].startswith(_ENGINES) or not slash:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            body = await _read_body(request)
            _check_lease(self._engines, request)
        except MegatronRLError as error:
            await refuse(send, _find_status(error), str(error))
            return
        client = self._engines.find_client(name)
        if client is None:
            await refuse(send, 404, say_unknown(name))
            return
        await forward(client, f"/{path}", body, scope, receive, send)


def _check_lease(engines: HostEngines, request: Request) -> None:
    engines.check_lease(request.headers.get(LEASE_HEADER, ""))


def _find_name(request: Request) -> str:
    name: str = request.path_params["name"]
    if not _NAME.fullmatch(name):
        raise InputError(f"the engine's name {name!r} must have small letters, digits and hyphens only")
    return name


async def _read(request: Request, kind: type[T], decode: Callable[..., T] = msgspec.json.decode) -> T:
    try:
        return decode(await _read_body(request), type=kind)
    except msgspec.DecodeError as error:
        raise InputError(f"not a {kind.__name__}: {error}: install the same megatron_rl on both hosts") from None


async def _read_body(request: Request) -> bytes:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY_BYTES:
            raise InputError(f"a body must have at most {MAX_BODY_BYTES} bytes")
    return bytes(data)


def _answer(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _report(_: Request, error: Exception) -> Response:
    assert isinstance(error, MegatronRLError)
    return Response(
        msgspec.json.encode(AgentRefusal(error=str(error))),
        status_code=_find_status(error),
        media_type="application/json",
    )


def _find_status(error: MegatronRLError) -> int:
    return next(status for kind, status in _STATUS if isinstance(error, kind))


FindClient = Callable[[str], httpx.AsyncClient | None]
"""A function that finds the client of an engine's socket by the engine's name."""
_PASSED_ON = (b"content-type", b"accept")
_PASSED_BACK = ("content-type", "content-length", "content-encoding")
# What httpx raises if a server ends, or if its client is closed.
_NO_ANSWER = (httpx.HTTPError, RuntimeError)


async def forward(
    client: httpx.AsyncClient, path: str, body: bytes, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send a request, whose body is read, to an engine, and the answer back while it comes."""
    query = scope["query_string"].decode()
    headers = [(name, value) for name, value in scope["headers"] if name in _PASSED_ON]
    request = client.build_request(scope["method"], f"{path}?{query}" if query else path, content=body, headers=headers)
    answering = asyncio.create_task(client.send(request, stream=True))
    leaving = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            await _send_back(answering, send)
    finally:
        leaving.cancel()
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError, *_NO_ANSWER):
            await (await answering).aclose()


async def ask_all(find_client: FindClient, requests: Sequence[EngineRequest]) -> AsyncIterator[bytes]:
    """Send each request to its engine, all at the same time; yield their answers as they come."""
    asking = [
        asyncio.create_task(_ask(find_client(request.engine), number, request))
        for number, request in enumerate(requests)
    ]
    try:
        for answer in asyncio.as_completed(asking):
            yield pack(await answer)
    finally:
        for task in asking:
            task.cancel()


async def _ask(client: httpx.AsyncClient | None, number: int, request: EngineRequest) -> EngineAnswer:
    if client is None:
        return _answer_for(number, 404, say_unknown(request.engine))
    try:
        headers = {"content-type": request.kind} if request.kind else {}
        answer = await client.post(request.path, content=request.body, headers=headers)
    except _NO_ANSWER as error:
        return _answer_for(number, 502, f"the engine gave no answer: {error!r}")
    kind = answer.headers.get("content-type", "")
    return EngineAnswer(number=number, status=answer.status_code, kind=kind, body=answer.content)


def _answer_for(number: int, status: int, text: str) -> EngineAnswer:
    """Make an answer in place of an engine."""
    return EngineAnswer(number=number, status=status, kind="text/plain", body=text.encode(), is_fault=True)


def say_unknown(engine: str) -> str:
    return f"this host has no engine {engine!r}: start it first"


async def refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (FAULT_HEADER.encode(), b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


async def _send_back(answering: "asyncio.Task[httpx.Response]", send: Send) -> None:
    try:
        answer = answering.result()
    except _NO_ANSWER as error:
        await refuse(send, 502, f"the engine gave no answer: {error!r}")
        return
    headers = [(name.encode(), answer.headers[name].encode()) for name in _PASSED_BACK if name in answer.headers]
    await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
    # If the engine ends here, the server closes the connection: the caller gets half an answer, which is an error.
    with contextlib.suppress(*_NO_ANSWER):
        async for part in answer.aiter_raw():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
