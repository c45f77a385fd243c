"""The routes of a host's agent: the lease, its engines, and requests that are passed on to these.

Every request but that for the agent's health carries the token. Every request but the first also carries the lease.
Requests to engines come in lists. Each is passed on to its engine's unix socket, and each answer goes back as soon as
its engine has given it, bytes as they are. If the caller gives a list up, its requests end at the engines too, so that
nothing is sampled in vain.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.protocol.wire import decode_json
from megatron_rl.sidecar.agent.engines import HostEngines, HostTaken, LeaseOver
from megatron_rl.sidecar.agent.messages import (
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
    return Guard(app, token)


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
        return StreamingResponse(_ask_all(engines, requests))

    return [
        Route(REQUESTS_ROUTE, ask, methods=["POST"]),
        Route("/v1/engines/{name}", start, methods=["PUT"]),
        Route("/v1/engines/{name}", end, methods=["DELETE"]),
    ]


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
        status_code=next(status for kind, status in _STATUS if isinstance(error, kind)),
        media_type="application/json",
    )


# What httpx raises if a server ends, or if its client is closed.
_NO_ANSWER = (httpx.HTTPError, RuntimeError)


async def _ask_all(engines: HostEngines, requests: Sequence[EngineRequest]) -> AsyncIterator[bytes]:
    """Send each request to its engine, all at the same time; yield their answers as they come."""
    asking = [
        asyncio.create_task(_ask(engines.find_client(request.engine), number, request))
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
        return _answer_for(number, f"this host has no engine {request.engine!r}: start it first")
    try:
        headers = {"content-type": request.kind} if request.kind else {}
        answer = await client.request(request.method, request.path, content=request.body, headers=headers)
    except _NO_ANSWER as error:
        return _answer_for(number, f"the engine gave no answer: {error!r}")
    kind = answer.headers.get("content-type", "")
    return EngineAnswer(number=number, status=answer.status_code, kind=kind, body=answer.content)


def _answer_for(number: int, text: str) -> EngineAnswer:
    """Make an answer in place of an engine."""
    return EngineAnswer(number=number, status=502, kind="text/plain", body=text.encode(), is_fault=True)
