"""The rollout service over scripted engines: its promises to every rank of a trainer."""

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.records.append_file import AppendFailed
from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.evaluation import EvaluationFailed
from megatron_rl.sidecar.hosts import HostList
from megatron_rl.sidecar.hosts.membership import Hosts
from megatron_rl.sidecar.iteration import IterationFailed, NotAllClaimed
from megatron_rl.sidecar.publication import AwaitAnswer, Published
from megatron_rl.sidecar.service import Conflict, RolloutService
from tests.sidecar.scripted_service import (
    PLAN,
    Engines,
    Memory,
    RewardLength,
    all_slots,
    engine,
    evaluation,
    serving,
    submission,
    trained,
    weights,
)  # fmt: skip

FAR_OFF = wire.Mismatch(mean=0.25, largest=1.0, bound=5e-3)


async def failure_of(service: RolloutService, version: int = 0) -> str:
    """Return why the iteration failed, as ranks are told that ask for all of it."""
    with pytest.raises(IterationFailed) as caught:
        await all_slots(service, version)
    return str(caught.value).removeprefix(f"iteration {version} failed: ")


async def test_every_group_is_answered_once_and_every_rank_gets_the_same_bytes() -> None:
    memory = Memory()
    async with serving(engine("0", delay=lambda r: 0.01), engine("1", delay=lambda r: 0.002), memory=memory) as service:
        await service.submit(submission())
        slots = await all_slots(service)
        assert trained(slots) == list(range(8))
        for slot in slots.values():
            for part in slot.parts:
                assert part.rewards == [len(r.tokens) / 4 for r in part.responses]
        service.complete(0)
    assert memory.events == [("published", 0), ("submitted", 0), ("restored", 0), ("completed", 0)]


async def test_a_group_of_an_engine_that_dies_is_sampled_by_another_with_the_same_tokens() -> None:
    results: list[list[bytes]] = []
    for faults in ({}, {"run-0-3": "die", "run-0-2": "die"}):
        async with serving(engine("0", group_faults=faults), engine("1")) as service:
            await service.submit(submission())
            slots = await all_slots(service)
            parts = sorted((part for slot in slots.values() for part in slot.parts), key=lambda part: part.prompt_index)
            results.append([response.tokens for part in parts for response in part.responses])
    assert results[0] == results[1]


async def test_a_group_sampled_with_other_weights_than_it_claims_is_never_handed_out() -> None:
    async with serving(engine("0", keeps_old_weights=True)) as service:
        await service.publish(weights(1))
        await service.submit(submission(1))
        with pytest.raises(IterationFailed, match="fingerprint is 'weights-0'.*sampled 3 times"):
            await all_slots(service, version=1)


async def test_with_no_engine_left_every_wait_ends_with_the_same_reason() -> None:
    async with serving(engine("0", group_faults={f"run-0-{i}": "die" for i in range(8)})) as service:
        await service.submit(submission())
        waits = await asyncio.gather(
            *(service.slot(0, replica, index, 10) for replica in range(2) for index in range(2)),
            return_exceptions=True,
        )
        assert all(isinstance(wait, IterationFailed) and "no engine is left" in str(wait) for wait in waits)
        assert len(set(map(str, waits))) == 1


class RewardByPrompt:
    """A reward that is the same for all responses of a group, except those of some prompts."""

    def __init__(self, with_signal: set[int]) -> None:
        self.with_signal = with_signal
        self.scored: list[int] = []

    async def score(self, group: wire.Group, chats: Any = None) -> wire.Group:
        self.scored.append(group.prompt.index)
        has_signal = group.prompt.index in self.with_signal
        responses = [
            msgspec.structs.replace(response, reward=float(has_signal and number == 0))
            for number, response in enumerate(group.responses)
        ]
        return wire.Group(prompt=group.prompt, responses=responses)


@pytest.mark.parametrize("order", ["completion", "prompt"])
async def test_other_prompts_are_sampled_for_groups_without_a_signal_and_no_more_than_are_needed(order) -> None:
    plan = msgspec.structs.replace(PLAN, num_spare=12, order=order)
    scorer = RewardByPrompt({0, 1, 3, 4, 5, 8, 9, 11, 12, 13, 16})
    async with serving(engine("0", delay=lambda r: 0.01), engine("1", delay=lambda r: 0.002), scorer=scorer) as service:
        await service.submit(submission(plan=plan))
        assert trained(await all_slots(service)) == [0, 1, 3, 4, 5, 8, 9, 11]
        census = service.complete(0).census
        assert (census.num_considered, census.num_without_signal) == (12, 4)
        assert set(range(12)) <= set(scorer.scored)


