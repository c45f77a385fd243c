"""The routes of the gateway: OpenAI's chat completions and Anthropic's messages, for the agents of open rollouts."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from megatron_rl.gateway import anthropic_calls, openai_calls
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import OpenRollout
from megatron_rl.gateway.said import MODEL, Answer, Call, CallRefused, CallUnreadable
from megatron_rl.tool_calls import JSON

_log = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
_LONG_BYTES = 1 << 16
_ENDED = "the rollout of this key has ended: its call is not answered"


class Interface(Protocol):
    """A module that reads the calls of an interface, and writes answers to them."""

    def read_call(self, body: JSON, temperature: float, /) -> Call: ...

    def write_answer(self, answer: Answer, /) -> JSON: ...

    def stream_answer(self, answer: Answer, call: Call, /) -> Iterator[str]: ...

    def write_error(self, refused: CallRefused, /) -> JSON: ...


def build_gateway_application(gateway: Gateway) -> Starlette:

    async def complete(request: Request) -> Response:
        return await _handle(gateway, request, openai_calls)

    async def write(request: Request) -> Response:
        return await _handle(gateway, request, anthropic_calls)

    async def list_models(request: Request) -> Response:
        try:
            _find(gateway, request)
        except CallRefused as refused:
            return _refuse(gateway, refused, openai_calls)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_rl"}
        return _write({"object": "list", "data": [model]})

    routes = [
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/v1/messages", write, methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _report_route})


async def _report_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path} is not served: there are POST /v1/chat/completions, /v1/messages"
    return _write(openai_calls.write_error(CallRefused(reason, error.status_code)), error.status_code)


async def _handle(gateway: Gateway, request: Request, interface: Interface) -> Response:
    try:
        rollout = _find(gateway, request)
    except CallRefused as refused:
        response = _refuse(gateway, refused, interface)
        # Forks of a process that called while it imported an agent's file would share the connection.
        response.headers["connection"] = "close"
        return response
    try:
        call = await _read_call(request, rollout, interface)
        answer = await _answer(request, rollout, call)
        if call.is_streamed:
            return StreamingResponse(interface.stream_answer(answer, call), media_type="text/event-stream")
        return _write(interface.write_answer(answer))
    except CallRefused as refused:
        rollout.num_refused += 1
        rollout.last_refusal = str(refused)
        return _refuse(gateway, refused, interface)
    except ClientDisconnect:
        # No client is left to read it.
        return Response(status_code=400)
    except Exception as error:
        return _fail(gateway, rollout, error, interface)


def _find(gateway: Gateway, request: Request) -> OpenRollout:
    client = request.scope["client"]
    if client is None:
        # Its connection was reset before the server could read the address, but after the request had come.
        raise CallRefused("the client has left", 401, "ended")
    return gateway.find(_read_key(gateway, request), tuple(request.scope["server"]), tuple(client))


def _refuse(gateway: Gateway, refused: CallRefused, interface: Interface) -> Response:
    gateway.counters.refused += 1
    _log.debug("a call was refused: %s", refused)
    return _write(interface.write_error(refused), refused.status)


def _fail(gateway: Gateway, rollout: OpenRollout, error: Exception, interface: Interface) -> Response:
    """End the rollout of a call that the gateway cannot answer: its turn may be recorded, and its client asks again."""
    reason = f"a call of its agent was not answered, because the gateway raised {error!r:.500}"
    _log.error("%s; this is a fault of the gateway", reason, exc_info=error)
    rollout.break_off(reason)
    return _refuse(gateway, CallRefused(reason, 410, "failed"), interface)


def _write(content: JSON, status: int = 200) -> Response:
    """Write ASCII: the policy may say half of a surrogate pair, which UTF-8 does not have."""
    return Response(json.dumps(content, allow_nan=False), status, media_type="application/json")


def _read_key(gateway: Gateway, request: Request) -> str:
    """Return the key in the header of one of the interfaces: a proxy may have written something else into the other."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    keys = (key if kind.lower() == "bearer" else "", request.headers.get("x-api-key", ""))
    return next((key for key in keys if gateway.has_given(key)), keys[0] or keys[1])


async def _read_call(request: Request, rollout: OpenRollout, interface: Interface) -> Call:
    """Read a call; a body that cannot be read ends the rollout."""

    def read(data: bytes) -> Call:
        call = interface.read_call(_parse(data), rollout.terms.sampling.temperature)
        # They are kept with the call.
        assert call.digests
        return call

    try:
        data = await _receive(request, rollout)
        # The event loop answers other calls meanwhile.
        return read(data) if len(data) < _LONG_BYTES else await asyncio.to_thread(read, data)
    except CallUnreadable as error:
        rollout.break_off(f"its agent made a call that cannot be read: {error}")
        raise


async def _receive(request: Request, rollout: OpenRollout) -> bytes:
    """Receive a body; one that is too long for its rollout is dropped, so that its client gets an answer."""
    data, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise CallUnreadable(f"a body may have {MAX_BODY_BYTES:,} bytes: send less", 413, "too_large")
        if size <= rollout.most_bytes:
            data += chunk
        else:
            data.clear()
    if size > rollout.most_bytes:
        rollout.refuse_size(size)
    return bytes(data)


def _parse(data: bytes) -> JSON:
    try:
        body: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CallUnreadable(f"the body is not JSON: {error}", code="malformed") from None
    if not isinstance(body, dict):
        raise CallUnreadable("the body must be a JSON object", code="malformed")
    return body


async def _answer(request: Request, rollout: OpenRollout, call: Call) -> Answer:
    """Wait for the answer; give it up if the client leaves, or the rollout ends."""
    if rollout.ended.is_set():
        # It has ended while the body came.
        raise CallRefused(_ENDED, 401, "ended")
    answering = rollout.start(rollout.answer(call))
    leaving = asyncio.create_task(_wait_for_leave(request))
    try:
        with rollout.clock.stopped():
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        with contextlib.suppress(asyncio.CancelledError):
            return answering.result()
        raise CallRefused(_ENDED, 401, "ended")
    finally:
        leaving.cancel()
        answering.cancel()


async def _wait_for_leave(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
