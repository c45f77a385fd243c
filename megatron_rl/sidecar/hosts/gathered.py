"""The requests of a publish's step to the engines of a host, which go to its agent as one request.

Each engine's answer arrives by itself, as soon as the engine has given it: a slow or lost engine delays no other one's,
and each error stays that of its engine. A request that is given up ends at its engine with the last of those that were
sent with it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import httpx
import msgspec

from megatron_rl.sidecar.agent.messages import LEASE_HEADER, REQUESTS_ROUTE, EngineAnswer, EngineRequest, unpack

if TYPE_CHECKING:
    from megatron_rl.sidecar.hosts.remote import RemoteHost

_TOGETHER_SECONDS = 0.005
"""Engines of a host come to a step at nearly the same time: they wait so long for each other."""


class GatheredRequests:
    """The requests to one host."""

    def __init__(
        self,
        host: "RemoteHost",
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


def _is_over(answer: "asyncio.Future[EngineAnswer]") -> bool:
    return answer.done()
