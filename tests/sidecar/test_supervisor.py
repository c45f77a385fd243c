"""A publish reaches all engines or none; groups go to engines that can take them; all without processes."""

import asyncio
import math
from unittest.mock import AsyncMock

import msgspec
import pytest

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import Drafts
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.engines import EngineLost, EngineState
from megatron_rl.sidecar.engines.hosts import OwnHost
from megatron_rl.sidecar.publication import StepDeadlines
from megatron_rl.sidecar.supervisor import (
    PublishFailed,
    Supervisor,
    SupervisorConfig,
    WeightsNotProven,
    WrongWorkerCount,
)
from tests.sidecar.fake_engines import STEPS, FakeFactory, answer, request, streamed, weights
from tests.sidecar.supervised import CONFIG, given, states, supervised, until

# Log-probs travel as float32.
NONE = pytest.approx((0.0, 0.0), abs=1e-6)


def test_a_publish_takes_every_engine_through_every_step():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 3) as supervisor:
            published = await supervisor.publish(weights(1))
            assert list(published.seconds) == [
                "pause",
                "load",
                "commit",
                "probe",
                "trainer",
            ]
            proofs = published.proofs
            assert [(proof.engine, proof.report.version, proof.report.fingerprint) for proof in proofs] == [
                (f"engine-{number}", 1, "weights-1") for number in range(3)
            ]
            assert states(factory) == {EngineState.READY}
            for number in range(3):
                assert factory.engine(f"engine-{number}").steps == list(STEPS)
            (response, _) = await supervisor.generate(request(0))
            assert (response.spans[0].version, response.fingerprint) == ("1", "weights-1")
            assert supervisor.status()["version"] == 1

    asyncio.run(check())


def test_drafts_of_all_engines_are_added_up_but_for_engines_that_draft_nothing():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 3) as supervisor:
            assert await supervisor.count_drafts() is None
            for number in range(2):
                counts = Drafts(count=1 + number, drafted=4, accepted=number)
                factory.engine(f"engine-{number}").count_drafts = AsyncMock(return_value=counts)
            assert await supervisor.count_drafts() == Drafts(count=3, drafted=8, accepted=1)

    asyncio.run(check())


@pytest.mark.parametrize("num_compared", [0, 4])
def test_parameters_that_cannot_be_compared_fail_the_first_publish_unless_the_weaker_proof_is_accepted(num_compared):
    factory = FakeFactory()
    factory.compares = {"engine-0": (5, 5), "engine-1": (num_compared, 5)}

    async def check():
        async with supervised(factory) as supervisor:
            with pytest.raises(PublishFailed, match=f"{num_compared} of 5 parameters .* layers.0.weight") as raised:
                await supervisor.publish(weights(0))
            assert "--publish-proof probe" in str(raised.value)
            # Another attempt or another engine would compare no more.
            assert factory.engine("engine-1").steps.count("load") == 1
            assert [len(made) for made in factory.made.values()] == [1, 1]
            published = await supervisor.publish(msgspec.structs.replace(weights(0), proof="probe"))
            answer = published.build_answer()
            assert (answer.num_compared, answer.num_parameters) == (num_compared, 5)
            assert states(factory) == {EngineState.READY}

    asyncio.run(check())


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_is_refused_once_is_tried_again_as_a_whole(step):
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            factory.fail("engine-1", step, "refused")
            await supervisor.publish(weights(1))
            assert states(factory) == {EngineState.READY}
            assert [len(made) for made in factory.made.values()] == [1, 1]
            assert factory.engine("engine-0").steps.count("pause") == 2

    asyncio.run(check())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", [("refused", "refused"), ("lost",), ("hang",)])
