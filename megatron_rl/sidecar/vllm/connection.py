"""Requests to a vLLM server: each ends soon if the server can no longer answer it.

If the core of a vLLM server dies during a request, the server may wait for this request before it ends, while the
request waits for the core. So every request is raced against the faults that would leave it without an answer: a
process that the engine needs has ended or is stopped, or the server takes no other requests. Callers set deadlines.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Coroutine
from typing import Any, ClassVar

import httpx
import msgspec

from megatron_rl.shared.protocol.wire import Drafts
from megatron_rl.sidecar.engines import (
    EngineBusy,
    EngineLost,
    EngineRefused,
    RefusalCode,
    WeightsNotWritten,
    WrongWeights,
)
from megatron_rl.sidecar.engines.hosts import STEP
from megatron_rl.sidecar.launcher import Handle
from megatron_rl.sidecar.members import cancel
from megatron_rl.sidecar.vllm.routes import WORKERS, WorkersCall
from megatron_rl.sidecar.vllm.server_log import find_cause

METRICS_PREFIX = "vllm:"

_log = logging.getLogger(__name__)

# With `processes.NUM_LOOKS`, a stopped process is named after five seconds.
_LOOK_SECONDS = 0.2
_SILENT_SECONDS = 2.0
"""The seconds without an answer after which a server with open requests is asked whether it takes others."""
_LEAST_SECONDS_BETWEEN_KNOCKS = 0.02
"""The same for all servers together: a thousand that are busy at once must not be kept busy by such questions."""
_KNOCK_SECONDS = 1.0
# An answer that is already on its way explains the fault best, and so do the last lines of the log.
_LAST_ANSWER_SECONDS = 1.0


class Connection:
    """Requests to a server. Belongs to the event loop of its first request."""

    num_watched: ClassVar[int] = 0
    """The connections of this process whose servers are watched."""

    def __init__(
        self, name: str, transport: httpx.AsyncBaseTransport, handle: Handle | None, health_seconds: float
    ) -> None:
        """Make a connection; without `handle` the server was started elsewhere, and its processes are unknown."""
        self.fault: str | None = None
        """The reason why no request is answered any more; None while no fault is known."""
        self._name = name
        self._handle = handle
        self._health_seconds = health_seconds
        self._num_open = 0
        self._answered = 0.0
        """The time of the last answer."""
        self._was_healthy = False
        self._lost: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._http = httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None)

    async def close(self) -> None:
        """Stop watching the processes, and end all requests."""
        await cancel(self._watching)
        self._lose("it was closed")
        await self._http.aclose()

    async def post(self, step: str, route: str, content: object = None) -> Any:
        """Send a request with a JSON body, and return the decoded JSON of the answer."""
        return json.loads(await self.send(step, route, content) or b"null")

    async def send(self, step: str, route: str, content: object = None) -> bytes:
        """Send a POST and return the answer's body.

        Raise EngineLost if no answer comes, and EngineRefused if the answer is an error.
        """
        belongs = {STEP: step}
        if content is None:
            request = self._http.build_request("POST", route, extensions=belongs)
        else:
            kind = "msgpack" if isinstance(content, bytes) else "json"
            body = content if isinstance(content, bytes) else msgspec.json.encode(content)
            headers = {"content-type": f"application/{kind}"}
            request = self._http.build_request("POST", route, content=body, headers=headers, extensions=belongs)
        try:
            answer = await self._race(self._http.send(request))
        except (httpx.HTTPError, RuntimeError) as error:
            raise await self._failure(f"{step} got no answer", error=error) from None
        if answer.status_code != 200:
            refusal = EngineBusy if answer.status_code == 503 else EngineRefused
            raise await self._failure(f"{step} was answered {answer.status_code}", answer.text[:1000], refusal)
        return answer.content

    async def is_healthy(self) -> bool:
        """Check whether the server reports in time that it is healthy."""
        answer = await self._get("/health")
        is_healthy = answer is not None and answer.status_code == 200
        self._was_healthy |= is_healthy
        return is_healthy

    async def read_metrics(self) -> str | None:
        """Return the server's metrics; None if they do not come in time."""
        answer = await self._get("/metrics")
        return None if answer is None else answer.text

    async def _get(self, route: str) -> httpx.Response | None:
        try:
            async with asyncio.timeout(self._health_seconds):
                return await self._race(self._http.get(route, extensions={STEP: "health"}))
        except (TimeoutError, httpx.HTTPError, RuntimeError):
            return None

    def find_fault(self) -> str | None:
        """Look at the processes, and return why no request is answered any more; None if no fault is found."""
        return self.fault or (self._handle.find_fault() if self._handle else None)

    def last_words(self) -> str:
        """Describe why it ended, from its log, and name the log."""
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
            answer = sending.result()
            self._answered = time.monotonic()
            return answer
        finally:
            self._num_open -= 1
            if not sending.done():
                sending.cancel()
                await asyncio.wait((sending,))

    async def _watch(self) -> None:
        """Look for a fault that leaves requests without an answer, until one is found."""
        Connection.num_watched += 1
        try:
            await self._look()
        finally:
            Connection.num_watched -= 1

    async def _look(self) -> None:
        num_refused, knocked = 0, time.monotonic()
        while self.fault is None:
            await asyncio.sleep(_LOOK_SECONDS)
            fault = self.find_fault()
            silent_seconds = max(_SILENT_SECONDS, _LEAST_SECONDS_BETWEEN_KNOCKS * Connection.num_watched)
            is_silent = time.monotonic() - max(self._answered, knocked) > silent_seconds
            if fault is None and self._was_healthy and self._num_open and is_silent:
                num_refused = num_refused + 1 if await self._is_refused() else 0
                fault = "its server takes no requests any more" if num_refused == 2 else None
                knocked = time.monotonic()
            if fault is not None:
                _log.warning("engine %s: %s", self._name, fault)
                self._lose(fault)

    async def _is_refused(self) -> bool:
        """Check whether the server refuses a request; a request that only waits is not refused."""
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
        self, text: str, answer: str = "", kind: type[EngineRefused] = EngineRefused, error: Exception | None = None
    ) -> EngineLost | EngineRefused:
        """Make an error of this kind if the engine is healthy, else an EngineLost with the cause from its log."""
        is_healthy = self.fault is None and await self.is_healthy()
        if error is not None:
            # The question for its health may have found that its host is lost.
            text += f": {self.find_fault() or repr(error)}"
        said = f": {answer}" if answer else ""
        if is_healthy:
            return kind(f"engine {self._name}: {text}{said}")
        return EngineLost(f"engine {self._name}: {text}{'' if self._handle else said}\n{self.last_words()}")


