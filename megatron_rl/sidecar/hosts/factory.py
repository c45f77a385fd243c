"""Gives each engine a place: on the service's own host, or on another one through its agent."""

import asyncio
import contextlib
import dataclasses
import logging
import random
import secrets
import ssl
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from megatron_rl.shared.protocol.hosts import DeliveryHost, DeliveryHosts
from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.shared.weights.delivery.messages import Target
from megatron_rl.sidecar.agent.messages import PassOn
from megatron_rl.sidecar.hosts.remote import RemoteHost
from megatron_rl.sidecar.hosts.spanned_hosts import HandleOfParts, SpannedHosts
from megatron_rl.sidecar.hosts.static import HostPlace, StaticHosts
from megatron_rl.sidecar.hosts.timeouts import TIMEOUTS, HostLimits, Timeouts
from megatron_rl.sidecar.redelivery import redeliver
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.parts import EnginePart
from megatron_rl.sidecar.vllm.server import ServerConfig

_log = logging.getLogger(__name__)

_FIRST_PORT_OF_ENGINES = 2
"""The distance from an agent's port to that of the first engine whose parts meet there; the next one takes weights."""

_BRING_SECONDS = 60.0
"""Seconds to find a host that can send a version to another one, if that answers none of them."""


class Hosts:
    """The other hosts of a service, from `open` to `close`."""

    def __init__(self, named: StaticHosts, run: str, timeouts: Timeouts = TIMEOUTS) -> None:
        """Make the hosts of a run; the secret of the weights' delivery is another one for each service."""
        self._secret = secrets.token_hex(32)
        self._epoch = 0
        self._run = run
        self._timeouts = timeouts
        self._limits = HostLimits()
        self.all = [self._make(place, named) for place in named.hosts]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._bringing: dict[tuple[str, int, str], asyncio.Task[bool]] = {}
        self.find_trainer_lease: Callable[[], int] = lambda: 0
        """Finds the number of the lease under which the current version was published, which may be over by now."""

    @property
    def num_engines(self) -> int:
        """The number of engines that run on these hosts."""
        return sum(hosts[0].place.engines for hosts in _group(self.all))

    def open(self) -> None:
        """Begin to hold the lease of each host."""
        for host in self.all:
            self._open(host)

    def add(self, place: HostPlace, named: StaticHosts) -> RemoteHost:
        """Begin to hold the lease of one more host, which is one of those named."""
        host = self._make(place, named)
        self.all.append(host)
        self._open(host)
        return host

    def drop(self, host: RemoteHost) -> Coroutine[Any, Any, None]:
        """Forget a host at once; what is returned gives up its lease, and with it its engines."""
        self.all.remove(host)
        self._change()
        return self._leave(host, self._tasks.pop(host.name))

    @staticmethod
    async def _leave(host: RemoteHost, task: "asyncio.Task[None]") -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await host.close()

    async def close(self) -> None:
        """Give up all leases, and with them the engines."""
        await asyncio.gather(*map(self.drop, list(self.all)))

    def list_for_delivery(self, engines: Collection[str]) -> DeliveryHosts:
        """List the hosts to which the trainer delivers weights; `engines` are all that the service has."""
        hosts = []
        for host in self.all:
            host.is_listed = host.port is not None and not host.is_leaving
            if host.port is not None and host.is_listed:
                hosts.append(DeliveryHost(name=host.name, address=host.address, port=host.port))
        elsewhere = {name for host in self.all for name in host.engines}
        num_own = sum(name not in elsewhere for name in engines)
        return DeliveryHosts(epoch=self._epoch, token=self._secret, hosts=hosts, num_own_engines=num_own)

    def leave_out(self, name: str, version: int, reason: str) -> None:
        """Note that the trainer has not delivered a version to a host."""
        _log.warning("host %s was not given version %d: %s", name, version, reason)
        for host in self.all:
            # It may have left meanwhile.
            if host.name == name:
                host.left_out = (version, reason)

    def status(self) -> dict[str, Any]:
        """Return the state of each host."""
        return {host.name: host.describe() for host in self.all}

    def _make(self, place: HostPlace, named: StaticHosts) -> RemoteHost:
        tls = None if named.tls_ca is None else ssl.create_default_context(cafile=named.tls_ca)
        return RemoteHost(place, self._run, named.token, self._secret, self._timeouts, tls, self._limits)

    def _open(self, host: RemoteHost) -> None:
        host.on_changed, host.bring = self._change, self._bring
        self._tasks[host.name] = asyncio.create_task(host.run())

    def _change(self) -> None:
        self._epoch += 1
        self._limits.num_hosts = len(self.all)

    async def _bring(self, host: RemoteHost, weights: Weights) -> bool:
        """Begin to send a version to a host, within a bound; its engines that ask at once share the attempt."""
        name = host.name, weights.version, weights.fingerprint
        if name not in self._bringing:
            self._bringing[name] = asyncio.create_task(self._try_to_bring(host, weights))
            self._bringing[name].add_done_callback(lambda _: self._bringing.pop(name))
        return await asyncio.shield(self._bringing[name])

    async def _try_to_bring(self, host: RemoteHost, weights: Weights) -> bool:
        try:
            async with asyncio.timeout(_BRING_SECONDS):
                return await self._find_sender(host, weights)
        except TimeoutError:
            _log.warning("version %d was not sent to host %s in %g s", weights.version, host.name, _BRING_SECONDS)
            return False

    async def _find_sender(self, host: RemoteHost, weights: Weights) -> bool:
        if host.port is None:
            return False
        target, key, lease = (
            Target(host.name, host.address, host.port),
            self._secret.encode(),
            self.find_trainer_lease(),
        )
        _log.info("version %d is sent to host %s, which has joined since its publish", weights.version, host.name)
        if await asyncio.to_thread(redeliver, weights, target, key, lease):
            return True
        # Ranks on several hosts have a part each, and hosts of engines have all. Those that join ask different ones.
        # The host itself may have got the version meanwhile: it would begin it again, while its engines read it.
        passing = PassOn(weights=weights, target=target, lease=lease)
        for other in random.sample(self.all, len(self.all)):
            if other is not host and other.port is not None and await other.pass_on(passing):
                return True
        return False


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
        self._places = [_Room() for _ in range(num_own)]
        for together in _group(hosts):
            self._make_rooms(together)

    def add_host(self, host: RemoteHost) -> None:
        """Make room for the engines of one more host, which runs them alone."""
        self._make_rooms([host])

    def withdraw_host(self, host: RemoteHost) -> None:
        """Give no further engine a place on this host."""
        self._places = [place for place in self._places if host not in place.hosts or place.holder is not None]

    def list_engines(self, host: RemoteHost) -> list[str]:
        """List the engines that have a place on this host."""
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
            return self._own.make_engine(name, handles[0], place.hosts[0])
        return self._own.make_engine(name, HandleOfParts(handles), SpannedHosts(place.hosts))

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

    def _make_rooms(self, hosts: Sequence[RemoteHost]) -> None:
        self._places += _make_rooms(hosts, self._config.tensor_parallel_size)

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
