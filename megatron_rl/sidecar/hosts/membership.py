"""The other hosts that a run has now: they join and leave while it runs.

Invariants:

- a host that joins gets engines at once. They take groups as soon as they hold the current version: the service sends
  it, if all of it is on the service's own host. Otherwise the next publish brings a version;
- a host that leaves is given no further version. Its engines finish their groups and end with the next publish; then
  its lease ends;
- a host whose description has changed leaves, and joins again afterwards;
- hosts that run engines together stay as they are.
"""

import asyncio
import contextlib
import logging
import secrets
import ssl
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from megatron_rl.config.settings import RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.shared.protocol.hosts import DeliveryHost, DeliveryHosts, is_loopback
from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.shared.weights.delivery.messages import Target
from megatron_rl.sidecar.agent.messages import TIMEOUTS, HostLimits, Timeouts
from megatron_rl.sidecar.hosts import FLAG, HostList, HostPlace, build_source
from megatron_rl.sidecar.hosts.factory import HostsFactory, group_hosts
from megatron_rl.sidecar.hosts.remote import RemoteHost
from megatron_rl.sidecar.members import cancel
from megatron_rl.sidecar.redelivery import redeliver
from megatron_rl.sidecar.supervisor import Supervisor
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import ServerConfig

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


class Hosts:
    """The other hosts of a service, from `open` to `close`."""

    def __init__(self, named: HostList, run: str, timeouts: Timeouts = TIMEOUTS) -> None:
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
        return sum(hosts[0].place.engines for hosts in group_hosts(self.all))

    def open(self) -> None:
        """Begin to hold the lease of each host."""
        for host in self.all:
            self._open(host)

    def add(self, place: HostPlace, named: HostList) -> RemoteHost:
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
        await cancel(task)
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
        _log.warning("host %s was not given version %d: %s", name, version, reason)
        for host in self.all:
            # It may have left meanwhile.
            if host.name == name:
                host.left_out = (version, reason)

    def status(self) -> dict[str, Any]:
        return {host.name: host.describe() for host in self.all}

    def _make(self, place: HostPlace, named: HostList) -> RemoteHost:
        tls = None if named.tls_ca is None else ssl.create_default_context(cafile=named.tls_ca)
        return RemoteHost(
            place, self._run, named.token, self._secret, self._timeouts, tls, self._limits, self._change, self._bring
        )

    def _open(self, host: RemoteHost) -> None:
        self._tasks[host.name] = asyncio.create_task(host.run())

    def _change(self) -> None:
        self._epoch += 1
        self._limits.num_hosts = len(self.all)

    async def _bring(self, host: RemoteHost, weights: Weights) -> bool:
        """Begin to send a version to a host; its engines that ask at once share the attempt."""
        name = host.name, weights.version, weights.fingerprint
        if name not in self._bringing:
            self._bringing[name] = asyncio.create_task(self._redeliver(host, weights))
            self._bringing[name].add_done_callback(lambda _: self._bringing.pop(name))
        return await asyncio.shield(self._bringing[name])

    async def _redeliver(self, host: RemoteHost, weights: Weights) -> bool:
        if host.port is None:
            return False
        _log.info("version %d is sent to host %s, which has joined since its publish", weights.version, host.name)
        target, lease = Target(host.name, host.address, host.port), self.find_trainer_lease()
        return await asyncio.to_thread(redeliver, weights, target, self._secret.encode(), lease)


