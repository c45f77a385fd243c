"""A step of a publish may take as long as its last ones say, and the trainer's part of it does not count."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from megatron_rl.sidecar.pace import FACTOR, Pace
from megatron_rl.sidecar.publication import StepDeadlines
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from megatron_rl.weights import arrival
from tests.sidecar.fake_engines import STEPS, FakeFactory, weights
from tests.sidecar.supervised import CONFIG, supervised, until

LEAST = 0.3
HOURS = StepDeadlines(*[3600.0] * 6)


@contextlib.asynccontextmanager
async def patient(factory: FakeFactory) -> AsyncIterator[Supervisor]:
    """Two engines with hours for each step, until the step has been measured."""
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
            assert (
                f"engine-1: {step} did not finish within 0.3 s\nlast words of engine-1"
                in (supervisor.status()["engines"]["engine-1"]["error"])
            )

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
            with arrival.writing(tmp_path, 1, 1):
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
