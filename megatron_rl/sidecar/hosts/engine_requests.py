"""Requests to engines on another host, which go to the agent of the host in lists. The agent passes them on.

The requests of one step of a start or a publish to the engines of a host are one list. Any other request, a sampling
call above all, is a list of its own. Each engine's answer arrives by itself, as soon as the engine has given it: a slow
or lost engine delays no other one's, and each error stays that of its engine. A request that is given up ends at its
engine with the last of its list.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import httpx
import msgspec

from megatron_rl.sidecar.agent.messages import (
    LEASE_HEADER,
    REQUESTS_ROUTE,
    AgentRefusal,
    EngineAnswer,
    EngineRequest,
    unpack,
)
from megatron_rl.sidecar.engines.hosts import STEP, STEPS

_TOGETHER_SECONDS = 0.005
"""Engines of a host come to a step at nearly the same time: they wait so long for each other."""


class EngineRequests:
    """Sends lists of requests to a host's agent."""

    def __init__(self, http: httpx.AsyncClient, find_lease: Callable[[], str], connects: asyncio.Semaphore) -> None:
        """Use a client of the agent; `connects` bounds the connections that are opened at once for steps."""
        self._http = http
        self._find_lease = find_lease
        self._connects = connects
        self._requests: list[EngineRequest] = []
        self._answers: list[asyncio.Future[EngineAnswer]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, request: EngineRequest) -> EngineAnswer:
        """Return the answer to a request; raise httpx.HTTPError if none comes."""
        answer: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()
        await self._send([request], [answer], contextlib.nullcontext())
        return answer.result()

    async def ask_gathered(self, request: EngineRequest) -> EngineAnswer:
        """Do the same with one request for all engines that ask soon."""
        loop = asyncio.get_running_loop()
        if not self._requests:
            loop.call_later(_TOGETHER_SECONDS, self._send_gathered)
        self._requests.append(request)
        answer: asyncio.Future[EngineAnswer] = loop.create_future()
        self._answers.append(answer)
        return await answer

    def _send_gathered(self) -> None:
        requests, self._requests = self._requests, []
        answers, self._answers = self._answers, []
        sending = asyncio.create_task(self._send(requests, answers, self._connects))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

        def give_up(answer: asyncio.Future[EngineAnswer]) -> None:
            # After the last answer the sending ends by itself: a cancellation that meets its end leaves a socket open.
            if answer.cancelled() and all(other.done() for other in answers):
                sending.cancel()

        for answer in answers:
            answer.add_done_callback(give_up)

    async def _send(
        self,
        requests: Sequence[EngineRequest],
        answers: Sequence[asyncio.Future[EngineAnswer]],
        opening: contextlib.AbstractAsyncContextManager[None],
    ) -> None:
        error: Exception = httpx.ReadError("the agent ended its answer before all engines had given theirs")
        data = bytearray()
        try:
            async with contextlib.aclosing(self._stream(msgspec.msgpack.encode(requests), opening)) as parts:
                async for part in parts:
                    data += part
                    for found in unpack(data):
                        if not answers[found.number].done():
                            answers[found.number].set_result(found)
                    if all(answer.done() for answer in answers):
                        break
        except httpx.HTTPError as failure:
            error = failure
        except msgspec.DecodeError as failure:
            error = httpx.ReadError(f"{failure}")
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)

    async def _stream(
        self, requests: bytes, opening: contextlib.AbstractAsyncContextManager[None]
    ) -> AsyncGenerator[bytes, None]:
        """Send the requests; yield the answers in parts."""
        async with contextlib.AsyncExitStack() as stack:
            async with opening:
                # The agent begins its answer at once, and ends it with the slowest engine.
                headers = {LEASE_HEADER: self._find_lease()}
                sending = self._http.stream("POST", REQUESTS_ROUTE, content=requests, headers=headers)
                answer = await stack.enter_async_context(sending)
            if not answer.is_success:
                raise httpx.ReadError(explain_refusal(answer.status_code, await answer.aread()))
            async for part in answer.aiter_raw():
                yield part


def explain_refusal(status: int, content: bytes) -> str:
    """Return an agent's reason for a refusal."""
    try:
        return msgspec.json.decode(content, type=AgentRefusal).error
    except msgspec.DecodeError:
        return f"it answers {status}: {content.decode(errors='replace')[:200]}"


class Forwarded(httpx.AsyncBaseTransport):
    """Sends the requests of an engine through a function, which knows the engine's host."""

    def __init__(self, engine: str, ask: Callable[[EngineRequest, bool], Awaitable[EngineAnswer]]) -> None:
        """`ask` learns whether the request belongs to a step of all engines of a host."""
        self._engine = engine
        self._ask = ask

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        asked = EngineRequest(
            engine=self._engine,
            method=request.method,
            path=request.url.raw_path.decode(),
            kind=request.headers.get("content-type", ""),
            body=await request.aread(),
        )
        answer = await self._ask(asked, request.extensions.get(STEP) in STEPS)
        return httpx.Response(answer.status, headers={"content-type": answer.kind}, content=answer.body)