class Membership:
    """The hosts that a run has now."""

    def __init__(self, hosts: Hosts, factory: HostsFactory, engines: Supervisor) -> None:
        self._hosts = hosts
        self._factory = factory
        self._engines = engines
        self._following: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, named: HostList) -> None:
        """Have exactly these hosts from now on; call it again for what could not be done at once.

        Raise a UsageError for a change that needs another run.
        """
        if _list_together(named.hosts) != _list_together([host.place for host in self._hosts.all]):
            raise UsageError("hosts that run engines together cannot change during a run: start it again")
        for host in list(self._hosts.all):
            if host.place not in named.hosts and not host.is_leaving:
                self._begin_to_leave(host)
            if host.is_leaving and not host.is_listed and not self._factory.list_engines(host):
                self._forget(host)
        present = {host.name for host in self._hosts.all}
        for place in named.hosts:
            if place.address not in present:
                self._factory.add_hosts(self._hosts.add(place, named))
                names = self._engines.add(place.engines)
                _log.info("host %s joins with %s", place.address, ", ".join(names))

    def follow_source(self, read: Callable[[], HostList], seconds: float = _LOOK_SECONDS) -> None:
        """Follow the hosts that are read again and again, until `close`."""
        self._following = asyncio.create_task(self._follow_source(read, seconds))

    async def close(self) -> None:
        """End what runs in the background; the hosts stay as they are."""
        await cancel(self._following)
        await asyncio.gather(*self._ending)

    def _begin_to_leave(self, host: RemoteHost) -> None:
        host.is_leaving = True
        self._factory.withdraw_host(host)
        names = self._factory.list_engines(host)
        for name in names:
            self._engines.remove(name)
        _log.info("host %s leaves with the next publish, with %s", host.name, ", ".join(names) or "no engine")

    def _forget(self, host: RemoteHost) -> None:
        ending = asyncio.create_task(self._hosts.drop(host))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        _log.info("host %s has left", host.name)

    async def _follow_source(self, read: Callable[[], HostList], seconds: float) -> None:
        said = ""
        while True:
            await asyncio.sleep(seconds)
            try:
                self.follow(await asyncio.to_thread(read))
            # Nothing in the file, nor on its disk, may end this task: the run would follow no later change.
            except Exception as error:
                reason = str(error) if isinstance(error, UsageError) else repr(error)
                if reason != said:
                    _log.warning("the hosts stay as they are until this is corrected: %s", reason)
                said = reason
                continue
            said = ""


class OtherHosts:
    """The hosts of a run for the sidecar's main: the engines on them, and the source that it follows."""

    def __init__(self, hosts: Hosts, read: Callable[[], HostList]) -> None:
        self.hosts = hosts
        self._read = read
        self._factory: HostsFactory | None = None

    def build_factory(self, local: VllmFactory, num_local: int, config: ServerConfig) -> HostsFactory:
        """Build the factory of all engines, `num_local` of which are made by the one of the sidecar's host."""
        self._factory = HostsFactory(local, num_local, self.hosts.all, config)
        return self._factory

    def follow(self, engines: Supervisor) -> Membership:
        """Follow the source until the membership is closed."""
        assert self._factory is not None
        membership = Membership(self.hosts, self._factory, engines)
        membership.follow_source(self._read)
        return membership


async def open_hosts(rollout: RolloutConfig, run: str, stack: contextlib.AsyncExitStack) -> OtherHosts:
    """Open the hosts of `--rollout-hosts`, whose agents must answer in the time for a start, until the stack ends."""
    assert rollout.hosts is not None
    source = build_source(rollout.hosts, rollout.tensor_parallel_size)
    read = await stack.enter_async_context(source.opened(rollout.start_minutes * 60))
    named = read()
    if named.tls_ca is None and not all(is_loopback(host.address.rpartition(":")[0]) for host in named.hosts):
        _log.warning(
            "nothing is encrypted on the way to the hosts of %s, their token included: use a network that only your "
            "hosts share, or give the agents certificates (tls_ca)",
            FLAG,
        )
    hosts = Hosts(named, run)
    hosts.open()
    # The engines are closed before their hosts are left.
    stack.push_async_callback(hosts.close)
    return OtherHosts(hosts, read)


def _list_together(places: Sequence[HostPlace]) -> list[HostPlace]:
    return [place for place in places if place.together]
