"""Makes engines on all hosts: each has a place on the service's own host, on another one, or on several together.

Invariants of an engine that several hosts run together, with a part on each (`vllm/parts.py`):

- the engine is lost with any of its parts or hosts, and its fault names the host. Then the other parts are ended
  with it, and all start again;
- a version has reached the engine once it has arrived on every host; each worker loads it from its own host's folder.
"""

import asyncio
import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.sidecar.engines import EngineRefused, WeightsNotWritten, WeightsPlace
from megatron_rl.sidecar.hosts.remote import RemoteHandle, RemoteHost
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.parts import EnginePart
from megatron_rl.sidecar.vllm.server import ServerConfig

_FIRST_PORT_OF_ENGINES = 2
"""The distance from an agent's port to that of the first engine whose parts meet there; the next one takes weights."""


@dataclasses.dataclass
class _Room:
    hosts: tuple[RemoteHost, ...] = ()
    """The hosts that it is divided over; none for the service's own host."""
    devices: tuple[tuple[int, ...], ...] = ()
    """Its devices on each of them."""
    number: int = 0
    """Its place among the engines of these hosts."""
    holder: str | None = None


class HostsFactory:
    """Makes engines on all hosts. Satisfies `megatron_rl.sidecar.supervisor.EngineFactory`."""

    def __init__(self, own: VllmFactory, num_own: int, hosts: Sequence[RemoteHost], config: ServerConfig) -> None:
        """Make a factory; `own` makes the first `num_own` engines, and more once all places are taken.

        `config` is for engines on other hosts. If it has no threads, the cores of a host are shared out by its agent.
        """
        self._own = own
        self._config = config
        self._places = [_Room() for _ in range(num_own)]
        for members in group_hosts(hosts):
            self.add_hosts(*members)

    def add_hosts(self, *hosts: RemoteHost) -> None:
        """Make room for the engines that hosts run together, each of which has as many devices on every host."""
        share = self._config.tensor_parallel_size // len(hosts)
        for number in range(hosts[0].place.engines):
            part = slice(number * share, (number + 1) * share)
            self._places.append(_Room(hosts, tuple((host.place.devices or ())[part] for host in hosts), number))

    def withdraw_host(self, host: RemoteHost) -> None:
        """Give no further engine a place on this host."""
        self._places = [place for place in self._places if host not in place.hosts or place.holder is not None]

    def list_engines(self, host: RemoteHost) -> list[str]:
        return [place.holder for place in self._places if host in place.hosts and place.holder is not None]

    def create(self, name: str) -> VllmEngine:
        """Start the processes of an engine; the engine's `start()` waits until they are ready."""
        place = self._take_place(name)
        if place is None or not place.hosts:
            return self._own.create(name)
        num_workers = self._config.tensor_parallel_size // len(place.hosts)
        handles = [
            host.start(name, self._configure(place, rank), host.place.engines * num_workers)
            for rank, host in enumerate(place.hosts)
        ]
        if len(handles) == 1:
            return self._own.make_engine(name, handles[0].address, handles[0], place.hosts[0])
        whole = HandleOfParts(handles)
        return self._own.make_engine(name, whole.address, whole, SpannedHosts(place.hosts))

    def adopt(self, name: str, address: str) -> VllmEngine:
        """Use an engine that was started on this host by another process, given the path of its socket."""
        return self._own.adopt(name, address)

    def release(self, name: str) -> None:
        """Free the place of an engine that will not return."""
        for place in self._places:
            if place.holder == name:
                place.holder = None
        # A host that leaves takes no other engine.
        self._places = [
            place for place in self._places if place.holder or not any(host.is_leaving for host in place.hosts)
        ]
        self._own.release(name)

    def _configure(self, place: _Room, rank: int) -> ServerConfig:
        host, leader = place.hosts[rank], place.hosts[0]
        part = None
        if len(place.hosts) > 1:
            port = leader.agent_port + _FIRST_PORT_OF_ENGINES + place.number
            part = EnginePart(rank, len(place.hosts), host.address, leader.address, port)
        return dataclasses.replace(
            self._config,
            devices=place.devices[rank],
            python=host.place.python,
            model=host.place.model or self._config.model,
            part=part,
        )

    def _take_place(self, name: str) -> _Room | None:
        """Return the place that the engine has, or else a free one; None if all are taken."""
        for holder in (name, None):
            for place in self._places:
                if place.holder == holder:
                    place.holder = name
                    return place
        return None


def group_hosts(hosts: Sequence[RemoteHost]) -> list[list[RemoteHost]]:
    """Group the hosts that run engines together, in their order; most are alone."""
    groups: dict[tuple[str, str], list[RemoteHost]] = {}
    for host in hosts:
        word = host.place.together
        groups.setdefault((word, "" if word else host.name), []).append(host)
    return list(groups.values())


class SpannedHosts:
    """Several hosts as one. Satisfies `sidecar.engines.EngineHost`; the first one has the engines' servers."""

    def __init__(self, hosts: Sequence[RemoteHost]) -> None:
        self._hosts = tuple(hosts)

    async def answers(self) -> bool:
        return all(await asyncio.gather(*(host.answers() for host in self._hosts)))

    async def until_back(self) -> None:
        await asyncio.gather(*(host.until_back() for host in self._hosts))

    def connect(self, address: str, is_ours: bool = True) -> httpx.AsyncBaseTransport:
        return self._hosts[0].connect(address, is_ours)

    async def is_given(self, weights: Weights) -> bool:
        return all(await asyncio.gather(*(host.is_given(weights) for host in self._hosts)))

    async def has_copy(self, weights: Weights) -> bool:
        return all(await asyncio.gather(*(host.has_copy(weights) for host in self._hosts)))

    async def find_weights(self, weights: Weights) -> tuple[WeightsPlace, ...]:
        found = await asyncio.gather(*(host.find_weights(weights) for host in self._hosts))
        return tuple(place for places in found for place in places)

    def explain_not_written(self, weights: Weights, error: WeightsNotWritten) -> EngineRefused:
        left_out = [host for host in self._hosts if host.left_out[0] == weights.version]
        return (left_out or self._hosts)[0].explain_not_written(weights, error)

    def is_being_written(self, weights: Weights) -> bool:
        return any(host.is_being_written(weights) for host in self._hosts)


class HandleOfParts:
    """The processes of all parts of an engine. Satisfies `sidecar.launcher.Handle`."""

    def __init__(self, parts: Sequence[RemoteHandle]) -> None:
        """Make a handle; the first part has the server."""
        self._parts = tuple(parts)
        self.address = parts[0].address

    @property
    def log(self) -> Path:
        return self._find_first_lost().log

    def poll(self) -> str | None:
        return next(filter(None, (part.poll() for part in self._parts)), None)

    def need(self, pids: Sequence[int]) -> None:
        # A number means another process on each host, and each has as many workers.
        share = len(pids) // len(self._parts)
        for number, part in enumerate(self._parts):
            part.need(pids[number * share : (number + 1) * share])

    def find_fault(self) -> str | None:
        for part in self._parts:
            if fault := part.find_fault():
                return f"its part on host {part.host_name}: {fault}"
        return None

    def kill(self) -> None:
        with ThreadPoolExecutor(len(self._parts)) as threads:
            list(threads.map(RemoteHandle.kill, self._parts))

    def log_lines(self) -> list[str]:
        return self._find_first_lost().log_lines()

    def _find_first_lost(self) -> RemoteHandle:
        """Return the part that explains the engine's end; that of the server while all run."""
        return next((part for part in self._parts if part.find_fault()), self._parts[0])
