"""A publish reaches all engines or none; groups go to engines that can take them; all without processes."""

import asyncio
import math
from collections.abc import Mapping
from unittest.mock import AsyncMock

import msgspec
import pytest

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.wire import Drafts, EngineKind, FileSource, Weights
from megatron_rl.sidecar import streams
from megatron_rl.sidecar.engines import EngineLost, EngineState, WeightReport
from megatron_rl.sidecar.engines.hosts import OwnHost
from megatron_rl.sidecar.publication import Proof, Published, StepDeadlines, StepFailed, _must_agree
from megatron_rl.sidecar.supervisor import PublishFailed, Supervisor, WeightsNotProven, WrongWorkerCount
from tests.sidecar.fake_engines import STEPS, answer, request, streamed, weights
from tests.sidecar.supervised import CONFIG, given, hold_groups, let_go, num_made, states, supervised, until

# Log-probs travel as float32.
NONE = pytest.approx((0.0, 0.0), abs=1e-6)


async def test_a_publish_takes_every_engine_through_every_step(factory):
    async with supervised(factory, 3) as supervisor:
        published = await supervisor.publish(weights(1))
        assert list(published.seconds) == [*STEPS, "trainer"]
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


async def test_drafts_of_all_engines_are_added_up_but_for_engines_that_draft_nothing(factory):
    async with supervised(factory, 3) as supervisor:
        assert await supervisor.count_drafts() is None
        for number in range(2):
            counts = Drafts(count=1 + number, drafted=4, accepted=number)
            factory.engine(f"engine-{number}").count_drafts = AsyncMock(return_value=counts)
        assert await supervisor.count_drafts() == Drafts(count=3, drafted=8, accepted=1)


@pytest.mark.parametrize("num_compared", [0, 4])
async def test_parameters_that_cannot_be_compared_fail_the_first_publish_unless_the_weaker_proof_is_accepted(
    factory, num_compared
):
    factory.compares = {"engine-0": (5, 5), "engine-1": (num_compared, 5)}
    async with supervised(factory) as supervisor:
        with pytest.raises(PublishFailed, match=f"{num_compared} of 5 parameters .* layers.0.weight") as raised:
            await supervisor.publish(weights(0))
        assert "--publish-proof probe" in str(raised.value)
        # Another attempt or another engine would compare no more.
        assert factory.engine("engine-1").steps.count("load") == 1
        assert num_made(factory) == [1, 1]
        published = await supervisor.publish(msgspec.structs.replace(weights(0), proof="probe"))
        answer = published.build_answer()
        assert (answer.num_compared, answer.num_parameters) == (num_compared, 5)
        assert states(factory) == {EngineState.READY}


