"""Requests to a vLLM server, each of which ends soon when the server can no longer answer it.

A vLLM server whose core dies under a request may wait for this request before it ends, while the request waits for the
core. So every request is raced against what would leave it without an answer: the end of a process that the engine
needs, a process that is stopped, and a server that takes no other requests. Deadlines are the callers'.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Coroutine
from typing import Any

import httpx
import msgspec

from megatron_rl.sidecar.engines import EngineBusy, EngineLost, EngineRefused
from megatron_rl.sidecar.launcher import Handle
from megatron_rl.sidecar.vllm.server import find_cause

METRICS_PREFIX = "vllm:"

_log = logging.getLogger(__name__)

# With `processes.NUM_LOOKS`, a stopped process is named after five seconds.
_LOOK_SECONDS = 0.2
_LOOKS_PER_KNOCK = 10
"""Looks at the processes for each look at whether the server takes requests."""
_KNOCK_SECONDS = 1.0
# An answer that is on its way says best what went wrong, and so do lines of the log.
_LAST_ANSWER_SECONDS = 1.0


class Connection:
    """Requests over a server's unix socket. Belongs to the event loop of its first request."""

    def __init__(self, name: str, address: str, handle: Handle | None, health_seconds: float) -> None:
        """Without `handle` the server was started elsewhere, and its processes are not known."""
        self.fault: str | None = None
        """Why no request is answered any more; None while nothing is known to be wrong."""
        self._name = name
        self._handle = handle
        self._health_seconds = health_seconds
        self._num_open = 0
        self._was_healthy = False
        self._lost: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        # No connection is kept: the server may close an idle one just when it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=address, limits=limits),
            base_url="http://engine",
            timeout=None,
        )

    async def close(self) -> None:
        """Stop watching the processes, and end all requests."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self._lose("it was closed")
        await self._http.aclose()

    async def post(self, step: str, route: str, content: object = None) -> Any:
        """Send a request with a JSON body, and return what the answer's JSON says."""
        return json.loads(await self.send(step, route, content) or b"null")

    async def send(self, step: str, route: str, content: object = None) -> bytes:
        """Send a POST, return the answer's body; raise EngineLost if none comes, EngineRefused for an error."""
        if content is None:
            request = self._http.build_request("POST", route)
        else:
            kind = "msgpack" if isinstance(content, bytes) else "json"
            body = content if isinstance(content, bytes) else msgspec.json.encode(content)
            headers = {"content-type": f"application/{kind}"}
            request = self._http.build_request("POST", route, content=body, headers=headers)
        try:
            answer = await self._race(self._http.send(request))
        except (httpx.HTTPError, RuntimeError) as error:
            raise await self._failure(f"{step} got no answer: {self.find_fault() or repr(error)}") from None
        if answer.status_code != 200:
            refusal = EngineBusy if answer.status_code == 503 else EngineRefused
            raise await self._failure(f"{step} was answered {answer.status_code}", answer.text[:1000], refusal)
        return answer.content

    async def is_healthy(self) -> bool:
        """Return whether the server says in time that it is."""
        try:
            async with asyncio.timeout(self._health_seconds):
                answer = await self._race(self._http.get("/health"))
        except (TimeoutError, httpx.HTTPError, RuntimeError):
            return False
        self._was_healthy |= answer.status_code == 200
        return answer.status_code == 200

    async def read_metrics(self) -> str | None:
        """Return what the server counts; None if it does not say so in time."""
        try:
            async with asyncio.timeout(self._health_seconds):
                return (await self._race(self._http.get("/metrics"))).text
        except (TimeoutError, httpx.HTTPError, RuntimeError):
            return None

    def find_fault(self) -> str | None:
        """Say why no request is answered any more, by a look at the processes; None if nothing is wrong with them."""
        return self.fault or (self._handle.find_fault() if self._handle else None)

    def last_words(self) -> str:
        """Say why it ended, from its log, and where the log is."""
        if self._handle is None:
            return "it was not started here: see its own log"
        return f"{find_cause(self._handle.log_lines())}\nits log is {self._handle.log}"

    async def _race(self, request: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
        """Return the answer, or raise httpx.ReadError soon after the server was lost."""
        if self._watching is None:
            self._lost = asyncio.get_running_loop().create_future()
            self._watching = asyncio.create_task(self._watch())
        assert self._lost is not None
        sending = asyncio.create_task(request)
        self._num_open += 1
        try:
            await asyncio.wait((sending, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                await asyncio.wait((sending,), timeout=_LAST_ANSWER_SECONDS)
            if not sending.done():
                raise httpx.ReadError(self.fault or "it is lost")
            return sending.result()
        finally:
            self._num_open -= 1
            if not sending.done():
                sending.cancel()
                await asyncio.wait((sending,))

    async def _watch(self) -> None:
        """Look for what leaves requests without an answer, until it is found."""
        num_looks = num_refused = 0
        while self.fault is None:
            await asyncio.sleep(_LOOK_SECONDS)
            num_looks += 1
            fault = self.find_fault()
            if fault is None and self._was_healthy and self._num_open and num_looks % _LOOKS_PER_KNOCK == 0:
                num_refused = num_refused + 1 if await self._is_refused() else 0
                fault = "its server takes no requests any more" if num_refused == 2 else None
            if fault is not None:
                _log.warning("engine %s: %s", self._name, fault)
                self._lose(fault)

    async def _is_refused(self) -> bool:
        """Return whether the server refuses a request; one that only makes it wait is not refused."""
        try:
            async with asyncio.timeout(_KNOCK_SECONDS):
                return (await self._http.get("/health")).status_code != 200
        except TimeoutError:
            return False
        except (httpx.HTTPError, RuntimeError):
            return True

    def _lose(self, fault: str) -> None:
        self.fault = self.fault or fault
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    async def _failure(
        self, text: str, answer: str = "", kind: type[EngineRefused] = EngineRefused
    ) -> EngineLost | EngineRefused:
        """Make an error of this kind if the engine is healthy, else an EngineLost with the cause from its log."""
        said = f": {answer}" if answer else ""
        if self.fault is None and await self.is_healthy():
            return kind(f"engine {self._name}: {text}{said}")
        return EngineLost(f"engine {self._name}: {text}{'' if self._handle else said}\n{self.last_words()}")


class CoreProgress:
    """Notices that a core makes no progress with what is in flight, which /health does not.

    The core makes progress when any number that it reports changes. It reports after each step that it takes, also
    after each part of a long prompt.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        """The most seconds that passed without progress while something has been in flight, until there was some."""
        self._reported: list[str] = []
        self._since = 0.0

    def begin(self) -> None:
        """Something is in flight from now on, and nothing was before."""
        self.longest, self._reported, self._since = 0.0, [], time.monotonic()

    def measure_silence(self, metrics: str) -> float:
        """Return the seconds since the last progress, by what the server counts now."""
        now = time.monotonic()
        reported = [line for line in metrics.splitlines() if line.startswith(METRICS_PREFIX)]
        if reported == self._reported:
            return now - self._since
        self.longest = max(self.longest, now - self._since)
        self._reported, self._since = reported, now
        return 0.0