def test_an_engine_that_is_lost_or_refuses_twice_is_restarted(step, fault):
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            factory.fail("engine-1", step, *fault)
            await supervisor.publish(weights(1))
            assert states(factory) == {EngineState.READY}
            assert [len(made) for made in factory.made.values()] == [1, 2]
            assert factory.made["engine-1"][0].is_closed
            assert supervisor.status()["engines"]["engine-1"]["restarts"] == 1

    asyncio.run(check())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["refused", "lost", "hang"])
def test_a_step_that_always_fails_is_named_and_the_engines_sample_nothing(step, fault):
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            factory.fail("engine-1", step, *[fault] * 3)
            with pytest.raises(PublishFailed, match=r"version 1 was not published: engine engine-1.*") as caught:
                await supervisor.publish(weights(1))
            assert step in str(caught.value)
            assert EngineState.READY not in states(factory)
            assert supervisor.status()["version"] is None
            with pytest.raises(EngineLost, match="no engine is left"):
                await asyncio.wait_for(supervisor.generate(request(0)), 60)
            # The next publish finds them, and all is well.
            await supervisor.publish(weights(2))
            await until(lambda: states(factory) == {EngineState.READY})

    asyncio.run(check())


def test_an_engine_that_cannot_be_restarted_fails_the_publish_by_name():
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            factory.fail("engine-0", "load", "lost")
            factory.fail("engine-0", "start", "lost")
            with pytest.raises(PublishFailed, match="engine-0 failed .*lost at load.* could not be restarted"):
                await supervisor.publish(weights(1))
            assert EngineState.READY not in states(factory)

    asyncio.run(check())


def test_an_engine_with_another_digest_is_found_and_nothing_is_committed():
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            factory.corrupt.add("engine-1")
            with pytest.raises(PublishFailed, match="engine-1: load reports version 1 with fingerprint 'another"):
                await supervisor.publish(weights(1))
            assert all("commit" not in engine.steps for made in factory.made.values() for engine in made)

    asyncio.run(check())


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize("is_found_by", ["digests", "the trainer"])
def test_an_engine_that_does_not_hold_what_it_claims_ends_the_publish_and_is_named(num_engines, is_found_by):
    factory = FakeFactory()
    first, second = weights(1), weights(2)
    answers = {1: answer(first), 2: answer(second)}

    async def check():
        async with supervised(factory, num_engines) as supervisor:
            published = await supervisor.publish(first, given(answers[1]))
            assert [proof.difference for proof in published.proofs] == [NONE] * num_engines
            factory.keeps["engine-0"] = "weights-1"
            if is_found_by == "digests":
                factory.found_out = {"engine-0"}
            with pytest.raises(WeightsNotProven, match="version 2 was not published: engine engine-0.*") as caught:
                await supervisor.publish(second, given(answers[2]))
            assert list(caught.value.wrong) == ["engine-0"]
            assert is_found_by == "digests" or "(--publish-probe-bound): it does not hold version 2" in str(
                caught.value
            )
            assert EngineState.READY not in states(factory)
            # It was found out once: no engine is tried or started again.
            assert all(len(made) == 1 for made in factory.made.values())
            assert all(engine.steps.count("load") <= 2 for made in factory.made.values() for engine in made)

    asyncio.run(check())


def test_the_bound_of_the_difference_from_the_trainer_is_the_given_one_or_follows_from_who_computes():
    factory = FakeFactory()
    held = weights(1)
    near, far = answer(held, "others", bound=1e9), answer(held, "others")

    async def check():
        async with supervised(factory, 1) as supervisor:
            (proof,) = (await supervisor.publish(held, given(near))).proofs
            assert 0 < proof.difference.mean <= proof.difference.largest
            with pytest.raises(WeightsNotProven, match="beyond 0.001"):
                await supervisor.publish(held, given(far))

    asyncio.run(check())


