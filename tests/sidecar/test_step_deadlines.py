"""Deadlines follow from measured times; of a step of a publish the trainer's part does not count."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.shared.weights import folders
from megatron_rl.sidecar.attempts import FACTOR, NUM_KEPT, Pace
from megatron_rl.sidecar.publication import StepDeadlines
from megatron_rl.sidecar.streams import StreamPlace
from megatron_rl.sidecar.supervisor import Supervisor
from tests.sidecar.fake_engines import STEPS, FakeFactory, streamed, weights
from tests.sidecar.standin_engines import standing_in
from tests.sidecar.supervised import num_made, supervised, until

LEAST = 0.3
HOURS = StepDeadlines(*[3600.0] * 5)


@contextlib.asynccontextmanager
async def patient(factory: FakeFactory) -> AsyncIterator[Supervisor]:
    """Start two engines with hours for each step, until the step has been measured."""
    async with supervised(factory, deadlines=HOURS) as supervisor:
        supervisor._steps._pace = Pace(LEAST)
        yield supervisor


@pytest.mark.parametrize("step", STEPS)
async def test_an_engine_that_hangs_in_a_measured_step_is_restarted_long_before_the_configured_deadline(factory, step):
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


GROUP = "the group at 127.0.0.1:29400"
STREAMED = streamed(1, 1, "127.0.0.1:29400")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("join", f"its workers waited in {GROUP} for the trainer and for the workers of other engines\n"),
        ("receive", f"it was receiving from {GROUP}: this engine, another one or the trainer may be the slow one\n"),
    ],
)
async def test_a_streamed_load_that_is_cut_off_names_the_process_it_waited_for(step, said, tmp_path):
    async with standing_in(tmp_path, {step: 600.0}) as world:
        await world.supervisor.start(1)
        (engine,) = world.engines
        engine.stream_place = StreamPlace(1, 2)
        loading = asyncio.create_task(engine.load(STREAMED))
        await until(lambda: said in engine.last_words())
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        assert engine.last_words().startswith(said)


async def test_an_engine_that_has_received_everything_or_refused_it_waits_for_no_process(tmp_path):
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


async def test_while_the_trainer_still_writes_a_load_is_not_late(factory, tmp_path):
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
        assert num_made(factory) == [1, 1]
        # And the wait is not measured either.
        assert supervisor._steps._pace.deadline("load", 3600.0) < FACTOR * 4 * LEAST


SECONDS = st.floats(0.001, 1e4)


@given(SECONDS)
def test_a_step_that_was_never_measured_has_all_the_time_of_its_configuration(most):
    assert Pace().deadline("load", most) == most


@given(st.lists(SECONDS, min_size=1, max_size=3 * NUM_KEPT), SECONDS, SECONDS)
def test_a_measured_step_has_ten_times_the_longest_of_the_last_within_its_bounds(measured, most, least):
    pace = Pace(least)
    for one in measured:
        pace.note("load", one)
    assert pace.deadline("load", most) == min(most, max(least, FACTOR * max(measured[-NUM_KEPT:])))
    assert pace.deadline("probe", most) == most


def test_a_duration_that_was_cut_off_gives_the_next_one_more_time():
    pace = Pace(least_seconds=30)
    pace.note("load", 1)
    assert pace.deadline("load", 600) == 30
    pace.note("load", 30)
    assert pace.deadline("load", 600) == 300


def test_a_duration_that_is_not_remembered_yet_counts_too():
    pace = Pace(least_seconds=1)
    pace.note("silence", 2)
    assert pace.deadline("silence", 120, longest=3) == 30
    assert pace.deadline("silence", 120, longest=0) == 20