@pytest.mark.parametrize("step", STEPS)
async def test_a_step_that_is_refused_once_is_tried_again_as_a_whole(factory, step):
    async with supervised(factory) as supervisor:
        factory.fail("engine-1", step, "refused")
        await supervisor.publish(weights(1))
        assert states(factory) == {EngineState.READY}
        assert num_made(factory) == [1, 1]
        assert factory.engine("engine-0").steps.count("pause") == 2


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", [("refused", "refused"), ("lost",), ("hang",)])
async def test_an_engine_that_is_lost_or_refuses_twice_is_restarted(factory, step, fault):
    async with supervised(factory) as supervisor:
        factory.fail("engine-1", step, *fault)
        await supervisor.publish(weights(1))
        assert states(factory) == {EngineState.READY}
        assert num_made(factory) == [1, 2]
        assert factory.made["engine-1"][0].is_closed
        assert supervisor.status()["engines"]["engine-1"]["restarts"] == 1


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", ["refused", "lost", "hang"])
async def test_a_step_that_always_fails_is_named_and_the_engines_sample_nothing(factory, step, fault):
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


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda factory: [factory.fail("engine-0", step, "lost") for step in ("load", "start")],
            "engine-0 failed .*lost at load.* could not be restarted",
        ),
        (
            lambda factory: factory.corrupt.add("engine-1"),
            "engine-1: load reports version 1 with fingerprint 'another",
        ),
        (
            lambda factory: factory.says_of_tokens.update({"engine-1": "7"}),
            "first token after version 1 was published has .*7",
        ),
    ],
    ids=["it cannot be restarted", "it has another digest", "its first token has other weights"],
)
async def test_a_publish_that_an_engine_cannot_end_fails_by_name_and_opens_no_engine(factory, spoil, said):
    async with supervised(factory) as supervisor:
        spoil(factory)
        with pytest.raises(PublishFailed, match=said):
            await supervisor.publish(weights(1))
        assert EngineState.READY not in states(factory)
        # Nothing is committed without the right digest.
        engines = [engine for made in factory.made.values() for engine in made]
        assert not factory.corrupt or all("commit" not in engine.steps for engine in engines)


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize("is_found_by", ["digests", "the trainer"])
async def test_an_engine_that_does_not_hold_what_it_claims_ends_the_publish_and_is_named(
    factory, num_engines, is_found_by
):
    first, second = weights(1), weights(2)
    answers = {1: await answer(first), 2: await answer(second)}
    async with supervised(factory, num_engines) as supervisor:
        published = await supervisor.publish(first, given(answers[1]))
        assert [proof.difference for proof in published.proofs] == [NONE] * num_engines
        factory.keeps["engine-0"] = "weights-1"
        if is_found_by == "digests":
            factory.found_out = {"engine-0"}
        with pytest.raises(WeightsNotProven, match="version 2 was not published: engine engine-0.*") as caught:
            await supervisor.publish(second, given(answers[2]))
        assert list(caught.value.wrong) == ["engine-0"]
        assert is_found_by == "digests" or "(--publish-probe-bound): it does not hold version 2" in str(caught.value)
        assert EngineState.READY not in states(factory)
        # It was found out once: no engine is tried or started again.
        assert all(len(made) == 1 for made in factory.made.values())
        assert all(engine.steps.count("load") <= 2 for made in factory.made.values() for engine in made)


async def test_the_bound_of_the_difference_from_the_trainer_is_the_given_one_or_follows_from_who_computes(factory):
    held = weights(1)
    near, far = await answer(held, "others", bound=1e9), await answer(held, "others")
    async with supervised(factory, 1) as supervisor:
        (proof,) = (await supervisor.publish(held, given(near))).proofs
        assert 0 < proof.difference.mean <= proof.difference.largest
        with pytest.raises(WeightsNotProven, match="beyond 0.001"):
            await supervisor.publish(held, given(far))


async def be_silent():
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answer", "faults", "said"),
    [
        (be_silent, (), "the trainer did not send its log-probs of version 1's"),
        (None, ("not written",), "version 1 was not published: the trainer ended before it had"),
    ],
)
async def test_a_trainer_that_is_gone_fails_the_publish_and_restarts_no_engine(factory, answer, faults, said):
    async with supervised(factory) as supervisor:
        for name in ("engine-0", "engine-1"):
            factory.fail(name, "load", *faults)
        with pytest.raises(PublishFailed, match=said):
            await supervisor.publish(weights(1), answer)
        last = STEPS if answer else ("pause", "load")
        assert all(factory.engine(name).steps == list(last) for name in ("engine-0", "engine-1"))
        assert num_made(factory) == [1, 1]
        await supervisor.publish(weights(1))
        assert states(factory) == {EngineState.READY}


async def test_an_engine_that_comes_back_is_compared_with_the_trainer_too(factory, tmp_path):
    held = weights(1, location=str(tmp_path))
    of_trainer = await answer(held)
    told = []
    async with supervised(factory, 2) as supervisor:
        supervisor.on_joined = lambda weights, proofs: told.append((weights, proofs))
        await supervisor.publish(held, given(of_trainer))
        factory.killed["engine-1"] = 1
        await until(lambda: told)
        ((joined, (proof,)),) = told
        assert (joined, proof.engine, proof.difference) == (held, "engine-1", NONE)
        told.clear()
        factory.keeps["engine-1"] = "others"
        factory.killed["engine-1"] = 1
        await until(lambda: "it does not hold version 1" in supervisor.status()["engines"]["engine-1"]["error"])
        assert not told


async def test_an_engine_with_weights_that_are_neither_the_old_nor_the_new_ones_is_found(factory):
    async with supervised(factory, 3) as supervisor:
        await supervisor.publish(weights(1))
        factory.keeps["engine-1"] = "others"
        with pytest.raises(PublishFailed, match="engine-1: its log-probs of the probe are .* from those of all"):
            await supervisor.publish(weights(2))
        assert {name for name, made in factory.made.items() if len(made) > 1} == {"engine-1"}