def test_a_trainer_that_sends_no_log_probs_fails_the_publish_and_restarts_no_engine():
    factory = FakeFactory()

    async def silent():
        await asyncio.Event().wait()

    async def check():
        async with supervised(factory, 2) as supervisor:
            with pytest.raises(PublishFailed, match="the trainer did not send its log-probs of version 1's"):
                await supervisor.publish(weights(1), silent)
            assert all(len(made) == 1 for made in factory.made.values())
            await supervisor.publish(weights(1))
            assert states(factory) == {EngineState.READY}

    asyncio.run(check())


def test_a_trainer_that_ends_while_it_writes_fails_the_publish_and_restarts_no_engine():
    factory = FakeFactory()
    factory.faults["engine-0", "load"].append("not written")
    factory.faults["engine-1", "load"].append("not written")

    async def check():
        async with supervised(factory, 2) as supervisor:
            with pytest.raises(PublishFailed, match="version 1 was not published: the trainer ended before it had"):
                await supervisor.publish(weights(1))
            assert all(len(made) == 1 for made in factory.made.values())
            assert all(engine.steps == ["pause", "load"] for made in factory.made.values() for engine in made)
            await supervisor.publish(weights(1))
            assert states(factory) == {EngineState.READY}

    asyncio.run(check())


def test_an_engine_that_comes_back_is_compared_with_the_trainer_too(tmp_path):
    factory = FakeFactory()
    held = weights(1, location=str(tmp_path))
    of_trainer = answer(held)
    told = []

    async def check():
        async with supervised(factory, 2) as supervisor:
            supervisor.on_joined = lambda weights, proofs: told.append((weights, proofs))
            await supervisor.publish(held, given(of_trainer))
            factory.killed["engine-1"] = 1
            async with asyncio.timeout(30):
                while not told:
                    await asyncio.sleep(0.01)
            ((joined, (proof,)),) = told
            assert (joined, proof.engine, proof.difference) == (held, "engine-1", NONE)
            told.clear()
            factory.keeps["engine-1"] = "others"
            factory.killed["engine-1"] = 1
            async with asyncio.timeout(30):
                while "it does not hold version 1" not in supervisor.status()["engines"]["engine-1"]["error"]:
                    await asyncio.sleep(0.01)
            assert not told

    asyncio.run(check())


def test_an_engine_with_weights_that_are_neither_the_old_nor_the_new_ones_is_found():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 3) as supervisor:
            await supervisor.publish(weights(1))
            factory.keeps["engine-1"] = "others"
            with pytest.raises(PublishFailed, match="engine-1: its log-probs of the probe are .* from those of all"):
                await supervisor.publish(weights(2))
            assert {name for name, made in factory.made.items() if len(made) > 1} == {"engine-1"}

    asyncio.run(check())


def test_engines_that_differ_are_accepted_if_the_trainer_wants_no_agreement():
    factory = FakeFactory()
    factory.keeps["engine-1"] = "others"
    unbounded = answer(weights(1), bound=math.inf, agreement=math.inf)

    async def check():
        async with supervised(factory, 3) as supervisor:
            await supervisor.publish(weights(1), given(unbounded))
            assert states(factory) == {EngineState.READY}

    asyncio.run(check())


def test_the_same_weights_may_be_published_as_the_next_version():
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            await supervisor.publish(weights(1, fingerprint="same"))
            await supervisor.publish(weights(2, fingerprint="same"))
            assert states(factory) == {EngineState.READY}

    asyncio.run(check())


def test_groups_of_an_engine_that_dies_go_to_the_others_with_the_same_seeds(tmp_path):
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            await supervisor.publish(weights(1, location=str(tmp_path)))
            expected = [await supervisor.generate(request(number)) for number in range(8)]
            for made in factory.made.values():
                made[-1].blocked = asyncio.Event()
            tasks = [asyncio.create_task(supervisor.generate(request(number))) for number in range(8)]
            await until(lambda: len(factory.served["engine-1"]) == 4)
            factory.killed["engine-1"] = 1
            for made in factory.made.values():
                made[-1].blocked.set()
            groups = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert [[r.tokens for r in group] for group in groups] == [[r.tokens for r in group] for group in expected]
            assert supervisor.status()["groups_retried"] == 4

    asyncio.run(check())