async def test_where_no_group_has_a_signal_the_iteration_is_filled_with_those_that_have_none() -> None:
    plan = msgspec.structs.replace(PLAN, num_spare=4)
    async with serving(engine("0", delay=lambda r: 0.01), scorer=RewardByPrompt({7, 10})) as service:
        await service.submit(submission(plan=plan))
        assert trained(await all_slots(service)) == [0, 1, 2, 3, 4, 5, 7, 10]
        assert service.complete(0).census.num_considered == 12


async def test_prompts_sampled_ahead_are_called_off_once_they_are_not_needed() -> None:
    plan = msgspec.structs.replace(PLAN, num_spare=8)
    hang = {f"run-0-{index}": "hang" for index in range(8, 16)}
    async with serving(engine("0", group_faults=hang), scorer=RewardByPrompt(set(range(8)))) as service:
        service._seen = (4, 8)
        await service.submit(submission(plan=plan))
        # Prompts ahead hang, and no rank waits for them.
        assert trained(await all_slots(service)) == list(range(8))
        assert service.complete(0).census.num_considered == 8
        await service.publish(weights(1))
        assert service._task is None


class Faulty:
    async def score(self, group: wire.Group, chats: Any = None) -> wire.Group:
        raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("faults", "memory", "scorer", "words"),
    [
        ({"run-0-1": "hang"}, None, None, "after 0.3 s, its deadline"),
        ({}, Memory(full=True), None, "the journal cannot be written"),
        # A fault of the rewards is not taken for one of the journal.
        ({}, None, Faulty(), "the sidecar failed: OSError(24, 'Too many open files'); its log has the traceback"),
    ],
)
async def test_an_iteration_that_cannot_be_made_fails_by_name(faults, memory, scorer, words) -> None:
    async with serving(engine("0", group_faults=faults), memory=memory, scorer=scorer) as service:
        await service.submit(submission(deadline=0.3 if faults else 20.0))
        assert words in await failure_of(service)


async def test_a_group_whose_reward_is_not_finite_reaches_no_slot_no_journal_and_no_evaluation() -> None:
    class Infinite:
        async def score(self, group: wire.Group, chats: Any = None) -> wire.Group:
            responses = [msgspec.structs.replace(response, reward=float("inf")) for response in group.responses]
            return wire.Group(prompt=group.prompt, responses=responses)

    memory = Memory()
    async with serving(scorer=Infinite(), memory=memory) as service:
        await service.submit(submission())
        assert "response 0 of engine 0: its reward is inf" in await failure_of(service)
        await service.evaluate(evaluation())
        with pytest.raises(EvaluationFailed, match="its reward is inf"):
            await service.evaluated(0, 10)
    assert memory.groups == []


async def test_a_group_whose_task_was_cancelled_fails_the_iteration() -> None:
    class Cancelled(RewardLength):
        async def score(self, group: wire.Group, chats: Any = None) -> wire.Group:
            if group.prompt.index == 3:
                raise asyncio.CancelledError
            return await super().score(group)

    async with serving(scorer=Cancelled()) as service:
        await service.submit(submission())
        reason = await failure_of(service)
        assert "the making of 1 was cancelled, and 1 of 8 groups are not finished (prompts 3)" in reason
        await service.evaluate(evaluation())
        with pytest.raises(EvaluationFailed, match="the making of 1 was cancelled, and 1 of 6 groups are not finished"):
            await service.evaluated(0, 10)


async def test_teachers_grade_groups_that_are_trained_on_alone_and_end_the_iteration_where_they_cannot() -> None:
    class Grades:
        def __init__(self, fails: bool) -> None:
            self.fails, self.num_asked = fails, 0

        async def teach(self, group: wire.Group) -> wire.Group:
            self.num_asked += 1
            if self.fails:
                raise MegatronRLError(f"teacher: it gave no finite log-prob for {group.prompt.row}")
            responses = [msgspec.structs.replace(one, teacher_log_probs=one.tokens) for one in group.responses]
            return wire.Group(prompt=group.prompt, responses=responses)

    teachers = Grades(fails=False)
    async with serving(teachers=teachers) as service:
        await service.evaluate(evaluation())
        await service.evaluated(0, 10)
        assert teachers.num_asked == 0
        await service.submit(submission())
        slots = await all_slots(service)
        assert teachers.num_asked == 8
        responses = [response for slot in slots.values() for part in slot.parts for response in part.responses]
        assert all(response.teacher_log_probs == response.tokens for response in responses)
    async with serving(teachers=Grades(fails=True)) as service:
        await service.submit(submission())
        assert "teacher: it gave no finite log-prob for row-" in await failure_of(service)


