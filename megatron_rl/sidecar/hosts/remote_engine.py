"""An engine on another host: its processes, as its agent describes them, and requests to it through the agent."""

import asyncio
import collections
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from megatron_rl.sidecar.agent.messages import FAULT_HEADER, LEASE_HEADER, UNAUTHORIZED, EngineRequest, Life
from megatron_rl.sidecar.engines.hosts import STEP, STEPS
from megatron_rl.sidecar.launcher import LOG_LINES

if TYPE_CHECKING:
    from megatron_rl.sidecar.hosts.remote import RemoteHost


class RemoteHandle:
    """An engine's processes on another host. Satisfies `sidecar.launcher.Handle`."""

    def __init__(self, host: "RemoteHost", name: str) -> None:
        self.name = self.address = name
        self.host_name = host.name
        self.log = Path(f"{host.address}:{name}.log")
        self.lease = ""
        """The lease under which it was started."""
        self.starting: asyncio.Task[None]
        self.is_started = False
        self.num_lines = 0
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._life = Life()
        self._lines: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
        self.needed: list[int] = []
        """The processes that the agent has not been told of."""

    def poll(self) -> str | None:
        return self._life.ended

    def need(self, pids: Sequence[int]) -> None:
        self.needed.extend(pids)

    def find_fault(self) -> str | None:
        if fault := self._host.find_fault():
            return fault
        if self.lease and self.lease != self._host.lease:
            return f"its host {self._host.name} was lost, and has ended it"
        return self._life.fault or self._life.ended

    def kill(self) -> None:
        """End its processes. Call this from another thread than the event loop's."""
        asyncio.run_coroutine_threadsafe(self._host.end(self), self._loop).result()

    def log_lines(self) -> list[str]:
        return list(self._lines)

    def take(self, life: Life | None) -> None:
        """Take what the agent says of it; None if the agent does not know it."""
        if life is None:
            self.fail(f"the agent of its host {self._host.name} does not know it")
            return
        self._life, self.num_lines = life, life.num_lines
        self._lines.extend(life.lines)

    def fail(self, reason: str) -> None:
        """Count it as ended."""
        self._life = Life(ended=reason, fault=reason, num_lines=self.num_lines)


class Forwarded(httpx.AsyncBaseTransport):
    """Sends an engine's requests to the agent of its host, which passes them on.

    Those of a publish's step go together with those of the host's other engines.
    """

    def __init__(
        self,
        host: "RemoteHost",
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
