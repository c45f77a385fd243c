"""Passes requests on to the unix sockets of engines, and the engines' answers back, bytes as they are.

A request that its caller gives up ends at the engine too, so that nothing is sampled in vain. Several requests may come
as one: then each answer goes back as soon as its engine has given it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import httpx
from starlette.types import Message, Receive, Scope, Send

from megatron_rl.sidecar.agent.messages import FAULT_HEADER, EngineAnswer, EngineRequest, pack

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
            await _answer(answering, send)
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
    """Say that no engine has this name."""
    return f"this host has no engine {engine!r}: start it first"


async def refuse(send: Send, status: int, text: str) -> None:
    """Answer in place of an engine."""
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (FAULT_HEADER.encode(), b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})


async def _answer(answering: "asyncio.Task[httpx.Response]", send: Send) -> None:
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