async def test_a_claim_that_cannot_be_recorded_is_not_answered_and_fails_the_iteration_for_all() -> None:
    memory = Memory(refuses_claims=True)
    async with serving(memory=memory) as service:
        await service.submit(submission())
        waits = (service.slot(0, replica, 0, 10) for replica in range(2))
        answers = await asyncio.gather(*waits, return_exceptions=True)
        assert all("no room for claims" in str(answer) for answer in answers)
        assert "no room for claims" in await failure_of(service)
    assert ("failed", 0) in memory.events


async def test_a_trainer_that_comes_back_gets_what_was_finished_and_its_zombie_is_refused() -> None:
    memory = Memory()
    async with serving(engine("0", group_faults={"run-0-6": "hang"}), memory=memory) as service:
        await service.submit(submission())
        assert await service.slot(0, 0, 0, 10) is not None
        while len(memory.groups) < 6:
            await asyncio.sleep(0.01)
        zombie = service.lease.number
        # One of them for the group that hangs.
        asked = asyncio.gather(*(service.slot(0, *place, 10) for place in ((0, 1), (1, 0), (1, 1))))
        await asyncio.sleep(0.01)
        await service.take_lease("run")
        with pytest.raises(Conflict, match="another trainer has taken this sidecar"):
            service.renew_lease(zombie)
        with pytest.raises(IterationFailed, match="was started again"):
            await asked
    second, claimed, num_kept = engine("0"), memory.claims[0].prompts, len(memory.groups)
    async with serving(second, memory=memory) as service:
        await service.submit(submission())
        slots = await all_slots(service)
        assert [part.prompt_index for part in slots[0, 0].parts] == claimed
        assert trained(slots) == list(range(8))
        assert service.counters.reused == num_kept
        assert second.num_served == 8 - num_kept


@pytest.mark.parametrize("moment", ["within it", "after it", "in the next one"])
async def test_a_rank_that_asks_early_waits_for_what_its_own_trainer_submits(moment: str) -> None:
    """Leave the trainer before in each state that the sidecar may find it in; this one has prompts of its own."""
    async with serving(memory=Memory(keeps=False)) as service:
        await service.submit(submission())
        if moment != "within it":
            await all_slots(service)
            service.complete(0)
        if moment == "in the next one":
            await service.publish(weights(1))
            await service.submit(submission(1))
        await service.take_lease("run")
        await service.publish(weights())
        early = asyncio.create_task(service.slot(0, 1, 0, 10))
        await asyncio.sleep(0.02)
        own = submission()
        prompts = [msgspec.structs.replace(prompt, tokens=wire.encode_tokens([9])) for prompt in own.prompts]
        await service.submit(msgspec.structs.replace(own, prompts=prompts))
        data = await early
        assert data is not None
        assert {part.prompt_tokens for part in wire.decode(data, wire.Slot).parts} == {wire.encode_tokens([9])}


async def test_a_rank_that_asked_for_what_was_never_submitted_learns_that_its_lease_is_over() -> None:
    async with serving() as service:
        early = asyncio.create_task(service.slot(0, 0, 0, 10))
        await asyncio.sleep(0)
        await service.take_lease("run")
        await service.submit(submission())
        with pytest.raises(Conflict, match="another trainer has taken this sidecar"):
            await early


async def test_no_number_of_a_lease_is_given_twice() -> None:
    async with serving(engine(delay=lambda r: 0.1)) as service:
        await service.submit(submission())
        before = service.lease.number
        taken = await asyncio.gather(service.take_lease("run"), service.take_lease("run"), return_exceptions=True)
        assert [type(one) for one in taken] == [Conflict, int]
        started_again = RolloutService(Engines(engine()), RewardLength(), Memory())
        with pytest.raises(Conflict, match="this sidecar was started after it was taken; start the trainer again"):
            started_again.renew_lease(before)
        assert await started_again.take_lease("run") > taken[1]
        with pytest.raises(Conflict, match="another trainer has taken this sidecar"):
            started_again.renew_lease(before)