def test_no_engine_gets_more_than_its_bound_and_the_least_loaded_gets_the_next():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 2, SupervisorConfig(**{**vars(CONFIG), "max_responses": 6})) as supervisor:
            await supervisor.publish(weights(1))
            for made in factory.made.values():
                made[-1].blocked = asyncio.Event()
            tasks = [asyncio.create_task(supervisor.generate(request(number))) for number in range(10)]
            await until(lambda: supervisor.status()["groups_waiting"] == 4)
            status = supervisor.status()
            assert [engine["in_flight"] for engine in status["engines"].values()] == [6, 6]
            for task in tasks[:3]:
                task.cancel()
            for made in factory.made.values():
                made[-1].blocked.set()
            await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
            status = supervisor.status()
            assert [engine["in_flight"] for engine in status["engines"].values()] == [0, 0]
            assert status["groups_waiting"] == 0

    asyncio.run(check())


def test_a_group_larger_than_the_bound_gets_an_engine_of_its_own():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 1, SupervisorConfig(**{**vars(CONFIG), "max_responses": 2})) as supervisor:
            await supervisor.publish(weights(1))
            assert len(await asyncio.wait_for(supervisor.generate(request(0, group_size=9)), 60)) == 9

    asyncio.run(check())


def test_an_engine_whose_first_token_has_other_weights_takes_no_groups():
    factory = FakeFactory()

    async def check():
        async with supervised(factory) as supervisor:
            factory.says_of_tokens["engine-1"] = "7"
            with pytest.raises(PublishFailed, match="first token after version 1 was published has .*7"):
                await supervisor.publish(weights(1))
            assert EngineState.READY not in states(factory)

    asyncio.run(check())


def test_a_group_that_is_always_refused_fails_after_a_bounded_number_of_attempts():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 1) as supervisor:
            await supervisor.publish(weights(1))
            factory.fail("engine-0", "generate", *["refused"] * 100)
            with pytest.raises(EngineLost, match="refuses generate; request group-0 was tried 5 times"):
                await supervisor.generate(request(0))

    asyncio.run(check())


def test_engines_join_with_the_current_version_and_leave_with_the_next(tmp_path):
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 1) as supervisor:
            await supervisor.publish(weights(1, location=str(tmp_path)))
            assert supervisor.add(2) == ["engine-1", "engine-2"]
            assert await supervisor.adopt("/run/other.sock") == "engine-3"
            await until(lambda: states(factory) == {EngineState.READY} and len(factory.made) == 4)
            supervisor.remove("engine-0")
            assert factory.engine("engine-0").state is EngineState.READY
            proofs = (await supervisor.publish(weights(2))).proofs
            assert [proof.engine for proof in proofs] == ["engine-1", "engine-2", "engine-3"]
            assert factory.engine("engine-0").is_closed
            assert factory.released == ["engine-0"]
            with pytest.raises(InputError, match="unknown engine 'engine-0'"):
                supervisor.remove("engine-0")

    asyncio.run(check())


def test_the_first_engine_that_cannot_start_ends_the_others():
    factory = FakeFactory()
    factory.fail("engine-1", "start", "lost")

    async def check():
        supervisor = Supervisor(factory, CONFIG)
        with pytest.raises(EngineLost, match="engine-1 is lost at start"):
            await supervisor.start(3)

    asyncio.run(check())
    assert all(engine.is_closed for made in factory.made.values() for engine in made)


