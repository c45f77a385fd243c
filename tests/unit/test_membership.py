"""The hosts of a run when the list of them changes; agents that do not exist, and no engines."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from megatron_rl.sidecar.hosts.factory import Hosts, HostsFactory
from megatron_rl.sidecar.hosts.membership import Membership
from megatron_rl.sidecar.hosts.static import HostPlace, StaticHosts
from megatron_rl.sidecar.vllm.server import ServerConfig
from tests.unit.test_remote_host import QUICK, TOKEN, until

A, B, C = (HostPlace(f"127.0.0.1:{port}", engines=2) for port in (1, 2, 3))


class Engines:
    """Engines that have places on hosts, and leave when a test publishes."""

    def __init__(self, factory: HostsFactory) -> None:
        self.factory = factory
        self.names: list[str] = []
        self.leaving: list[str] = []
        self.num_made = 0

    def add(self, count: int = 1) -> list[str]:
        made = [f"engine-{self.num_made + number}" for number in range(count)]
        self.num_made += count
        self.names += made
        assert all(self.factory._take_place(name) is not None for name in made)
        return made

    def remove(self, name: str) -> None:
        self.leaving.append(name)

    def publish(self) -> None:
        for name in self.leaving:
            self.names.remove(name)
            self.factory.release(name)
        self.leaving = []


@contextlib.asynccontextmanager
async def followed(*places: HostPlace):
    """Yield hosts, their engines, and a function that has hosts join and leave."""
    hosts = Hosts(StaticHosts(places, TOKEN), "run", QUICK)
    own = SimpleNamespace(release=lambda name: None)
    factory = HostsFactory(own, 0, hosts.all, ServerConfig(model="model", max_model_len=8))
    engines = Engines(factory)
    engines.add(sum(place.engines for place in places))
    hosts.open()
    membership = Membership(hosts, factory, engines)
    try:
        yield hosts, engines, lambda *named: membership.follow(StaticHosts(named, TOKEN))
    finally:
        await membership.close()
        await hosts.close()


def names(hosts: Hosts) -> list[str]:
    return [host.name for host in hosts.all]


def test_a_host_that_leaves_keeps_its_engines_until_the_next_publish_and_takes_no_others():
    async def check() -> None:
        async with followed(A, B) as (hosts, engines, follow):
            follow(B, C)
            assert names(hosts) == [A.address, B.address, C.address]
            assert (engines.names, engines.leaving) == ([f"engine-{n}" for n in range(6)], ["engine-0", "engine-1"])
            follow(B, C)
            assert engines.leaving == ["engine-0", "engine-1"]
            engines.publish()
            # None of its places is free for an engine of another host.
            assert engines.factory._take_place("engine-9") is None
            follow(B, C)
            await until(lambda: names(hosts) == [B.address, C.address])
            assert engines.names == [f"engine-{n}" for n in range(2, 6)]
            assert [engines.factory.list_engines(host) for host in hosts.all] == [
                ["engine-2", "engine-3"], ["engine-4", "engine-5"],
            ]  # fmt: skip

    asyncio.run(check())


@pytest.mark.parametrize("again", [A, HostPlace(A.address, engines=1)])
def test_a_host_that_changes_or_comes_again_joins_once_it_has_left(again):
    async def check() -> None:
        async with followed(A, B) as (hosts, engines, follow):
            if again is A:
                follow(B)
            follow(again, B)
            assert engines.leaving == ["engine-0", "engine-1"]
            assert len(hosts.all) == 2
            engines.publish()
            follow(again, B)
            assert [host.place for host in hosts.all] == [B, again]
            assert len(engines.names) == 2 + again.engines

    asyncio.run(check())


def test_a_host_that_leaves_is_given_no_further_version():
    async def check() -> None:
        async with followed(A, B) as (hosts, engines, follow):
            for number, host in enumerate(hosts.all):
                host.port = 100 + number
            # The trainer may have begun to send a version there.
            hosts.list_for_delivery([])
            follow(B)
            engines.publish()
            follow(B)
            assert names(hosts) == [A.address, B.address]
            assert [host.port for host in hosts.list_for_delivery([]).hosts] == [101]
            follow(B)
            assert names(hosts) == [B.address]

    asyncio.run(check())
