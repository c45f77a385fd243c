"""The routes of the gateway: the interfaces of OpenAI and Anthropic, for the agents of open rollouts."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from megatron_rl.gateway import anthropic_calls, completion_calls, openai_calls, responses_calls
from megatron_rl.gateway.gateway import Gateway
from megatron_rl.gateway.open_rollout import OpenRollout
from megatron_rl.gateway.said import MODEL, Answer, Call, CallRefused, CallUnreadable, Serving
from megatron_rl.tool_calls import JSON

_log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BODY_BYTES = 16 << 20
_LONG_BYTES = 1 << 16
_ENDED = "the rollout of this key has ended: its call is not answered"


class Interface(Protocol):
    """A module that reads the calls of an interface, and writes answers to them."""

    def read_call(self, body: JSON, serving: Serving, /) -> Call: ...

    def write_answer(self, answers: Sequence[Answer], call: Call, /) -> JSON: ...

    def stream_answer(self, answers: Sequence[Answer], call: Call, /) -> Iterator[str]: ...

    def write_error(self, refused: CallRefused, /) -> JSON: ...


Answerer = Callable[[Request, OpenRollout, Call, Interface], Coroutine[Any, Any, Response]]
"""Function that answers a call."""
_INTERFACES: dict[str, Interface] = {
    "/v1/chat/completions": openai_calls,
    "/v1/responses": responses_calls,
    "/v1/completions": completion_calls,
    "/v1/messages": anthropic_calls,
}
_COUNT = "/v1/messages/count_tokens"


def build_gateway_application(gateway: Gateway) -> Starlette:

    def serve(interface: Interface, answer: Answerer) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            return await _handle(gateway, request, interface, answer)

        return handle

    async def list_models(request: Request) -> Response:
        try:
            _find(gateway, request)
        except CallRefused as refused:
            return _refuse(gateway, refused, openai_calls)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_rl"}
        return _write({"object": "list", "data": [model]})

    routes = [
        *(Route(path, serve(one, _answer), methods=["POST"]) for path, one in _INTERFACES.items()),
        Route(_COUNT, serve(anthropic_calls, _count), methods=["POST"]),
        Route("/v1/models", list_models, methods=["GET"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _report_route})


async def _report_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = f"{request.method} {request.url.path} is not served: there are POST {', '.join([*_INTERFACES, _COUNT])}"
    return _write(openai_calls.write_error(CallRefused(reason, error.status_code)), error.status_code)


async def _handle(gateway: Gateway, request: Request, interface: Interface, answer: Answerer) -> Response:
    try:
        rollout = _find(gateway, request)
    except CallRefused as refused:
        response = _refuse(gateway, refused, interface)
        # Forks of a process that called while it imported an agent's file would share the connection.
        response.headers["connection"] = "close"
        return response
    try:
        call = await _read_call(gateway, request, rollout, interface)
        return await answer(request, rollout, call, interface)
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


async def _read_call(gateway: Gateway, request: Request, rollout: OpenRollout, interface: Interface) -> Call:
    """Read a call; a body that cannot be read ends the rollout."""

    def read(data: bytes) -> Call:
        serving = Serving(rollout.terms.sampling.temperature, gateway.advises, rollout.recall)
        call = interface.read_call(_parse(data), serving)
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


async def _answer(request: Request, rollout: OpenRollout, call: Call, interface: Interface) -> Response:
    answers = await _wait(request, rollout, rollout.answer(call))
    if call.is_streamed:
        return StreamingResponse(interface.stream_answer(answers, call), media_type="text/event-stream")
    return _write(interface.write_answer(answers, call))


async def _count(request: Request, rollout: OpenRollout, call: Call, interface: Interface) -> Response:
    return _write({"input_tokens": await _wait(request, rollout, rollout.count(call))})


async def _wait(request: Request, rollout: OpenRollout, work: Coroutine[Any, Any, T]) -> T:
    """Wait for an answer; give it up if the client leaves, or the rollout ends."""
    if rollout.ended.is_set():
        # It has ended while the body came.
        work.close()
        raise CallRefused(_ENDED, 401, "ended")
    answering = rollout.start(work)
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
