"""The hosts of a run when the list of them changes; agents that do not exist, and no engines."""

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_rl.errors import UsageError
from megatron_rl.shared.protocol.wire import FileSource, Weights
from megatron_rl.shared.weights.delivery.messages import Target
from megatron_rl.sidecar.hosts import HostList, HostPlace, membership
from megatron_rl.sidecar.hosts.factory import HostsFactory
from megatron_rl.sidecar.hosts.membership import Hosts, Membership
from megatron_rl.sidecar.vllm.server import ServerConfig
from tests.unit.test_remote_host import QUICK, TOKEN, until

A, B, C = (HostPlace(f"127.0.0.1:{port}", engines=2) for port in (1, 2, 3))
WEIGHTS = Weights(run="run", version=4, fingerprint="f", source=FileSource(folder="/trainer"), dtype="float32")


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
    """Yield hosts, their engines, and what has hosts join and leave."""
    hosts = Hosts(HostList(places, TOKEN), "run", QUICK)
    own = SimpleNamespace(release=lambda name: None)
    factory = HostsFactory(own, 0, hosts.all, ServerConfig(model="model", max_model_len=8))
    engines = Engines(factory)
    engines.add(hosts.num_engines)
    hosts.open()
    membership = Membership(hosts, factory, engines)
    try:
        yield hosts, engines, membership
    finally:
        await membership.close()
        await hosts.close()


def naming(membership: Membership) -> Callable[..., None]:
    """Return a function that has exactly the hosts that it is given."""
    return lambda *named: membership.follow(HostList(named, TOKEN))


def names(hosts: Hosts) -> list[str]:
    return [host.name for host in hosts.all]


def test_a_host_that_leaves_keeps_its_engines_until_the_next_publish_and_takes_no_others():
    async def check() -> None:
        async with followed(A, B) as (hosts, engines, membership):
            follow = naming(membership)
            follow(B, C)
            assert names(hosts) == [A.address, B.address, C.address]
            assert (engines.names, engines.leaving) == ([f"engine-{n}" for n in range(6)], ["engine-0", "engine-1"])
            follow(B, C)
            assert engines.leaving == ["engine-0", "engine-1"]
            engines.publish()
            # None of its places is free for an engine of another host.
            assert engines.factory._take_place("engine-9") is None
            epoch, (left, *_) = hosts.list_for_delivery([]).epoch, hosts.all
            follow(B, C)
            assert names(hosts) == [B.address, C.address]
            # Ranks learn from this that the hosts are others.
            assert hosts.list_for_delivery([]).epoch == epoch + 1
            # With many hosts each has fewer beats, but still several in the length of a lease.
            assert hosts._limits.num_hosts == 2
            hosts._limits.num_hosts = 128
            assert [hosts._limits.find_pause(0.5), hosts._limits.find_pause(9.0)] == [2.56, 9.0]
            assert engines.names == [f"engine-{n}" for n in range(2, 6)]
            assert [engines.factory.list_engines(host) for host in hosts.all] == [
                ["engine-2", "engine-3"], ["engine-4", "engine-5"],
            ]  # fmt: skip
            await membership.close()
            assert left._http.is_closed

    asyncio.run(check())


@pytest.mark.parametrize("again", [A, HostPlace(A.address, engines=1)])
def test_a_host_that_changes_or_comes_again_joins_once_it_has_left(again):
    async def check() -> None:
        async with followed(A, B) as (hosts, engines, membership):
            follow = naming(membership)
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
        async with followed(A, B) as (hosts, engines, membership):
            follow = naming(membership)
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


def test_a_place_that_is_free_on_a_host_that_leaves_is_given_to_no_engine():
    async def check() -> None:
        async with followed(A, B) as (_, engines, membership):
            engines.names.remove("engine-1")
            engines.factory.release("engine-1")
            naming(membership)(B)
            assert engines.factory._take_place("engine-9") is None

    asyncio.run(check())


def test_hosts_that_run_engines_together_stay_and_a_mistake_is_said_once(caplog):
    together = tuple(HostPlace(f"127.0.0.1:{port}", together="first") for port in (1, 2))
    read = []

    def read_hosts() -> HostList:
        read.append(1)
        if len(read) > 7:
            raise OSError(5, "Input/output error")
        if len(read) > 4:
            raise UsageError("the file cannot be read")
        return HostList((*together[: len(read) % 2 + 1], C), TOKEN)

    async def check() -> None:
        async with followed(*together) as (hosts, _, membership):
            for named in (together[:1], (*together, HostPlace(A.address, together="second"))):
                with pytest.raises(UsageError, match="cannot change during a run: start it again"):
                    membership.follow(HostList(named, TOKEN))
            assert names(hosts) == [place.address for place in together]
            membership.follow_source(read_hosts, seconds=0.001)
            await until(lambda: len(read) > 12)
            assert names(hosts) == [*(place.address for place in together), C.address]

    with caplog.at_level("WARNING"):
        asyncio.run(check())
    assert caplog.text.count("the file cannot be read") == 1
    assert caplog.text.count("Input/output error") == 1
    assert "cannot change during a run" in caplog.text


def test_a_version_is_brought_to_a_host_that_takes_weights_once_for_its_engines_and_in_the_name_of_the_trainer(
    monkeypatch,
):
    brought, answers = [], iter((True, False))
    monkeypatch.setattr(membership, "redeliver", lambda *arguments: brought.append(arguments) or next(answers))

    async def check() -> None:
        async with followed(A) as (hosts, _, _):
            (host,) = hosts.all
            hosts.find_trainer_lease = lambda: 7
            assert not await host.bring(host, WEIGHTS)
            host.port = 100
            key = hosts.list_for_delivery([]).token.encode()
            for number, is_brought in enumerate((True, False), 1):
                asking = (host.bring(host, WEIGHTS) for _ in range(3))
                assert await asyncio.gather(*asking) == [is_brought] * 3
                assert brought == [(WEIGHTS, Target(A.address, "127.0.0.1", 100), key, 7)] * number

    asyncio.run(check())
