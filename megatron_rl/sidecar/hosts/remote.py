"""Another host, seen from the rollout service: the lease of its agent, its engines, and requests to these.

Invariants:

- the service beats several times in the length of a lease. If the agent does not answer for `Timeouts.lost`, or answers
  that the lease is over, the host is lost: all its engines have this fault, and their requests end;
- once a host was lost, the service works there only under another lease, before which the agent ends all engines of the
  last one. So no engine from before the loss is ever spoken to again;
- a lost host is asked for a lease with growing pauses, for ever;
- durations are counted on the service's own steady clock.
"""

import asyncio
import collections
import contextlib
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol.hosts import parse_place
from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.sidecar.agent.messages import (
    LEASE_HEADER,
    UNAUTHORIZED,
    Arrived,
    Beat,
    EngineAnswer,
    EngineRequest,
    EngineStart,
    HostLimits,
    LeaseRequest,
    Life,
    Pulse,
    Started,
    Timeouts,
    Welcome,
)
from megatron_rl.sidecar.engines import EngineRefused, NotGiven, WeightsNotWritten, WeightsPlace
from megatron_rl.sidecar.engines.hosts import LIMITS, OWN_HOST
from megatron_rl.sidecar.hosts import HostPlace
from megatron_rl.sidecar.hosts.engine_requests import EngineRequests, Forwarded, explain_refusal
from megatron_rl.sidecar.launcher import LOG_LINES
from megatron_rl.sidecar.vllm.server import ServerConfig

_log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


class HostLost(MegatronRLError):
    """A host that does not answer, or whose agent has ended the lease."""


class HostRefused(MegatronRLError):
    may_pass = False
    """True if a later attempt may succeed."""


class HostBusy(HostRefused):
    """A refusal of an agent that works for another service, whose lease may be about to end."""

    may_pass = True


_KINDS: dict[int, type[HostLost | HostRefused]] = {409: HostLost, 423: HostBusy}
"""The error to raise for a status of the agent's; HostRefused for any other."""