async def test_an_iteration_is_complete_once_its_end_is_recorded_and_a_failed_one_never_is() -> None:
    full, refused, late = Memory(refuses_end=True), Memory(), Memory()
    async with serving(memory=full) as service:
        await service.submit(submission())
        await all_slots(service)
        for _ in range(2):
            with pytest.raises((AppendFailed, IterationFailed), match="no room for the end"):
                service.complete(0)
    assert ("completed", 0) not in full.events
    async with serving(memory=refused) as service:
        await service.submit(submission())
        await all_slots(service)
        await service.refuse(0, FAR_OFF)
        with pytest.raises(IterationFailed, match=r"beyond 0\.005"):
            service.complete(0)
    assert refused.events[-1] == ("failed", 0)
    async with serving(memory=late) as service:
        await service.submit(submission())
        await all_slots(service)
        service.complete(0)
        await service.refuse(0, FAR_OFF)
        service.complete(0)
    assert late.events[-1] == ("completed", 0)


async def test_another_run_is_refused_while_the_lease_is_held() -> None:
    async with serving() as service:
        with pytest.raises(Conflict, match="works for the run 'run'"):
            await service.take_lease("other")
        with pytest.raises(Conflict, match="another trainer has taken this sidecar. End one of the two, or give"):
            service.renew_lease(service.lease.number - 1)
        with pytest.raises(Conflict, match="the lease is held by the run 'run'"):
            await service.publish(weights(1, run="other"))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda s: s.submit(submission(1)), "publish it first"),
        (lambda s: asyncio.to_thread(s.complete, 0), "iteration 0 was not submitted"),
    ],
)
async def test_a_call_out_of_turn_is_refused_and_says_what_to_do_first(act: Callable, message: str) -> None:
    async with serving() as service:
        with pytest.raises(MegatronRLError, match=message):
            await act(service)


async def test_nothing_is_published_and_nothing_else_submitted_while_an_iteration_runs() -> None:
    async with serving(engine("0", delay=lambda r: 0.05)) as service:
        await service.submit(submission())
        await service.submit(submission())
        with pytest.raises(Conflict, match="complete or refuse it before publishing"):
            await service.publish(weights(1))
        with pytest.raises(NotAllClaimed, match="8 of 8 groups are not finished"):
            service.complete(0)
        await service.refuse(0, FAR_OFF)
        await service.publish(weights(1))
        await service.submit(submission(1))
        assert trained(await all_slots(service, 1)) == list(range(8))
        with pytest.raises(Conflict, match="iteration 0 is not the current one, 1"):
            await service.slot(0, 0, 0, 1)


async def test_a_repeated_publish_gets_the_result_of_the_first_and_one_that_failed_is_tried_again() -> None:
    async with serving() as service:
        begins, goes_on, publish = [], asyncio.Event(), service.engines.publish

        async def count(told: wire.Weights, answer: AwaitAnswer | None = None) -> Published:
            begins.append(told.version)
            await goes_on.wait()
            if begins == [1]:
                raise MegatronRLError("an engine is lost")
            return await publish(told, answer)

        service.engines.publish = count
        first, second = (asyncio.create_task(service.publish(weights(1))) for _ in range(2))
        await asyncio.sleep(0.01)
        goes_on.set()
        failures = await asyncio.gather(first, second, return_exceptions=True)
        assert [str(failure) for failure in failures] == ["an engine is lost"] * 2
        goes_on.clear()
        broken = asyncio.create_task(service.publish(weights(1)))
        await asyncio.sleep(0.01)
        # Its connection broke.
        broken.cancel()
        await asyncio.gather(broken, return_exceptions=True)
        repeated = asyncio.create_task(service.publish(weights(1)))
        goes_on.set()
        assert await repeated == await service.publish(weights(1))
        assert (begins, service.weights) == ([1, 1], weights(1))
        await service.take_lease("run")
        await service.publish(weights(1))
        assert begins == [1, 1, 1]


async def test_a_rank_may_ask_before_another_has_submitted() -> None:
    async with serving() as service:
        assert await service.slot(0, 0, 0, 0.05) is None
        early = asyncio.create_task(all_slots(service))
        await asyncio.sleep(0.05)
        await service.submit(submission())
        assert trained(await early) == list(range(8))


