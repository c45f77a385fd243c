"""A step of a publish may take as long as the last ones allow, and the trainer's part of it does not count."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import msgspec
import pytest

from megatron_rl.errors import InputError
from megatron_rl.shared.weights import folders
from megatron_rl.sidecar.pace import FACTOR, Pace
from megatron_rl.sidecar.publication import StepDeadlines
from megatron_rl.sidecar.streams import StreamPlace
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from tests.sidecar.fake_engines import STEPS, FakeFactory, streamed, weights
from tests.sidecar.standin_engines import standing_in
from tests.sidecar.supervised import CONFIG, supervised, until

LEAST = 0.3
HOURS = StepDeadlines(*[3600.0] * 5)


@contextlib.asynccontextmanager
async def patient(factory: FakeFactory) -> AsyncIterator[Supervisor]:
    """Start two engines with hours for each step, until the step has been measured."""
    config = SupervisorConfig(**{**vars(CONFIG), "deadlines": HOURS})
    async with supervised(factory, 2, config) as supervisor:
        supervisor._steps._pace = Pace(LEAST)
        yield supervisor


@pytest.mark.parametrize("step", STEPS)
def test_an_engine_that_hangs_in_a_measured_step_is_restarted_long_before_the_configured_deadline(step):
    factory = FakeFactory()

    async def check() -> None:
        async with patient(factory) as supervisor:
            await supervisor.publish(weights(1))
            factory.fail("engine-1", step, "hang")
            published = await asyncio.wait_for(supervisor.publish(weights(2)), 60)
            assert [proof.report.version for proof in published.proofs] == [2, 2]
            error = supervisor.status()["engines"]["engine-1"]["error"]
            late = re.search(rf"engine-1: {step} did not finish within ([\d.]+) s\nlast words of engine-1", error)
            assert late is not None
            # On a busy machine the measured step took longer than the least.
            assert LEAST <= float(late[1]) < 60

    asyncio.run(check())


GROUP = "the group at 127.0.0.1:29400"
STREAMED = streamed(1, 1, "127.0.0.1:29400")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("join", f"its workers waited in {GROUP} for the trainer and for the workers of other engines\n"),
        ("receive", f"it was receiving from {GROUP}: this engine, another one or the trainer may be the slow one\n"),
    ],
)
def test_a_streamed_load_that_is_cut_off_names_the_process_it_waited_for(step, said, tmp_path):
    async def check() -> None:
        async with standing_in(tmp_path, {step: 600.0}) as world:
            await world.supervisor.start(1)
            (engine,) = world.engines
            engine.stream_place = StreamPlace(1, 2)
            loading = asyncio.create_task(engine.load(STREAMED))
            await until(lambda: said in engine.last_words())
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            assert engine.last_words().startswith(said)

    asyncio.run(check())


def test_an_engine_that_has_received_everything_or_refused_it_waits_for_no_process(tmp_path):
    async def check() -> None:
        async with standing_in(tmp_path, {}) as world:
            await world.supervisor.start(1)
            (engine,) = world.engines
            engine.stream_place = StreamPlace(1, 2)
            before = engine.last_words()
            await engine.load(STREAMED)
            assert engine.last_words() == before
            unnamed = msgspec.structs.replace(STREAMED.stream, manifest=[])
            with pytest.raises(InputError, match="must have a manifest"):
                await engine.load(msgspec.structs.replace(STREAMED, source=unnamed))
            assert engine.last_words() == before

    asyncio.run(check())


def test_while_the_trainer_still_writes_a_load_is_not_late(tmp_path):
    factory = FakeFactory()

    async def check() -> None:
        async with patient(factory) as supervisor:
            await supervisor.publish(weights(1))
            engine = factory.engine("engine-0")
            load, written = engine.load, asyncio.Event()

            async def load_what_is_written(told):
                await written.wait()
                return await load(told)

            engine.load = load_what_is_written
            with folders.writing(tmp_path, 1, 1):
                task = asyncio.create_task(supervisor.publish(weights(2, str(tmp_path))))
                await until(lambda: "engine-0" in supervisor._steps.current)
                await asyncio.sleep(5 * LEAST)
                assert not task.done()
            written.set()
            await asyncio.wait_for(task, 60)
            assert [len(made) for made in factory.made.values()] == [1, 1]
            # And the wait is not measured either.
            assert supervisor._steps._pace.deadline("load", 3600.0) < FACTOR * 4 * LEAST

    asyncio.run(check())