class RemoteHost:
    """A host with an agent. Satisfies `sidecar.engines.EngineHost`; belongs to the event loop of `run`."""

    def __init__(
        self,
        place: HostPlace,
        run: str,
        token: str,
        secret: str,
        timeouts: Timeouts,
        tls: ssl.SSLContext | None,
        limits: HostLimits,
        on_changed: Callable[[], None],
        bring: "Callable[[RemoteHost, Weights], Awaitable[bool]]",
    ) -> None:
        """Make a host; `token` is the agents', and `secret` that of the weights' delivery.

        `tls` checks the agent's certificate; without it nothing is encrypted. `on_changed` learns that the host has
        joined or was lost. `bring` begins to send it a version between two publishes, and returns whether it arrives.
        """
        self.place = place
        self.name = place.address
        parsed = parse_place(place.address)
        assert parsed is not None
        self.address, self.agent_port = parsed
        self.port: int | None = None
        """The port at which the host takes weights; None if it shares the trainer's folder, or holds no lease."""
        self.is_leaving = False
        """True once it is to get no further version of the weights."""
        self.is_listed = False
        """True if the trainer's last list of hosts has it: a version may be on its way there."""
        self.on_changed, self.bring = on_changed, bring
        self._limits = limits
        self.left_out = (-1, "")
        """The last version that the trainer did not deliver to it, and the reason."""
        self._request = LeaseRequest(run=run, seconds=timeouts.lease, token=secret)
        self._timeouts = timeouts
        self.lease = ""
        """The name of the lease; empty while there is none."""
        self._shares_folder = False
        """True if its engines load the trainer's folder; known from the first lease on, and kept while it is lost."""
        self._user = 0
        self._fault = self._error = ""
        self._refused: HostRefused | None = None
        self._begun = self._answered = time.monotonic()
        self._back = asyncio.Event()
        self._handles: dict[str, RemoteHandle] = {}
        self._version: int | None = None
        self._arrived: Arrived | None = None
        self._beating = asyncio.Lock()
        url, headers = f"{'https' if tls else 'http'}://{place.address}", {"Authorization": f"Bearer {token}"}
        # A proxy of the environment would be handed the token.
        self._http = httpx.AsyncClient(
            base_url=url, verify=tls or False, headers=headers, timeout=timeouts.answer, trust_env=False
        )
        self._transport = httpx.AsyncHTTPTransport(limits=LIMITS, verify=tls or False)
        # An engine may take any time for its answer: its callers have their own deadlines. A link may be cut meanwhile.
        sending = httpx.Timeout(None, connect=timeouts.lost, write=timeouts.lost)
        to_engines = httpx.AsyncClient(base_url=url, transport=self._transport, headers=headers, timeout=sending)
        self._engine_requests = EngineRequests(to_engines, lambda: self.lease, limits.connects)

    @property
    def engines(self) -> Collection[str]:
        return self._handles.keys()

    def find_fault(self) -> str | None:
        """Say why the host's engines cannot work; None while it answers, and for a while before its first answer."""
        if self.lease:
            return None
        silent = time.monotonic() - self._begun
        refused, is_late = self._refused, silent > self._timeouts.lost
        if refused is not None and (is_late or not refused.may_pass):
            return f"its host {self.name} refuses this run: {refused}"
        if is_late and not self._fault:
            return (
                f"its host {self.name} has not answered for {silent:.0f} s ({self._error}): start its agent, or open "
                "the way to it"
            )
        return self._fault or None

    def describe(self) -> dict[str, Any]:
        return {
            "state": ("leaving" if self.is_leaving else "up") if self.lease else "lost",
            "silent_seconds": round(time.monotonic() - self._answered, 1),
            "engines": sorted(self._handles),
            "error": self.find_fault(),
        }

    async def run(self) -> None:
        """Hold the lease, for ever."""
        pause = self._timeouts.first_pause
        while True:
            try:
                await self._take_lease()
                pause = self._timeouts.first_pause
                await self._keep_lease()
            except HostRefused as refusal:
                if str(refusal) != str(self._refused):
                    _log.warning("host %s: %s", self.name, refusal)
                self._refused = refusal
            except HostLost as loss:
                self._lose(str(loss))
            except httpx.HTTPError as error:
                self._error = repr(error)
            await asyncio.sleep(pause)
            if self.find_fault():
                pause = min(2 * pause, self._timeouts.longest_pause)

    async def close(self) -> None:
        """End the lease, and with it the host's engines."""
        if self.lease:
            with contextlib.suppress(HostLost, HostRefused, httpx.HTTPError):
                await self._send("DELETE", "/v1/lease", timeout=self._timeouts.ending)
        self.lease = ""
        await self._http.aclose()
        await self._transport.aclose()

    def start(self, name: str, config: ServerConfig, num_workers: int) -> "RemoteHandle":
        """Start an engine and return at once; its start may wait for the host."""
        handle = self._handles[name] = RemoteHandle(self, name)
        handle.starting = asyncio.create_task(self._start(handle, EngineStart(config=config, num_workers=num_workers)))
        return handle

    async def end(self, handle: "RemoteHandle") -> None:
        """End an engine's processes; if the host is lost, its agent ends them with the lease."""
        if self._handles.get(handle.name) is handle:
            del self._handles[handle.name]
        if handle.lease:
            # The agent must have seen the start before the end.
            await asyncio.wait((handle.starting,))
        else:
            handle.starting.cancel()
        if handle.lease and handle.lease == self.lease:
            with contextlib.suppress(HostLost, HostRefused, httpx.HTTPError):
                await self._send("DELETE", f"/v1/engines/{handle.name}", timeout=self._timeouts.ending)

    async def beat(self) -> None:
        """Renew the lease, and learn what became of the engines."""
        async with self._beating:
            lease = self.lease
            handles = {name: handle for name, handle in self._handles.items() if handle.is_started}
            needed = {name: list(handle.needed) for name, handle in handles.items() if handle.needed}
            num_lines = {name: handle.num_lines for name, handle in handles.items()}
            version = self._version
            beat = Beat(needed=needed, num_lines=num_lines, version=version)
            try:
                pulse = await self._ask("POST", "/v1/beat", Pulse, beat)
            except httpx.HTTPError as error:
                if _is_refused(error):
                    self._lose("its agent has ended, and its engines with it")
                raise
            if self.lease != lease:
                return
            self._answered = time.monotonic()
            if self._version == version:
                self._arrived = pulse.arrived
            for name, handle in handles.items():
                del handle.needed[: len(needed.get(name, ()))]
                if handle.lease == lease:
                    handle.take(pulse.engines.get(name))

    async def answers(self) -> bool:
        if not self.lease:
            return False
        try:
            await self.beat()
        except (HostLost, HostRefused, httpx.HTTPError):
            return False
        return True

    async def until_back(self) -> None:
        await self._back.wait()

    def connect(self, address: str, is_ours: bool = True) -> httpx.AsyncBaseTransport:
        return Forwarded(address, self._ask_engine)

    async def _ask_engine(self, request: EngineRequest, is_of_step: bool) -> EngineAnswer:
        if (handle := self._handles.get(request.engine)) is not None and not handle.starting.done():
            # Until an agent was asked to start the engine, no connection reaches it.
            await asyncio.wait((handle.starting,))
        requests = self._engine_requests
        ask = requests.ask_gathered if is_of_step and len(self._handles) > 1 else requests.ask
        try:
            answer = await ask(request)
            if answer.is_fault:
                raise httpx.ReadError(answer.body.decode(errors="replace"))
        except httpx.HTTPError as error:
            # The host may be lost, or the engine dead: its last lines explain that.
            await self.answers()
            raise type(error)(f"host {self.name}: {str(error) or 'it does not answer'}") from None
        return answer

    async def is_given(self, weights: Weights) -> bool:
        if weights.is_streamed:
            return await self.answers()
        return self._shares_folder or await self._arrives(weights)

    async def has_copy(self, weights: Weights) -> bool:
        if weights.is_streamed:
            return False
        if self._shares_folder:
            return await OWN_HOST.has_copy(weights)
        return await self._arrives(weights) or (await self.bring(self, weights) and await self._arrives(weights))

    async def find_weights(self, weights: Weights) -> tuple[WeightsPlace, ...]:
        if self._shares_folder:
            return await OWN_HOST.find_weights(weights)
        found = await self._find_arrived(weights)
        if found is None:
            raise NotGiven(f"host {self.name} was not given version {weights.version}")
        return (WeightsPlace(found.folder, self._user),)

    def explain_not_written(self, weights: Weights, error: WeightsNotWritten) -> EngineRefused:
        if self._shares_folder:
            return error
        version, reason = self.left_out
        why = f": {reason}" if version == weights.version else ""
        return NotGiven(f"{error}: host {self.name} was not given all of version {weights.version}{why}")

    def is_being_written(self, weights: Weights) -> bool:
        if weights.is_streamed:
            return False
        if self._shares_folder:
            return OWN_HOST.is_being_written(weights)
        arrived = self._arrived if self._version == weights.version else None
        return arrived is not None and arrived.is_of(weights) and arrived.is_being_written

    async def _arrives(self, weights: Weights) -> bool:
        found = await self._find_arrived(weights)
        return found is not None and (found.is_complete or found.is_being_written)

    async def _find_arrived(self, weights: Weights) -> Arrived | None:
        """Ask the host for a version of the weights."""
        if self._version != weights.version:
            self._version, self._arrived = weights.version, None
        is_known = await self.answers() and self._version == weights.version
        arrived = self._arrived if is_known else None
        return arrived if arrived is not None and arrived.is_of(weights) else None

    async def _take_lease(self) -> None:
        welcome = await self._ask("POST", "/v1/lease", Welcome, self._request, timeout=self._timeouts.ending)
        self.lease, self._user, self.port = welcome.lease, welcome.user, welcome.port
        self._shares_folder = welcome.port is None
        self._answered = time.monotonic()
        self._fault, self._refused = "", None
        self._back.set()
        self.on_changed()
        _log.info("host %s is up", self.name)

    async def _keep_lease(self) -> None:
        """Beat until the host is lost."""
        while self.lease:
            await asyncio.sleep(self._limits.find_pause(self._timeouts.beat))
            try:
                await self.beat()
            except httpx.HTTPError:
                silent = time.monotonic() - self._answered
                if silent > self._timeouts.lost:
                    raise HostLost(f"it has not answered for {silent:.0f} s") from None
            except HostRefused as refusal:
                raise HostLost(str(refusal)) from None

    def _lose(self, reason: str) -> None:
        if not self.lease:
            return
        self._fault = f"its host {self.name} is lost: {reason}"
        self.lease, self.port = "", None
        self._back.clear()
        self.on_changed()
        _log.warning("host %s is lost: %s; it is asked again until it answers", self.name, reason)

    async def _start(self, handle: "RemoteHandle", start: EngineStart) -> None:
        while not handle.lease:
            await self._back.wait()
            async with self._limits.connects:
                # The host may have been lost meanwhile.
                handle.lease = self.lease
                if handle.lease:
                    await self._ask_to_start(handle, start)

    async def _ask_to_start(self, handle: "RemoteHandle", start: EngineStart) -> None:
        try:
            started = await self._ask("PUT", f"/v1/engines/{handle.name}", Started, start, self._timeouts.ending)
        except (HostLost, HostRefused, httpx.HTTPError) as error:
            handle.fail(f"its host {self.name} did not start it: {str(error) or repr(error)}")
        else:
            handle.log, handle.is_started = Path(f"{self.address}:{started.log}"), True

    async def _ask(
        self, method: str, route: str, kind: type[T], content: msgspec.Struct, timeout: float | None = None
    ) -> T:
        answer = await self._send(method, route, msgspec.json.encode(content), timeout)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise HostRefused(
                f"the answer to {method} {route} cannot be read: {error}: install the same megatron_rl there"
            ) from None

    async def _send(self, method: str, route: str, content: bytes = b"", timeout: float | None = None) -> bytes:
        """Send a request; raise HostLost if the lease is over, HostRefused for any other refusal."""
        connect = self._timeouts.answer
        answer = await self._http.request(
            method,
            route,
            content=content,
            headers={LEASE_HEADER: self.lease},
            timeout=httpx.Timeout(timeout or connect, connect=connect),
        )
        if answer.is_success:
            return answer.content
        if answer.status_code == UNAUTHORIZED:
            raise HostRefused("the token is wrong: give the agent and the file of --rollout-hosts the same")
        reason = explain_refusal(answer.status_code, answer.content)
        raise _KINDS.get(answer.status_code, HostRefused)(reason)


class RemoteHandle:
    """An engine's processes on another host. Satisfies `sidecar.launcher.Handle`."""

    def __init__(self, host: RemoteHost, name: str) -> None:
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


def _is_refused(error: BaseException) -> bool:
    """Check whether the host answers and no process listens at the agent's port."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
