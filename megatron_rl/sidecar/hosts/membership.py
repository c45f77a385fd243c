"""Hosts that join and leave during a run.

Invariants:

- a host that joins gets engines at once. They take groups as soon as they hold the current version;
- a host that leaves is given no further version. Its engines finish their groups and end with the next publish; then
  its lease ends;
- a host whose description has changed leaves, and joins again afterwards;
- hosts that run engines together stay as they are.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron_rl.errors import UsageError
from megatron_rl.sidecar.hosts.factory import Hosts, HostsFactory
from megatron_rl.sidecar.hosts.remote import RemoteHost
from megatron_rl.sidecar.hosts.static import HostPlace, StaticHosts

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0


class ChangingEngines(Protocol):
    """All engines of the service."""

    def add(self, count: int = 1) -> list[str]: ...

    def remove(self, name: str) -> None: ...


class Membership:
    """The hosts that a run has now."""

    def __init__(self, hosts: Hosts, factory: HostsFactory, engines: ChangingEngines) -> None:
        self._hosts = hosts
        self._factory = factory
        self._engines = engines
        self._following: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def follow(self, named: StaticHosts) -> None:
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
                self._factory.add_host(self._hosts.add(place, named))
                names = self._engines.add(place.engines)
                _log.info("host %s joins with %s", place.address, ", ".join(names))

    def follow_source(self, read: Callable[[], StaticHosts], seconds: float = _LOOK_SECONDS) -> None:
        """Follow the hosts that are read again and again, until `close`."""
        self._following = asyncio.create_task(self._follow_source(read, seconds))

    async def close(self) -> None:
        """End what runs in the background; the hosts stay as they are."""
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following
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

    async def _follow_source(self, read: Callable[[], StaticHosts], seconds: float) -> None:
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


def _list_together(places: Sequence[HostPlace]) -> list[HostPlace]:
    return [place for place in places if place.together]
