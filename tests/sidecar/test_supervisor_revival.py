"""Engines that die are started again, come back at the current version, or are given up; all without processes."""

import asyncio
import random
import time

import pytest

from megatron_rl.errors import InputError
from megatron_rl.sidecar.engines import EngineLost, EngineState
from megatron_rl.sidecar.members import UP
from megatron_rl.sidecar.publication import StepDeadlines
from megatron_rl.sidecar.supervisor import PublishFailed, Supervisor
from tests.sidecar.fake_engines import STEPS, FakeEngine, request, weights
from tests.sidecar.supervised import CONFIG, states, supervised, until


async def test_a_dead_engine_is_restarted_and_brought_to_the_current_version_from_the_copy(factory, tmp_path):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1, location=str(tmp_path)))
        factory.killed["engine-1"] = 1
        await until(lambda: len(factory.made["engine-1"]) == 2)
        await until(lambda: factory.engine("engine-1").state is EngineState.READY)
        assert factory.engine("engine-1").steps == list(STEPS)
        assert (await factory.engine("engine-1").generate(request(5)))[0].fingerprint == "weights-1"
        assert "last words of engine-1" in supervisor.status()["engines"]["engine-1"]["error"]


async def test_without_a_copy_a_dead_engine_waits_for_the_next_publish(factory):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1, location="/nowhere"))
        factory.killed["engine-1"] = 1
        await until(lambda: len(factory.made["engine-1"]) == 2)
        await until(lambda: factory.engine("engine-1").state is EngineState.WAITING)
        await supervisor.publish(weights(2))
        assert states(factory) == {EngineState.READY}


async def test_an_engine_that_comes_back_after_a_failed_publish_does_not_take_up_what_was_before(factory, tmp_path):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1, location=str(tmp_path)))
        factory.fail("engine-1", "load", *["refused"] * 3)
        with pytest.raises(PublishFailed):
            await supervisor.publish(weights(2, location=str(tmp_path)))
        await until(lambda: factory.engine("engine-1").state is EngineState.WAITING)
        await asyncio.sleep(0.1)
        assert EngineState.READY not in states(factory)


async def test_an_engine_that_keeps_dying_is_given_up_and_whoever_waits_is_told(factory, tmp_path):
    async with supervised(factory, 1) as supervisor:
        await supervisor.publish(weights(1, location=str(tmp_path)))
        factory.fail("engine-0", "start", *["lost"] * 10)
        factory.killed["engine-0"] = 1
        with pytest.raises(EngineLost, match="no engine is left for this version: .*engine-0 is lost at start"):
            await asyncio.wait_for(supervisor.generate(request(0)), 60)
        assert supervisor.status()["engines"]["engine-0"]["state"] == "given up"
        assert len(factory.made["engine-0"]) == 1 + CONFIG.max_failures
        with pytest.raises(PublishFailed, match="no engine is left"):
            await supervisor.publish(weights(2))


async def test_an_engine_that_is_lost_in_a_publish_while_it_waits_to_catch_up_is_started_again(factory):
    async with supervised(factory, 1) as supervisor:
        await supervisor.publish(weights(1))
        factory.killed["engine-0"] = 1
        await until(lambda: factory.engine("engine-0").state is EngineState.DEAD)
        # The new engine's task waits for this publish, which is the one that loses it.
        factory.fail("engine-0", "load", *["refused"] * 3)
        with pytest.raises(PublishFailed, match="engine-0 refuses load"):
            await supervisor.publish(weights(2))
        await asyncio.wait_for(supervisor.publish(weights(2)), 60)
        assert states(factory) == {EngineState.READY}


async def test_every_engine_that_cannot_be_restarted_in_a_publish_is_started_again(factory):
    async with supervised(factory, 3) as supervisor:
        for name in ("engine-0", "engine-1"):
            factory.fail(name, "load", "lost")
            factory.fail(name, "start", "lost")
        with pytest.raises(PublishFailed, match="engine-0 failed .* could not be restarted"):
            await supervisor.publish(weights(1))
        await until(lambda: not states(factory) - {EngineState.WAITING, EngineState.DIRTY})
        assert len((await supervisor.publish(weights(1))).proofs) == 3