class CoreProgress:
    """The progress of a core with its requests in flight, which /health does not show.

    The core makes progress when any number that it reports changes. It reports after each of its steps, and after each
    part of a long prompt too.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        """The longest silence, in seconds, that ended with progress while requests were in flight."""
        self._reported: list[str] = []
        self._since = 0.0

    def begin(self) -> None:
        """Begin to measure: a request is in flight from now on, and none was before."""
        self.longest, self._reported, self._since = 0.0, [], time.monotonic()

    def measure_silence(self, metrics: str) -> float:
        """Return the seconds since the last progress, given the server's metrics of now."""
        now = time.monotonic()
        reported = [line for line in metrics.splitlines() if line.startswith(METRICS_PREFIX)]
        if reported == self._reported:
            return now - self._since
        self.longest = max(self.longest, now - self._since)
        self._reported, self._since = reported, now
        return 0.0


_REFUSALS: dict[str, type[EngineRefused]] = {
    RefusalCode.REFUSED: EngineRefused,
    RefusalCode.NOT_WRITTEN: WeightsNotWritten,
    RefusalCode.WRONG_WEIGHTS: WrongWeights,
}
"""The error to raise for each code of a worker's refusal."""

Answer = dict[str, Any]


class Workers:
    """The workers of the engine `name`, called through its server."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._connection = connection

    async def __call__(self, step: str, method: str, *arguments: str) -> list[Answer]:
        """Call a method in every worker, for a step; raise a worker's refusal as the error that its code stands for."""
        call = msgspec.msgpack.encode(WorkersCall(method, list(arguments)))
        return self.check(step, msgspec.msgpack.decode(await self._connection.send(step, WORKERS, call)))

    def check(self, step: str, answers: list[Answer]) -> list[Answer]:
        """Return the workers' answers to a call for a step; raise a refusal among them."""
        for rank, answer in enumerate(answers):
            if "error" in answer:
                code, text = answer.get("code"), f"engine {self._name}, worker {rank}, {step}: {answer['error']}"
                if code not in _REFUSALS:
                    raise EngineRefused(f"{text} (code {code!r} is unknown: run the same megatron_rl on both sides)")
                raise _REFUSALS[code](text)
        return answers

    def get_common(self, step: str, answers: list[Answer], key: str) -> str:
        """Return the value that all answers have."""
        values = {str(answer[key]) for answer in answers}
        if len(values) != 1:
            raise EngineRefused(f"engine {self._name}, {step}: its workers differ in their {key}: {sorted(values)}")
        return values.pop()


def count_drafts(metrics: str) -> Drafts:
    """Count the drafts of an engine since its start."""
    count, drafted, accepted = (
        sum(int(float(count)) for count in re.findall(rf"^vllm:spec_decode_num_{name}_total\b.* (\S+)$", metrics, re.M))
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    return Drafts(count=count, drafted=drafted, accepted=accepted)


class DraftMeter:
    """Counts the drafts of the engine `name` for each version."""

    def __init__(self, name: str, connection: Connection) -> None:
        self._name = name
        self._connection = connection
        self._before = Drafts()
        """The counts when the last version ended."""

    async def count(self) -> Drafts | None:
        """Count the drafts since the last version ended; None if the engine does not answer."""
        metrics = await self._connection.read_metrics()
        return None if metrics is None else count_drafts(metrics) - self._before

    async def end_version(self, version: int) -> None:
        """Log how many drafted tokens were accepted with this version, and begin to count those of the next one."""
        since = await self.count()
        if since is not None and since.drafted:
            self._before += since
            _log.info(
                "engine %s: %d of %d drafted tokens were accepted (%.0f %%), with version %d",
                self._name, since.accepted, since.drafted, 100 * since.accepted / since.drafted, version,
            )  # fmt: skip
