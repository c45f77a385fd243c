"""Conversations in the simulator, against times that are counted by hand."""

import pytest

from megatron_rl.analysis.plan.costs import BatchingCosts, Talk
from megatron_rl.analysis.plan.engines import SimulatedBatching, SimulatedGroup
from megatron_rl.analysis.plan.pool import Pool
from megatron_rl.analysis.plan.records import read_record
from megatron_rl.analysis.plan.talks import open_talks


def hold(talk: Talk, *groups: SimulatedGroup, max_running: int = 8, **costs: float) -> list[SimulatedGroup]:
    engine = BatchingCosts(**{"step": 1.0, **costs}, max_running=max_running, max_in_flight=max_running)
    pool = Pool([SimulatedBatching(engine)], engine.max_in_flight, 0.0, 1, talk)
    pool.submit(groups, 0.0)
    return pool.take(len(groups))


def test_each_turn_waits_for_the_answer_to_the_last_and_the_end_for_the_last_answer():
    (group,) = hold(Talk(turns=2, seconds=3.0), SimulatedGroup(0, 0, 7, [10, 10]))
    # Both turns of both conversations: 5 tokens, 3 s, 5 tokens, 3 s.
    assert (group.begun, group.sampled, group.finished) == (0.0, 16.0, 16.0)


def test_an_engine_samples_other_conversations_meanwhile_and_continues_them_before_it_begins_others():
    groups = [SimulatedGroup(index, 0, 7, [10]) for index in range(3)]
    held = hold(Talk(turns=2, seconds=3.0), *groups, max_running=1)
    # A 0-5, B 5-10, A again 10-15 although C waits since 0, B again 15-20 since its answer came at 13, C 20-25, 28-33.
    assert [group.index for group in held] == [0, 1, 2]
    assert [group.sampled for group in held] == [18.0, 23.0, 36.0]


def test_a_turn_prefills_the_answer_before_it_alone():
    talk = Talk(turns=2, given_share=0.5)
    (group,) = hold(talk, SimulatedGroup(0, 0, 30, [20]), step=0.0, per_prompt_token=1.0)
    assert group.sampled == 30 + 10
    (group,) = hold(talk, SimulatedGroup(0, 0, 30, [20, 20]), step=0.0, per_prompt_token=1.0)
    assert group.sampled == 30 + 10 + 10


def test_the_mean_number_of_turns_and_all_tokens_are_kept():
    turns = [
        turn for before in range(0, 40, 4) for turn in open_talks(SimulatedGroup(0, 0, 9, [11] * 4), Talk(2.3), before)
    ]
    assert sum(1 + len(turn.rest) for turn in turns) == pytest.approx(2.3 * 40)
    assert {sum([*turn.lengths, *turn.rest]) for turn in turns} == {11}


def test_a_run_tells_its_turns_the_tokens_of_its_environments_and_their_seconds():
    def metrics(version, **own):
        return {
            "version": version, "groups": 1, "tokens": {"prompt": 5, "response": 30, "environment": 10},
            "responses": {"turns": 2.5}, "time": {"iteration": 1.0, "environment_mean": 0.25, "environment_p95": 0.5},
        } | own  # fmt: skip

    def audit(version):
        plan = {
            "num_prompts": 1, "group_size": 1, "micro_batch_size": 1, "num_replicas": 1, "num_updates": 1,
            "order": "prompt",
        }  # fmt: skip
        response = {"engine": "a", "num_tokens": 40}
        return [
            {"event": "submit", "version": version, "plan": plan, "time": 0.0},
            {"event": "group", "version": version, "prompt": 0, "responses": [response], "time": 1.0},
            {"event": "complete", "version": version, "time": 2.0},
        ]

    plain = {"tokens": {"prompt": 5, "response": 40}, "responses": {}, "time": {"iteration": 1.0}}
    record = read_record("run", [metrics(0), metrics(1), metrics(2)], [*audit(0), *audit(1), *audit(2)])
    assert record.talk == Talk(2.5, 0.25, 0.25)
    assert set(record.iterations[0].seconds) == {"iteration"}
    without = read_record("run", [metrics(0), metrics(1, **plain)], [*audit(0), *audit(1)])
    assert without.talk == Talk()
    assert not without.talk.is_needed
