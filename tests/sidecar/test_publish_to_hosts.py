"""A publish to engines on several hosts, some of which are lost or were not given the version; no processes."""

import asyncio
from typing import Any

import pytest

from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.sidecar.engines import EngineLost, EngineState, NotGiven
from megatron_rl.sidecar.engines.hosts import OwnHost
from megatron_rl.sidecar.supervisor import PublishFailed
from tests.sidecar.fake_engines import FakeEngine, FakeFactory, request, weights
from tests.sidecar.supervised import supervised, until


class Host(OwnHost):
    """A host that is lost, and given versions, as a test says."""

    def __init__(self) -> None:
        self.back = asyncio.Event()
        self.back.set()
        self.given: set[int] = {1, 2, 3}
        self.num_asked = 0

    async def answers(self) -> bool:
        self.num_asked += 1
        return self.back.is_set()

    async def until_back(self) -> None:
        await self.back.wait()

    async def is_given(self, weights: Weights) -> bool:
        return weights.version in self.given

    async def has_copy(self, weights: Weights) -> bool:
        return weights.version in self.given


class Factory(FakeFactory):
    """Fake engines; the first is on another host."""

    def __init__(self) -> None:
        super().__init__()
        self.host = Host()
        self.num_torn: dict[int, int] = {}
        """The number of loads of a version in which the host finds that no more of it will come, by version."""

    def create(self, name: str) -> FakeEngine:
        engine = super().create(name)
        if name == "engine-0":
            engine.host = self.host
            load = engine.load

            async def torn(weights: Weights) -> Any:
                if self.num_torn.get(weights.version):
                    self.num_torn[weights.version] -= 1
                    if not self.num_torn[weights.version]:
                        self.host.given.discard(weights.version)
                    raise NotGiven("the host was not given all")
                return await load(weights)

            engine.load = torn  # type: ignore[method-assign]
        return engine


@pytest.fixture
def factory() -> Factory:
    return Factory()


async def test_a_publish_continues_without_a_lost_host_whose_engine_joins_when_it_is_back(factory):
    async with supervised(factory) as supervisor:
        factory.host.back.clear()
        factory.fail("engine-0", "pause", "lost")
        published = await supervisor.publish(weights(1))
        assert [proof.engine for proof in published.proofs] == ["engine-1"]
        first = factory.engine("engine-0")
        assert first.state is EngineState.DEAD
        await supervisor.generate(request(0))
        # Longer than all pauses until an engine is given up.
        await asyncio.sleep(0.3)
        assert len(factory.made["engine-0"]) == 1
        factory.host.back.set()
        await until(lambda: factory.engine("engine-0").state is EngineState.READY)
        assert supervisor._members["engine-0"].num_failures == 0


async def test_an_engine_whose_host_was_not_given_a_version_takes_no_groups_until_the_next_one(factory):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1))
        engine = factory.engine("engine-0")
        assert engine.state is EngineState.READY
        factory.host.given = {3}
        published = await supervisor.publish(weights(2))
        assert [proof.engine for proof in published.proofs] == ["engine-1"]
        assert engine.state is EngineState.DIRTY
        await supervisor.publish(weights(3))
        assert engine.state is EngineState.READY
        assert factory.engine("engine-0") is engine


@pytest.mark.parametrize("num_torn", [1, 2])
async def test_a_host_that_was_given_a_part_is_left_out_and_its_engine_is_not_restarted(factory, num_torn):
    async with supervised(factory) as supervisor:
        engine = factory.engine("engine-0")
        factory.num_torn = {2: num_torn}
        await supervisor.publish(weights(1))
        published = await supervisor.publish(weights(2))
        assert [proof.engine for proof in published.proofs] == ["engine-1"]
        assert engine.state is not EngineState.READY
        await supervisor.publish(weights(3))
        assert factory.engine("engine-0") is engine
        assert engine.state is EngineState.READY


async def test_a_version_that_reached_no_host_with_engines_is_an_error(factory):
    async with supervised(factory, 1) as supervisor:
        factory.host.given = set()
        with pytest.raises(PublishFailed, match="version 1 reached no host"):
            await supervisor.publish(weights(1))


async def test_groups_wait_for_the_last_engine_while_its_host_returns_and_fail_by_name_after_the_limit(factory):
    async with supervised(factory, 1, lost_seconds=0.5) as supervisor:
        await supervisor.publish(weights(1))
        for is_in_time in (True, False):
            factory.host.back.clear()
            factory.engine("engine-0").state = EngineState.READY
            factory.fail("engine-0", "generate", "lost")
            sampling = asyncio.create_task(supervisor.generate(request(0)))
            await until(lambda: supervisor.pool.num_waiting)
            if is_in_time:
                # The time until it is back counts from each loss.
                await asyncio.sleep(0.3)
                factory.host.back.set()
                await sampling
                continue
            with pytest.raises(EngineLost, match=r"no engine has taken groups for .* s: .*--rollout-lost-minutes"):
                await sampling


async def test_an_engine_whose_next_version_has_begun_to_arrive_waits_for_it_and_is_not_restarted(factory):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1))
        factory.num_torn = {1: 1}
        factory.killed["engine-0"] = True
        await until(lambda: factory.engine("engine-0").state is EngineState.DEAD)
        factory.killed["engine-0"] = False
        await until(lambda: factory.engine("engine-0").state is EngineState.DIRTY)
        num_made = len(factory.made["engine-0"])
        await supervisor.publish(weights(2))
        assert factory.engine("engine-0").state is EngineState.READY
        assert len(factory.made["engine-0"]) == num_made


async def test_a_publish_does_not_wait_for_a_copy_of_the_version_before_that_does_not_arrive(factory):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1))
        asked, arrives = asyncio.Event(), asyncio.Event()

        async def has_copy(told: Weights) -> bool:
            asked.set()
            await arrives.wait()
            return True

        factory.host.has_copy = has_copy  # type: ignore[method-assign]
        factory.killed["engine-0"] = True
        await asyncio.wait_for(asked.wait(), 60)
        published = await asyncio.wait_for(supervisor.publish(weights(2)), 60)
        assert [proof.engine for proof in published.proofs] == ["engine-0", "engine-1"]
        arrives.set()
        await until(lambda: supervisor._members["engine-0"].task.done())
        engine = factory.engine("engine-0")
        assert (engine.state, engine.steps.count("load")) == (EngineState.READY, 1)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_without_a_copy_a_host_that_returns_waits_for_the_next_version_and_the_last_one_ends_the_iteration(
    factory, num_engines
):
    async with supervised(factory, num_engines) as supervisor:
        await supervisor.publish(weights(1))
        # As with ranks on several hosts: none of them has all of the files.
        factory.host.given = {2}
        factory.host.back.clear()
        factory.fail("engine-0", "generate", "lost")
        sampling = asyncio.create_task(supervisor.generate(request(0)))
        await until(lambda: factory.engine("engine-0").state is EngineState.DEAD)
        factory.host.back.set()
        if num_engines == 1:
            said = "no engine is left for this version: engine engine-0 waits for the next publish"
            with pytest.raises(EngineLost, match=f"{said}.*Resume from the last checkpoint"):
                await sampling
        else:
            await sampling
            await until(lambda: "waits for the next publish" in supervisor.status()["engines"]["engine-0"]["error"])
        await supervisor.publish(weights(2))
        assert factory.engine("engine-0").state is EngineState.READY
        await supervisor.generate(request(1))