async def test_waiting_too_long_for_a_slot_returns_none() -> None:
    async with serving(engine("0", delay=lambda r: 5.0)) as service:
        await service.submit(submission())
        assert await service.slot(0, 0, 0, 0.05) is None
        assert service.status()["iteration"]["slots_waiting"] == [[0, 0]]


ANSWER = wire.ProbeAnswer(run="run", version=1, fingerprint="weights-1", log_probs=b"", dtype="float32")
PROBED = msgspec.structs.replace(weights(1), probe=wire.encode_tokens([3, 4, 5]))


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_publish_waits_for_the_trainers_answer_to_its_own_probe(is_early: bool) -> None:
    async with serving() as service:
        # Answers to another version, and to another attempt, are not the awaited one.
        service.probed(msgspec.structs.replace(ANSWER, version=0))
        if is_early:
            service.probed(ANSWER)
        published = asyncio.create_task(service.publish(PROBED))
        await asyncio.sleep(0)
        if not is_early:
            for other in ({"version": 2}, {"fingerprint": "others"}):
                service.probed(msgspec.structs.replace(ANSWER, **other))
                for _ in range(10):
                    await asyncio.sleep(0)
                assert not published.done()
            service.probed(ANSWER)
        answer = await published
        assert (answer.kind.has_model, service.weights) == (False, PROBED)
        with pytest.raises(Conflict, match="the lease is held by the run 'run', not by 'other'"):
            service.probed(msgspec.structs.replace(ANSWER, run="other"))


async def test_a_publish_whose_trainer_is_gone_ends_when_another_takes_the_lease() -> None:
    async with serving() as service:
        published = asyncio.create_task(service.publish(PROBED))
        for _ in range(10):
            await asyncio.sleep(0)
        await service.take_lease("run")
        with pytest.raises(Conflict, match=r"lease \d+ is over: another trainer has taken this sidecar"):
            await published
        await service.publish(weights(1))
        # A lease that is taken while no rank waits calls nothing off.
        await service.take_lease("run")
        service.probed(msgspec.structs.replace(ANSWER, version=2, fingerprint="weights-2"))
        await service.publish(msgspec.structs.replace(weights(2), probe=PROBED.probe))


async def test_a_publish_is_called_off_with_its_lease_though_its_engines_still_load_or_another_publish_runs() -> None:
    async with serving() as service:
        is_loaded, publish, begins = asyncio.Event(), service.engines.publish, []

        async def load(told: wire.Weights, answer: AwaitAnswer | None = None) -> Published:
            begins.append(told.version)
            await is_loaded.wait()
            return await publish(told, answer)

        service.engines.publish = load
        later = msgspec.structs.replace(PROBED, version=2)
        publishes = [asyncio.create_task(service.publish(told)) for told in (PROBED, later)]
        await asyncio.sleep(0.01)
        await service.take_lease("run")
        is_loaded.set()
        for former in publishes:
            with pytest.raises(Conflict, match=r"lease \d+ is over: another trainer has taken this sidecar"):
                await asyncio.wait_for(former, 60)
        assert begins == [1]


async def test_a_version_is_sent_to_hosts_under_the_lease_of_the_trainer_that_has_published_it() -> None:
    """Hold this, because under the next lease it would keep earlier versions of the next trainer away."""
    hosts = Hosts(HostList((), "token"), "run")
    service = RolloutService(Engines(engine()), RewardLength(), Memory(), hosts=hosts)
    first = await service.take_lease("run")
    await service.publish(weights())
    assert hosts.find_trainer_lease() == first
    second = await service.take_lease("run")
    assert hosts.find_trainer_lease() == first
    await service.publish(weights())
    assert hosts.find_trainer_lease() == second
    await service.close()


async def test_a_trainer_that_returns_to_a_version_answers_its_probe_itself() -> None:
    async with serving() as service:
        service.probed(ANSWER)
        await service.publish(PROBED)
        await service.take_lease("run")
        published = asyncio.create_task(service.publish(PROBED))
        await asyncio.sleep(0.01)
        assert not published.done()
        service.probed(ANSWER)
        await asyncio.wait_for(published, 60)


async def test_what_the_trainer_reports_is_recorded_once_before_the_iteration_is_complete() -> None:
    mismatch = wire.Mismatch(mean=1e-6, largest=1e-5, bound=5e-3)
    report = wire.Trained(version=0, mismatch=mismatch, plug_ins={"--grpo-loss own.py:f": "0" * 64})
    memory = Memory()
    async with serving(memory=memory) as service:
        await service.submit(submission())
        await all_slots(service)
        for _ in range(2):
            service.complete(0, report)
    assert memory.events[-2:] == [("trained", 0, report), ("completed", 0)]
    assert memory.events.count(("trained", 0, report)) == 1


