"""Requests to engines on another host, which go to the agent of the host. The agent passes them on.

The requests of a publish's step to the engines of a host go as one request. Each engine's answer arrives by itself, as
soon as the engine has given it: a slow or lost engine delays no other one's, and each error stays that of its engine. A
request that is given up ends at its engine with the last of those that were sent with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import httpx
import msgspec

from megatron_rl.sidecar.agent.messages import (
    FAULT_HEADER,
    LEASE_HEADER,
    REQUESTS_ROUTE,
    UNAUTHORIZED,
    EngineAnswer,
    EngineRequest,
    unpack,
)
from megatron_rl.sidecar.engines.hosts import STEP, STEPS

_TOGETHER_SECONDS = 0.005
"""Engines of a host come to a step at nearly the same time: they wait so long for each other."""


class LeasedHost(Protocol):
    """A host with an agent, as far as requests need to know it."""

    name: str
    url: str
    gathered: "GatheredRequests"

    @property
    def lease(self) -> str: ...

    @property
    def num_engines(self) -> int: ...

    async def answers(self) -> bool: ...

    async def until_started(self, name: str) -> None: ...


class GatheredRequests:
    def __init__(
        self,
        host: LeasedHost,
        transport: httpx.AsyncBaseTransport,
        authorization: str,
        timeout: httpx.Timeout,
        connects: asyncio.Semaphore,
    ) -> None:
        """Make them; the caller owns the transport. `connects` bounds the connections that are opened at once."""
        self._host = host
        self._connects = connects
        self._http = httpx.AsyncClient(
            base_url=host.url,
            transport=transport,
            headers={"authorization": authorization},
            timeout=timeout,
        )
        self._requests: list[EngineRequest] = []
        self._answers: list[asyncio.Future[EngineAnswer]] = []
        self._sending: set[asyncio.Task[None]] = set()

    async def ask(self, request: EngineRequest) -> EngineAnswer:
        """Return the answer to a request; raise httpx.HTTPError if none comes."""
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
        sending = asyncio.create_task(self._send(requests, answers))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        for answer in answers:
            answer.add_done_callback(lambda _: sending.cancel() if all(map(_is_over, answers)) else None)

    async def _stream(self, requests: bytes) -> AsyncIterator[bytes]:
        """Send the requests; yield the answers in parts."""
        headers = {LEASE_HEADER: self._host.lease}
        async with contextlib.AsyncExitStack() as stack:
            async with self._connects:
                # The agent begins its answer at once, and ends it with the slowest engine.
                sending = self._http.stream("POST", REQUESTS_ROUTE, content=requests, headers=headers)
                answer = await stack.enter_async_context(sending)
            if not answer.is_success:
                await answer.aread()
                raise httpx.ReadError(f"host {self._host.name} answers {answer.status_code}: {answer.text[:200]}")
            async for part in answer.aiter_raw():
                yield part

    async def _send(self, requests: Sequence[EngineRequest], answers: Sequence[asyncio.Future[EngineAnswer]]) -> None:
        error: Exception = httpx.ReadError("the agent ended its answer before all engines had given theirs")
        data = bytearray()
        try:
            async for part in self._stream(msgspec.msgpack.encode(requests)):
                data += part
                for found in unpack(data):
                    if not answers[found.number].done():
                        answers[found.number].set_result(found)
        except (httpx.HTTPError, msgspec.DecodeError) as failure:
            error = failure if isinstance(failure, httpx.HTTPError) else httpx.ReadError(f"{failure}")
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)


class Forwarded(httpx.AsyncBaseTransport):
    """Sends an engine's requests to the agent of its host, which passes them on.

    Those of a publish's step go together with those of the host's other engines.
    """

    def __init__(
        self,
        host: LeasedHost,
        name: str,
        transport: httpx.AsyncBaseTransport,
        authorization: str,
        timeout: httpx.Timeout,
    ) -> None:
        self._host = host
        self._name = name
        self._transport = transport
        self._authorization = authorization
        self._timeout = timeout

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._host.until_started(self._name)
        if request.extensions.get(STEP) in STEPS and self._host.num_engines > 1:
            return await self._ask_gathered(request)
        path = f"/v1/engines/{self._name}".encode() + request.url.raw_path
        request.url = httpx.URL(self._host.url).copy_with(raw_path=path)
        request.headers["host"] = self._host.name
        request.headers["authorization"] = self._authorization
        request.headers[LEASE_HEADER] = self._host.lease
        request.extensions["timeout"] = self._timeout.as_dict()
        try:
            answer = await self._transport.handle_async_request(request)
        except httpx.HTTPError:
            await self._host.answers()
            raise
        if FAULT_HEADER not in answer.headers and answer.status_code != UNAUTHORIZED:
            return answer
        data = await answer.aread()
        await answer.aclose()
        raise await self._explain(data)

    async def _ask_gathered(self, request: httpx.Request) -> httpx.Response:
        asked = EngineRequest(
            engine=self._name,
            path=request.url.raw_path.decode(),
            kind=request.headers.get("content-type", ""),
            body=await request.aread(),
        )
        try:
            answer = await self._host.gathered.ask(asked)
        except httpx.HTTPError:
            await self._host.answers()
            raise
        if answer.is_fault:
            raise await self._explain(answer.body)
        return httpx.Response(answer.status, headers={"content-type": answer.kind}, content=answer.body)

    async def _explain(self, answer: bytes) -> httpx.ReadError:
        """Make the error of a request that the agent has answered in place of the engine."""
        # The engine may have died: its last lines explain that.
        await self._host.answers()
        return httpx.ReadError(f"host {self._host.name}: {answer.decode(errors='replace')}")


def _is_over(answer: "asyncio.Future[EngineAnswer]") -> bool:
    return answer.done()