async def test_an_engine_lost_by_a_group_and_a_publish_at_once_is_restarted_once(factory):
    async with supervised(factory, 1, first_pause=0.4, longest_pause=0.4) as supervisor:
        await supervisor.publish(weights(1))
        engine = factory.engine("engine-0")
        engine.blocked = asyncio.Event()
        group = asyncio.create_task(supervisor.generate(request(0)))
        await until(lambda: supervisor.status()["engines"]["engine-0"]["in_flight"])
        factory.fail("engine-0", "pause", "hang")
        publish = asyncio.create_task(supervisor.publish(weights(2)))
        await until(lambda: engine.steps[-1] == "pause")
        factory.killed["engine-0"] = 1
        engine.blocked.set()
        await until(lambda: engine.state is EngineState.DEAD)
        await asyncio.gather(publish, group)
        await until(lambda: states(factory) == {EngineState.READY})
        assert len(factory.made["engine-0"]) == 2


async def test_an_engine_is_started_again_when_the_publish_that_restarts_it_is_cancelled(factory):
    async with supervised(factory, 1) as supervisor:
        factory.fail("engine-0", "load", "lost")
        factory.fail("engine-0", "start", "hang")
        task = asyncio.create_task(supervisor.publish(weights(1)))
        await until(lambda: len(factory.made["engine-0"]) == 2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(supervisor.publish(weights(1)), 60)


async def test_an_engine_whose_process_cannot_be_made_is_tried_again(factory, tmp_path):
    async with supervised(factory, 1) as supervisor:
        await supervisor.publish(weights(1, location=str(tmp_path)))
        factory.fail("engine-0", "create", "lost")
        factory.killed["engine-0"] = 1
        await until(lambda: supervisor.status()["engines"]["engine-0"]["restarts"] == 2)
        await until(lambda: states(factory) == {EngineState.READY})


@pytest.mark.parametrize("seed", range(12))
async def test_after_any_fault_an_engine_that_is_down_is_being_restarted_or_given_up(factory, tmp_path, seed):
    """Mix faults, deaths, groups, cancelled publishes, new engines; a publish brings back all with tries left."""
    chance = random.Random(seed)
    quick = {"watch_seconds": 0.01, "first_pause": 0.005, "longest_pause": 0.02, "max_failures": 6}

    def shake(names: list[str]) -> None:
        for _ in range(chance.randrange(4)):
            fault = chance.choice(["refused", "lost", "lost", "hang"])
            step = chance.choice([*STEPS, "generate", "start", "create"])
            if fault != "hang" or step in STEPS:
                factory.fail(chance.choice(names), step, *[fault] * chance.randrange(1, 4))
        factory.killed[chance.choice(names)] += chance.random() < 0.5

    def stranded(supervisor: Supervisor) -> list[str]:
        members = [] if supervisor._lock.locked() else supervisor._members.values()
        return [
            member.name
            for member in members
            if member.engine.state not in UP and not member.is_given_up and (not member.task or member.task.done())
        ]

    async with supervised(factory, 3, deadlines=StepDeadlines(*[0.05] * 5), **quick) as supervisor:
        for version in range(1, 13):
            shake(list(supervisor._members))
            groups = [asyncio.create_task(supervisor.generate(request(number))) for number in range(3)]
            await asyncio.sleep(chance.random() * 0.02)
            location = chance.choice([str(tmp_path), "/nowhere"])
            task = asyncio.create_task(supervisor.publish(weights(version, location=location)))
            if chance.random() < 0.3:
                await asyncio.sleep(chance.random() * 0.05)
                task.cancel()
            if version == 6:
                supervisor.add()
            await asyncio.wait_for(asyncio.gather(task, return_exceptions=True), 60)
            assert not stranded(supervisor)
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            await asyncio.sleep(chance.random() * 0.02)
            assert not stranded(supervisor)
        for faults in factory.faults.values():
            faults.clear()
        factory.killed.clear()
        members = supervisor._members.values()
        try:
            await asyncio.wait_for(supervisor.publish(weights(99, location=str(tmp_path))), 60)
        except PublishFailed:
            assert all(member.is_given_up for member in members)
        # One that was in its last try while the faults ended may be given up.
        await until(lambda: all(member.is_given_up or member.engine.state is EngineState.READY for member in members))


async def test_many_engines_are_looked_at_in_turn_at_most_fifty_a_second(factory, monkeypatch):
    num_engines, looks = 40, []

    async def look(engine: FakeEngine) -> None:
        looks.append((engine.name, time.monotonic()))

    monkeypatch.setattr(FakeEngine, "find_fault", look)
    async with supervised(factory, num_engines, watch_seconds=0.0):
        await until(lambda: len(looks) >= num_engines)
    names, times = zip(*looks[:num_engines], strict=True)
    assert len(set(names)) == num_engines
    assert times[-1] - times[0] >= (num_engines - 1) * 0.02


def on_devices(factory):
    """List the engines that have memory of their devices."""
    engines = [engine for made in factory.made.values() for engine in made]
    return [engine.name for engine in engines if not engine.is_closed and not engine.is_asleep]


async def test_no_engine_is_on_a_device_between_its_start_and_the_first_publish_and_after_a_sleep(factory):
    async with supervised(factory, takes_turns=True) as supervisor:
        for version in range(3):
            assert not on_devices(factory)
            await supervisor.publish(weights(version))
            assert states(factory) == {EngineState.READY}
            assert len(on_devices(factory)) == 2
            await asyncio.gather(supervisor.sleep(), supervisor.sleep())
        assert all(engine.steps.count("sleep") == 4 for made in factory.made.values() for engine in made)


@pytest.mark.parametrize("fault", ["refused", "lost", "hang"])
async def test_an_engine_that_does_not_fall_asleep_is_ended_and_started_with_the_next_publish(factory, fault):
    async with supervised(factory, takes_turns=True) as supervisor:
        await supervisor.publish(weights(0))
        factory.fail("engine-1", "sleep", fault)
        await supervisor.sleep()
        await asyncio.sleep(0.2)
        assert not on_devices(factory)
        assert [len(made) for made in factory.made.values()] == [1, 1]
        await supervisor.publish(weights(1))
        await until(lambda: len(on_devices(factory)) == 2)


async def test_an_engine_that_dies_asleep_is_started_with_the_next_publish(factory, tmp_path):
    async with supervised(factory, takes_turns=True) as supervisor:
        await supervisor.publish(weights(0, location=str(tmp_path)))
        await supervisor.sleep()
        factory.killed["engine-1"] = 1
        await until(lambda: factory.engine("engine-1").state is EngineState.DEAD)
        await asyncio.sleep(0.2)
        assert [len(made) for made in factory.made.values()] == [1, 1]
        await supervisor.publish(weights(1, location=str(tmp_path)))
        await until(lambda: states(factory) == {EngineState.READY})


async def test_what_is_left_of_an_engine_that_is_lost_before_a_sleep_is_ended_with_it(factory, tmp_path):
    async with supervised(factory, takes_turns=True, first_pause=60, longest_pause=60) as supervisor:
        await supervisor.publish(weights(0, location=str(tmp_path)))
        # Its processes may live: it is lost if it makes no progress.
        factory.killed["engine-1"] = 1
        await until(lambda: factory.engine("engine-1").state is EngineState.DEAD)
        assert not factory.engine("engine-1").is_closed
        await supervisor.sleep()
        assert not on_devices(factory)


async def test_a_sleep_that_breaks_off_is_begun_again_by_the_next_request(factory):
    async with supervised(factory, takes_turns=True, deadlines=StepDeadlines()) as supervisor:
        await supervisor.publish(weights(0))
        factory.fail("engine-1", "sleep", "hang")
        sleeping = asyncio.create_task(supervisor.sleep())
        await until(lambda: factory.engine("engine-0").is_asleep)
        sleeping.cancel()
        await asyncio.sleep(0.05)
        assert on_devices(factory) == ["engine-1"]
        await supervisor.sleep()
        assert not on_devices(factory)


async def test_engines_that_keep_their_devices_do_not_sleep_and_no_engine_joins_those_that_do(factory):
    async with supervised(factory) as supervisor:
        with pytest.raises(InputError, match="these engines keep their devices"):
            await supervisor.sleep()
    async with supervised(factory, takes_turns=True) as supervisor:
        with pytest.raises(InputError, match="no more join"):
            supervisor.add()
        with pytest.raises(InputError, match="no more join"):
            await supervisor.adopt("socket")
        with pytest.raises(EngineLost, match="engines sleep until the next publish"):
            await asyncio.wait_for(supervisor.generate(request(0)), 60)


async def test_ranks_wait_for_an_engine_that_is_being_started_which_sleeps_then(factory, tmp_path):
    async with supervised(factory, takes_turns=True, deadlines=StepDeadlines()) as supervisor:
        await supervisor.publish(weights(0, location=str(tmp_path)))
        factory.fail("engine-1", "start", "hang")
        factory.killed["engine-1"] = 1
        await until(lambda: len(factory.made["engine-1"]) == 2)
        sleeping = asyncio.create_task(supervisor.sleep())
        await asyncio.sleep(0.2)
        assert not sleeping.done()
        factory.engine("engine-1").go_on.set()
        await sleeping
        assert not on_devices(factory)
        await supervisor.publish(weights(1, location=str(tmp_path)))
        assert states(factory) == {EngineState.READY}