async def test_engines_that_differ_are_accepted_if_the_trainer_wants_no_agreement(factory):
    factory.keeps["engine-1"] = "others"
    unbounded = await answer(weights(1), bound=math.inf, agreement=math.inf)
    async with supervised(factory, 3) as supervisor:
        await supervisor.publish(weights(1), given(unbounded))
        assert states(factory) == {EngineState.READY}


async def test_the_same_weights_may_be_published_as_the_next_version(factory):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1, fingerprint="same"))
        await supervisor.publish(weights(2, fingerprint="same"))
        assert states(factory) == {EngineState.READY}


async def test_groups_of_an_engine_that_dies_go_to_the_others_with_the_same_seeds(factory, tmp_path):
    async with supervised(factory) as supervisor:
        await supervisor.publish(weights(1, location=str(tmp_path)))
        expected = [await supervisor.generate(request(number)) for number in range(8)]
        hold_groups(factory)
        tasks = [asyncio.create_task(supervisor.generate(request(number))) for number in range(8)]
        await until(lambda: len(factory.served["engine-1"]) == 4)
        factory.killed["engine-1"] = 1
        let_go(factory)
        groups = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert [[r.tokens for r in group] for group in groups] == [[r.tokens for r in group] for group in expected]
        assert supervisor.status()["groups_retried"] == 4


async def test_no_engine_gets_more_than_its_bound_and_the_least_loaded_gets_the_next(factory):
    async with supervised(factory, 2, max_responses=6) as supervisor:
        await supervisor.publish(weights(1))
        hold_groups(factory)
        tasks = [asyncio.create_task(supervisor.generate(request(number))) for number in range(10)]
        await until(lambda: supervisor.status()["groups_waiting"] == 4)
        status = supervisor.status()
        assert [engine["in_flight"] for engine in status["engines"].values()] == [6, 6]
        for task in tasks[:3]:
            task.cancel()
        let_go(factory)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        status = supervisor.status()
        assert [engine["in_flight"] for engine in status["engines"].values()] == [0, 0]
        assert status["groups_waiting"] == 0


async def test_a_group_larger_than_the_bound_gets_an_engine_of_its_own(factory):
    async with supervised(factory, 1, max_responses=2) as supervisor:
        await supervisor.publish(weights(1))
        assert len(await asyncio.wait_for(supervisor.generate(request(0, group_size=9)), 60)) == 9


async def test_a_group_that_is_always_refused_fails_after_a_bounded_number_of_attempts(factory):
    async with supervised(factory, 1) as supervisor:
        await supervisor.publish(weights(1))
        factory.fail("engine-0", "generate", *["refused"] * 100)
        with pytest.raises(EngineLost, match="refuses generate; request group-0 was tried 5 times"):
            await supervisor.generate(request(0))


async def test_engines_join_with_the_current_version_and_leave_with_the_next(factory, tmp_path):
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


async def test_the_first_engine_that_cannot_start_ends_the_others(factory):
    factory.fail("engine-1", "start", "lost")
    supervisor = Supervisor(factory, CONFIG)
    with pytest.raises(EngineLost, match="engine-1 is lost at start"):
        await supervisor.start(3)
    assert all(engine.is_closed for made in factory.made.values() for engine in made)


async def test_the_status_shows_who_waits_for_what(factory):
    async with supervised(factory, deadlines=StepDeadlines()) as supervisor:
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


async def test_the_deadline_of_a_publish_is_that_of_its_load(factory):
    async with supervised(factory, deadlines=StepDeadlines(load=3600)) as supervisor:
        factory.fail("engine-1", "load", *["hang"] * 9)
        with pytest.raises(PublishFailed, match=r"engine-1: load did not finish within 0\.2 s"):
            await supervisor.publish(msgspec.structs.replace(weights(1), deadline_seconds=0.2))


class NeverGiven(OwnHost):
    """A host that the trainer leaves out of each version."""

    async def is_given(self, weights):
        return False

    async def has_copy(self, weights):
        return False