async def test_an_iteration_that_the_trainer_refuses_fails_for_all_and_is_never_complete() -> None:
    memory = Memory()
    async with serving(memory=memory) as service:
        await service.submit(submission())
        await all_slots(service)
        for _ in range(2):
            await service.refuse(0, FAR_OFF)
        assert await failure_of(service) == "log-probs differ by 0.25 on average, beyond 0.005"
        with pytest.raises(IterationFailed, match="beyond 0.005"):
            service.complete(0, wire.Trained(version=0, mismatch=FAR_OFF))
    assert memory.events[-2:] == [("judged", 0, FAR_OFF), ("failed", 0)]


async def test_the_last_groups_are_put_off_and_called_off() -> None:
    plan = msgspec.structs.replace(PLAN, tail="carry", num_tail=2)
    hang = {f"run-0-{index}": "hang" for index in (2, 7)}
    slow = {"run-1-0": 0.05, "run-1-1": 0.05}
    slow_engine = engine("0", group_faults=hang, delay=lambda r: slow.get(r.request_id, 0.0))
    async with serving(slow_engine, memory=Memory(keeps=False)) as service:
        await service.submit(submission(plan=plan))
        assert trained(await all_slots(service)) == [0, 1, 3, 4, 5, 6, 8, 9]
        census = service.complete(0).census
        assert (census.num_considered, census.put_off) == (10, [2, 7])
        await service.publish(weights(1))
        # An iteration of prompts that were put off has nothing else, and waits for all of it.
        fresh = submission(1, plan=plan)
        await service.submit(msgspec.structs.replace(fresh, prompts=fresh.prompts[:8], num_carried=8))
        assert trained(await all_slots(service, 1)) == list(range(8))
        assert service.complete(1).census.put_off == []


async def test_the_last_groups_end_where_they_are_and_no_others() -> None:
    plan = msgspec.structs.replace(PLAN, tail="truncate", num_tail=2)
    # Their time would end long after the test's.
    async with serving(
        engine("0", lengths=(8, 8), delay=lambda r: 3600.0 if r.request_id in ("run-0-2", "run-0-6") else 0.0)
    ) as service:
        await service.submit(submission(plan=plan))
        slots = await all_slots(service)
        assert trained(slots) == list(range(8))
        reasons: dict[int, set[str]] = {}
        for slot in slots.values():
            for part in slot.parts:
                reasons.setdefault(part.prompt_index, set()).update(one.finish_reason for one in part.responses)
                assert all(one.tokens and one.spans[0].end == len(one.tokens) // 4 for one in part.responses)
        assert {index for index, of_group in reasons.items() if "cut" in of_group} == {2, 6}


async def test_a_single_group_that_a_restart_left_to_do_is_not_cut_off() -> None:
    plan = msgspec.structs.replace(PLAN, tail="truncate", num_tail=2)
    memory = Memory()
    async with serving(engine("0"), memory=memory) as service:
        await service.submit(submission(plan=plan))
        await all_slots(service)
    memory.groups, memory.claims = memory.groups[:7], []
    async with serving(engine("0", delay=lambda r: 0.02), memory=memory) as service:
        await service.submit(submission(plan=plan))
        slots = await all_slots(service)
        assert all(one.finish_reason != "cut" for slot in slots.values() for p in slot.parts for one in p.responses)


async def test_engines_sleep_once_every_slot_has_come_and_until_the_next_publish() -> None:
    async with serving(engine("0"), engine("1")) as service:
        await service.submit(submission())
        with pytest.raises(Conflict, match="engines sleep once every slot of iteration 0 has come: 8 of 8 groups"):
            await service.sleep(0)
        slots = await all_slots(service)
        await service.sleep(0)
        assert {one.state for one in service.engines.engines} == {EngineState.WAITING}
        # A request that is sent again, and a rank that asks again for a slot, get the same answers.
        await service.sleep(0)
        assert await all_slots(service) == slots
        with pytest.raises(Conflict, match="version 0 .* the engines hold none: publish it first"):
            await service.evaluate(evaluation())
        service.complete(0)
        await service.publish(weights(1))
        await service.submit(submission(1))
        await all_slots(service, version=1)