def test_the_status_shows_who_waits_for_what():
    factory = FakeFactory()

    async def check():
        config = SupervisorConfig(**{**vars(CONFIG), "deadlines": StepDeadlines()})
        async with supervised(factory, 2, config) as supervisor:
            factory.fail("engine-1", "load", "hang")
            task = asyncio.create_task(supervisor.publish(weights(1)))
            await until(lambda: factory.engine("engine-1").steps == ["pause", "load"])
            status = supervisor.status()
            assert status["publishing"]
            assert status["engines"]["engine-1"]["step"] == "load"
            assert status["engines"]["engine-0"]["step"] is None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert EngineState.READY not in states(factory)

    asyncio.run(check())


def test_the_deadline_of_a_publish_is_that_of_its_load():
    factory = FakeFactory()

    async def check():
        config = SupervisorConfig(**{**vars(CONFIG), "deadlines": StepDeadlines(load=3600)})
        async with supervised(factory, 2, config) as supervisor:
            factory.fail("engine-1", "load", *["hang"] * 9)
            with pytest.raises(PublishFailed, match=r"engine-1: load did not finish within 0\.2 s"):
                await supervisor.publish(msgspec.structs.replace(weights(1), deadline_seconds=0.2))

    asyncio.run(check())


class NeverGiven(OwnHost):
    """A host that the trainer leaves out of each version."""

    async def is_given(self, weights):
        return False

    async def has_copy(self, weights):
        return False


def test_a_publish_that_reaches_no_host_with_engines_ends_while_their_tasks_wait_for_it():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 0) as supervisor:
            factory.fail("engine-0", "start", "hang")
            supervisor.add()
            engine = factory.engine("engine-0")
            engine.host = NeverGiven()
            publish = asyncio.create_task(supervisor.publish(weights(1)))
            await until(lambda: supervisor.status()["publishing"])
            engine.go_on.set()
            with pytest.raises(PublishFailed, match="version 1 reached no host that has engines: publish it again"):
                await asyncio.wait_for(publish, 60)
            assert engine.state is EngineState.WAITING

    asyncio.run(check())


def test_a_publish_waits_for_an_engine_that_comes_up_no_longer_than_its_deadline():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 0) as supervisor:
            factory.fail("engine-0", "start", "hang")
            supervisor.add()
            late = msgspec.structs.replace(weights(1), deadline_seconds=0.1)
            with pytest.raises(PublishFailed, match="no engine came up within 0.1 s: engine engine-0 is starting"):
                await asyncio.wait_for(supervisor.publish(late), 60)
            factory.engine("engine-0").go_on.set()
            await supervisor.publish(weights(1))
            assert states(factory) == {EngineState.READY}

    asyncio.run(check())


def test_a_stream_gives_every_engine_its_ranks_and_is_not_retried():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 2) as supervisor:
            stream = streamed(1, 4)
            await supervisor.publish(stream)
            assert [factory.engine(f"engine-{number}").stream_place for number in range(2)] == [
                streams.StreamPlace(1, 5), streams.StreamPlace(3, 5)
            ]  # fmt: skip
            factory.fail("engine-1", "load", "refused")
            with pytest.raises(PublishFailed, match="engine-1 refuses load"):
                await supervisor.publish(msgspec.structs.replace(stream, version=2, fingerprint="other"))
            assert factory.engine("engine-0").steps.count("load") == 2

    asyncio.run(check())


def test_a_stream_for_other_engines_than_there_are_is_refused_before_any_is_paused():
    factory = FakeFactory()

    async def check():
        async with supervised(factory, 2) as supervisor:
            assert supervisor.status()["num_workers"] == 4
            stream = streamed(1, 2)
            with pytest.raises(WrongWorkerCount, match="streamed to 2 workers, and the engines that answer have 4"):
                await supervisor.publish(stream)
            assert "pause" not in factory.engine("engine-0").steps
            await supervisor.publish(weights(0))
            assert states(factory) == {EngineState.READY}
            # The version that they hold is over.
            with pytest.raises(WrongWorkerCount):
                await supervisor.publish(stream)
            assert states(factory) == {EngineState.DIRTY}

    asyncio.run(check())
