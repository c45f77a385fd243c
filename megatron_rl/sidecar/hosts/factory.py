"""Gives each engine a place: on the service's own host, or on another one through its agent."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import ssl
from collections.abc import Sequence
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.hosts import DeliveryHost, DeliveryHosts
from megatron_rl.sidecar.hosts.remote import PATIENCE, Patience, RemoteHost
from megatron_rl.sidecar.hosts.static import StaticHosts
from megatron_rl.sidecar.hosts.together import HandleOfParts, HostsTogether
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.parts import EnginePart
from megatron_rl.sidecar.vllm.server import ServerConfig

_log = logging.getLogger(__name__)

_FIRST_PORT_OF_ENGINES = 2
"""The distance from an agent's port to that of the first engine whose parts meet there; the next one takes weights."""


class Hosts:
    """The other hosts of a service, from `open` to `close`."""

    def __init__(self, named: StaticHosts, run: str, patience: Patience = PATIENCE) -> None:
        """Make the hosts of a run; the secret of the weights' delivery is another one for each service."""
        self._secret = secrets.token_hex(32)
        self._epoch = 0
        tls = None if named.tls_ca is None else ssl.create_default_context(cafile=named.tls_ca)
        self.all = [RemoteHost(place, run, named.token, self._secret, patience, tls) for place in named.hosts]
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_engines(self) -> int:
        """The number of engines that run on these hosts."""
        return sum(hosts[0].place.engines for hosts in _group(self.all))

    def open(self) -> None:
        """Begin to hold the lease of each host."""
        for host in self.all:
            host.on_changed = self._change
        self._tasks = [asyncio.create_task(host.run()) for host in self.all]

    async def close(self) -> None:
        """Give up all leases, and with them the engines."""
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(host.close() for host in self.all))

    def list_for_delivery(self) -> DeliveryHosts:
        """List the hosts to which the trainer delivers weights."""
        hosts = [
            DeliveryHost(name=host.name, address=host.address, port=host.port)
            for host in self.all
            if host.port is not None
        ]
        return DeliveryHosts(epoch=self._epoch, token=self._secret, hosts=hosts)

    def leave_out(self, name: str, version: int, reason: str) -> None:
        """Note that the trainer has not delivered a version to a host."""
        host = next((host for host in self.all if host.name == name), None)
        if host is None:
            raise InputError(f"unknown host {name!r}: write one of {', '.join(host.name for host in self.all)}")
        _log.warning("host %s was not given version %d: %s", name, version, reason)
        host.left_out = (version, reason)

    def status(self) -> dict[str, Any]:
        """Return the state of each host."""
        return {host.name: host.describe() for host in self.all}

    def _change(self) -> None:
        self._epoch += 1


@dataclasses.dataclass
class _Room:
    """Room for one engine."""

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
        self._places = [_Room() for _ in range(num_own)] + [
            room for together in _group(hosts) for room in _make_rooms(together, config.tensor_parallel_size)
        ]

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
            return self._own.make_engine(name, handles[0], place.hosts[0])
        return self._own.make_engine(name, HandleOfParts(handles), HostsTogether(place.hosts))

    def adopt(self, name: str, address: str) -> VllmEngine:
        """Use an engine that was started on this host by another process, given the path of its socket."""
        return self._own.adopt(name, address)

    def release(self, name: str) -> None:
        """Free the place of an engine that will not return."""
        for place in self._places:
            if place.holder == name:
                place.holder = None
        self._own.release(name)

    def _configure(self, place: _Room, rank: int) -> ServerConfig:
        """Configure an engine, or its part, on one of its hosts."""
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


def _group(hosts: Sequence[RemoteHost]) -> list[list[RemoteHost]]:
    """Group the hosts that run engines together, in their order; most are alone."""
    groups: dict[tuple[str, str], list[RemoteHost]] = {}
    for host in hosts:
        word = host.place.together
        groups.setdefault((word, "" if word else host.name), []).append(host)
    return list(groups.values())


def _make_rooms(hosts: Sequence[RemoteHost], size: int) -> list[_Room]:
    """Divide the devices of hosts over their engines, each of which has as many on every host."""
    share = size // len(hosts)
    rooms = []
    for number in range(hosts[0].place.engines):
        part = slice(number * share, (number + 1) * share)
        rooms.append(_Room(tuple(hosts), tuple((host.place.devices or ())[part] for host in hosts), number))
    return rooms