async def test_a_publish_that_reaches_no_host_with_engines_ends_while_their_tasks_wait_for_it(factory):
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


async def test_a_publish_waits_for_an_engine_that_comes_up_no_longer_than_its_deadline(factory):
    async with supervised(factory, 0) as supervisor:
        factory.fail("engine-0", "start", "hang")
        supervisor.add()
        late = msgspec.structs.replace(weights(1), deadline_seconds=0.1)
        with pytest.raises(PublishFailed, match="no engine came up within 0.1 s: engine engine-0 is starting"):
            await asyncio.wait_for(supervisor.publish(late), 60)
        factory.engine("engine-0").go_on.set()
        await supervisor.publish(weights(1))
        assert states(factory) == {EngineState.READY}


async def test_a_stream_gives_every_engine_its_ranks_and_is_not_retried(factory):
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


async def test_a_stream_for_other_engines_than_there_are_is_refused_before_any_is_paused(factory):
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


WEIGHTS = Weights(run="run", version=3, fingerprint="f", source=FileSource(folder=""), dtype="float32")
MOST = [-2.0, -1.0, -3.0]
CPU, BF16 = EngineKind(), EngineKind(dtype="bfloat16", device="cuda")


def find_refused(
    probes: Mapping[str, list[float]],
    kind: EngineKind = CPU,
    before: Published | None = None,
    given: float | None = None,
) -> dict[str, str]:
    try:
        _must_agree(probes, [kind] * len(probes), WEIGHTS, before, given)
    except StepFailed as failure:
        return {name: str(error) for name, error in failure.errors.items()}
    return {}


@pytest.mark.parametrize("odd", [[-2.0, -1.0, -3.1], [-2.0, math.nan, -3.0], [math.nan, -1.0, -3.0]])
def test_an_engine_whose_probe_differs_from_the_others_is_named(odd):
    assert find_refused({"a": MOST, "b": MOST}) == {}
    assert set(find_refused({"a": MOST, "b": odd, "c": MOST})) == {"b"}


def test_engines_that_compute_in_bfloat16_may_differ_by_what_it_rounds():
    near, far = [value + 0.1 for value in MOST], [value + 2.0 for value in MOST]
    assert find_refused({"a": MOST, "b": near, "c": MOST}, BF16) == {}
    assert set(find_refused({"a": MOST, "b": far, "c": MOST}, BF16)) == {"b"}
    assert set(find_refused({"a": MOST, "b": near, "c": MOST}, CPU)) == {"b"}


def test_the_bound_that_is_given_replaces_the_one_of_the_engines():
    near = [value + 0.1 for value in MOST]
    assert find_refused({"a": MOST, "b": near, "c": MOST}, CPU, given=0.2) == {}
    refused = find_refused({"a": MOST, "b": near, "c": MOST}, BF16, given=0.05)
    assert set(refused) == {"b"}
    assert "(--publish-agreement-bound)" in refused["b"]
    assert "--rollout-dtype" in refused["b"]
    assert set(find_refused({"a": MOST, "b": [math.nan] * 3, "c": MOST}, given=math.inf)) == {"b"}


def test_an_engine_that_joins_is_compared_by_the_coarser_of_its_kind_and_the_others():
    before = Published(WEIGHTS, (), tuple(MOST), None, (BF16,))
    near = [value + 0.1 for value in MOST]
    assert find_refused({"late": near}, CPU, before) == {}
    refused = find_refused({"late": near}, CPU, Published(WEIGHTS, (), tuple(MOST), None, (CPU,)))
    assert "the other engines with the same weights" in refused["late"]


def test_the_answer_says_how_all_engines_got_their_weights_and_why_any_took_files():
    def answer(*reports: WeightReport) -> tuple[str, tuple[str, ...]]:
        proofs = tuple(Proof(str(number), report) for number, report in enumerate(reports))
        found = Published(WEIGHTS, proofs, tuple(MOST), None, (CPU,) * len(proofs)).build_answer()
        return found.through, found.reasons

    direct = WeightReport(3, "f", 4, 4, through="ipc")
    files = WeightReport(3, "f", 4, 4, reasons=("the trainer runs on another host",))
    assert answer(direct, direct) == ("ipc", ())
    assert answer(direct, files, files) == ("files", ("the trainer runs on another host",))
