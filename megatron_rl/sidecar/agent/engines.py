"""The engines of a host, under the lease of one service.

Invariants:

- engines run under a lease only. When its service is silent for the length of the lease, gives it up, or takes another
  one, the agent ends them all. When the agent ends, however that happens, the kernel ends them;
- a host has at most one lease. Another run gets one when the last has ended. A service that is started again for the
  same run gets it once the last one is silent for some beats, and a service that had counted this host as lost at once;
- an engine that is started under the name of another one starts when no process of that one is left.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from megatron_rl.config.hardware import count_cores, share_cores
from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.weights.delivery.receiver import Receiver
from megatron_rl.shared.weights.folders import is_being_written
from megatron_rl.sidecar.agent.messages import (
    ALIVE_SECONDS,
    LONGEST_LEASE,
    PROTOCOL,
    Arrived,
    Beat,
    EngineStart,
    LeaseRequest,
    Life,
    Pulse,
    Started,
    Welcome,
)
from megatron_rl.sidecar.engines.hosts import reach_socket
from megatron_rl.sidecar.launcher import LocalHandle, LocalLauncher
from megatron_rl.sidecar.vllm.server import make_process_spec

_log = logging.getLogger(__name__)

# With `processes.NUM_LOOKS`, a stopped process is named after five seconds.
_LOOK_SECONDS = 0.2


class LeaseOver(MegatronRLError):
    """The lease of a request is not the one that is held."""


class HostTaken(MegatronRLError):
    """The service of another run holds the lease."""


@dataclasses.dataclass
class _Lease:
    name: str
    run: str
    seconds: float
    token: str
    renewed: float


@dataclasses.dataclass
class _Running:
    """An engine, until none of its processes is left."""

    handle: LocalHandle
    client: httpx.AsyncClient
    """Connections to its socket."""
    fault: str | None = None
    ending: asyncio.Task[None] | None = None


class HostEngines:
    """The engines of this host. Belongs to an event loop, whose thread must outlive the engines."""

    def __init__(
        self,
        folder: Path,
        logs: Path,
        launcher: LocalLauncher,
        make_receiver: Callable[[str], Receiver] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without engines. `folder` is private and has a short path, for sockets.

        `make_receiver` makes a receiver of weights, given the secret that it shares with the trainer's ranks. Without
        it, engines load them from the trainer's folder, which this host must share.
        """
        self._folder = folder
        self._logs = logs
        self._launcher = launcher
        self._make_receiver = make_receiver
        self._receiver: Receiver | None = None
        # The files of one receiver are removed before another one begins.
        self._changing_receiver = asyncio.Lock()
        self._clock = clock
        self._lease: _Lease | None = None
        self._engines: dict[str, _Running] = {}

    async def take_lease(self, request: LeaseRequest) -> Welcome:
        """Give the lease to a service, and end the engines of the last one."""
        if request.protocol != PROTOCOL:
            raise InputError(
                f"the service speaks version {request.protocol} of the agents' protocol, and this agent {PROTOCOL}: "
                "install the same megatron_rl on both hosts, and start the agent again"
            )
        if not 0 < request.seconds <= LONGEST_LEASE:
            raise InputError(f"a lease of {request.seconds:g} s must be above 0 and at most {LONGEST_LEASE:g} s")
        held = self._lease
        if held is not None and held.token != request.token:
            is_alive = self._clock() - held.renewed < ALIVE_SECONDS
            if held.run != request.run or is_alive:
                raise HostTaken(
                    f"this host's engines work for the run {held.run!r}: name another host, end that run, or wait "
                    f"{held.seconds:g} s after its sidecar has ended"
                )
        mine = _Lease(secrets.token_hex(16), request.run, request.seconds, request.token, self._clock())
        self._lease = mine
        _log.info("the service of the run %r holds this host for %g s at a time", request.run, request.seconds)
        await self._end_all()
        # The end of engines takes long, and is not the service's silence.
        mine.renewed = self._clock()
        async with self._changing_receiver:
            if held is None or held.token != mine.token:
                await self._close_receiver()
            if self._receiver is None and self._make_receiver is not None:
                self._receiver = self._make_receiver(mine.token)
            port = None if self._receiver is None else self._receiver.port
        return Welcome(lease=mine.name, user=os.getuid(), port=port)

    async def leave(self) -> None:
        """End the lease, its engines and the delivery of weights to them."""
        self._lease = None
        await self._end_all()
        async with self._changing_receiver:
            if self._lease is None:
                await self._close_receiver()

    def check_lease(self, name: str) -> None:
        """Raise LeaseOver unless the lease of this name is held."""
        if self._lease is None or not secrets.compare_digest(self._lease.name.encode(), name.encode()):
            raise LeaseOver("the lease of this host is over: its engines were ended, or belong to another service")

    async def start(self, name: str, start: EngineStart) -> Started:
        """Start an engine and return at once; nothing waits until it answers."""
        lease = self._lease
        await self.end(name)
        if lease is None or self._lease is not lease:
            raise LeaseOver("the lease of this host ended while an engine was started")
        config = start.config
        if not Path(config.model).is_dir():
            raise InputError(
                f"the folder {config.model} of the model does not exist on this host: copy it there, or name the "
                'host\'s own with model = "..." in the file of --rollout-hosts'
            )
        if not config.num_threads:
            threads = share_cores(count_cores(), num_ranks=0, num_workers=start.num_workers).threads_of_worker
            config = dataclasses.replace(config, num_threads=threads)
        config = dataclasses.replace(config, python=config.python or sys.executable)
        spec = make_process_spec(config, name, self._folder / name, self._logs / f"{name}.log")
        try:
            handle = self._launcher.start(spec)
        except OSError as error:
            raise InputError(
                f"{config.python} cannot be started: {error}: name the Python that has vLLM on this host with "
                'python = "..." in the file of --rollout-hosts'
            ) from None
        client = httpx.AsyncClient(
            transport=reach_socket(handle.address, is_ours=True), base_url="http://engine", timeout=None
        )
        self._engines[name] = _Running(handle, client)
        _log.info("engine %s of the run %r is started; its log is %s", name, lease.run, spec.log)
        return Started(log=str(spec.log))

    async def end(self, name: str) -> None:
        """End an engine, if it runs; return when none of its processes is left."""
        running = self._engines.get(name)
        if running is None:
            return
        if running.ending is None:
            running.ending = asyncio.create_task(self._kill(name, running))
        await asyncio.shield(running.ending)

    def find_client(self, name: str) -> httpx.AsyncClient | None:
        """Return a client of an engine's unix socket; None if no engine has this name."""
        running = self._engines.get(name)
        return None if running is None else running.client

    def beat(self, beat: Beat) -> Pulse:
        """Renew the lease, and tell what became of its engines."""
        assert self._lease is not None
        self._lease.renewed = self._clock()
        for name, pids in beat.needed.items():
            if name in self._engines:
                self._engines[name].handle.need(pids)
        return Pulse(
            engines={
                name: self._describe(running, beat.num_lines.get(name, 0)) for name, running in self._engines.items()
            },
            arrived=None if beat.version is None else self._find_arrived(beat.version),
        )

    async def watch(self) -> None:
        """Look at the processes of all engines, and at the lease, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for running in self._engines.values():
                running.fault = running.fault or running.handle.find_fault()
            lease = self._lease
            if lease is not None and self._clock() - lease.renewed > lease.seconds:
                _log.warning(
                    "the service of the run %r has been silent for %g s: its engines are ended",
                    lease.run,
                    lease.seconds,
                )
                await self.leave()

    def _find_arrived(self, version: int) -> Arrived | None:
        receiver = self._receiver
        if receiver is None or not (folder := receiver.folder / f"version-{version}").is_dir():
            return None
        newest = receiver.describe()
        is_newest = newest["version"] == version
        return Arrived(
            folder=str(folder),
            is_being_written=is_being_written(folder),
            is_complete=is_newest and bool(newest["complete"]),
            fingerprint=newest["fingerprint"] if is_newest else "",
        )

    async def _close_receiver(self) -> None:
        """End the delivery of weights, and free their memory."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await asyncio.to_thread(receiver.close)
            await asyncio.to_thread(shutil.rmtree, receiver.folder, ignore_errors=True)

    def _describe(self, running: _Running, num_seen: int) -> Life:
        # The fault first: the lines then hold all that was printed before it.
        ended = running.handle.poll()
        fault = running.fault or running.handle.find_fault()
        num_lines, lines = running.handle.new_lines(num_seen)
        return Life(ended=ended, fault=fault, num_lines=num_lines, lines=lines)

    async def _end_all(self) -> None:
        await asyncio.gather(*(self.end(name) for name in list(self._engines)))

    async def _kill(self, name: str, running: _Running) -> None:
        await asyncio.to_thread(running.handle.kill)
        await running.client.aclose()
        with contextlib.suppress(FileNotFoundError):
            Path(running.handle.address).unlink()
        del self._engines[name]
