"""Passes a request on to the unix socket of an engine, and the engine's answer back, bytes as they are.

A request that its caller gives up ends at the engine too, so that nothing is sampled in vain.
"""

import asyncio
import contextlib

import httpx
from starlette.types import Message, Receive, Scope, Send

from megatron_rl.sidecar.agent.messages import FAULT_HEADER

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
