"""The simulator of `megatron-rl plan`: time and work are conserved, and simple runs take their known times."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.plan import large_run
from megatron_rl.analysis.plan.costs import SCHEDULES, BatchingCosts, Costs, ScriptedCosts, Setting, TrainerCosts
from megatron_rl.analysis.plan.engines import SimulatedBatching, SimulatedGroup
from megatron_rl.analysis.plan.lengths import Empirical, Lognormal, Uniform, parse_lengths
from megatron_rl.analysis.plan.pipeline import Pipeline, count_slot, order_steps
from megatron_rl.analysis.plan.pool import Pool
from megatron_rl.analysis.plan.simulate import simulate
from megatron_rl.errors import UsageError
from megatron_rl.sidecar.engines.decoding import StepCosts
from tests.paced_run import Case, run_paced

COSTS = Costs(
    BatchingCosts(0.02, 1e-3, 1e-6, 1e-4, max_running=24, max_in_flight=48),
    TrainerCosts(per_token=2e-3, per_micro_batch=0.05, per_pair=1e-7, update=1.5, exchange=0.001),
    publish=2.0,
    other=0.25,
    reward=0.02,
)
SETTING = Setting(
    "periodic", 24, 4, 4, Uniform(20, 60), Lognormal(150, 0.9, 2000), num_engines=3, num_replicas=2, num_stages=2,
    trainer_devices=4, engine_devices=3,
)  # fmt: skip


def change(**changes):
    return dataclasses.replace(SETTING, **changes)


def trainer(**changes):
    return dataclasses.replace(COSTS, trainer=dataclasses.replace(COSTS.trainer, **changes))


runs = st.builds(
    change,
    num_prompts=st.just(48),
    schedule=st.sampled_from(SCHEDULES),
    num_replicas=st.sampled_from([1, 2, 3]),
    num_stages=st.sampled_from([1, 2, 4]),
    num_engines=st.integers(1, 5),
    num_updates=st.sampled_from([1, 2]),
    micro_batch_size=st.sampled_from([2, 4, 8]),
    group_size=st.sampled_from([2, 4]),
    reward_workers=st.integers(1, 3),
    staleness=st.integers(0, 2),
    is_strict=st.booleans(),
    in_prompt_order=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(runs, st.integers(0, 5))
def test_the_parts_of_both_ledgers_are_not_negative_and_add_up_to_the_iteration(setting, seed):
    for one in simulate(setting, COSTS, 3, seed).iterations:
        for ledger in (one.trainer, one.engines):
            assert sum(ledger.values()) == pytest.approx(one.seconds, abs=1e-6)
            assert min(ledger.values()) >= -1e-6, ledger


@settings(max_examples=40, deadline=None)
@given(runs, st.integers(0, 5))
def test_iterations_follow_each_other_without_a_gap(setting, seed):
    iterations = simulate(setting, COSTS, 3, seed).iterations
    assert all(one.end == after.start for one, after in itertools.pairwise(iterations))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(0, 9))
def test_engines_do_all_the_work_and_no_other_whatever_their_bounds(num_engines, max_running, seed):
    costs = BatchingCosts(0.0, per_sequence=0.5, max_running=max_running, max_in_flight=4 * max_running)
    setting = change(num_engines=num_engines, prompts=Uniform(1, 1))
    result = simulate(setting, dataclasses.replace(COSTS, engine=costs), 2, seed)
    generator = np.random.default_rng(seed)
    for one in result.iterations:
        setting.prompts.draw(generator, 24, 1)
        tokens = sum(map(sum, setting.responses.draw(generator, 24, 4)))
        assert one.engines["busy"] * num_engines == pytest.approx(0.5 * tokens)
        # Shared: a group's prompt of one token is trained on once.
        assert one.tokens == tokens + 24


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["sync", "periodic", "one_step_off"]), st.integers(0, 5), st.floats(1.0, 8.0))
def test_no_iteration_is_longer_with_faster_devices(schedule, seed, factor):
    setting = change(schedule=schedule, num_replicas=1)
    slow = simulate(setting, COSTS, 3, seed).seconds
    engines = dataclasses.replace(COSTS, engine=COSTS.engine.faster(factor))
    ranks = dataclasses.replace(COSTS, trainer=COSTS.trainer.faster(factor))
    assert simulate(setting, engines, 3, seed).seconds <= slow + 1e-6
    assert simulate(setting, ranks, 3, seed).seconds <= slow + 1e-6


def test_a_synchronous_iteration_takes_publish_sampling_training_update_and_the_rest():
    costs = Costs(
        BatchingCosts(0.1, max_running=100, max_in_flight=100), TrainerCosts(per_token=0.01, update=3.0),
        publish=2.0, other=0.5,
    )  # fmt: skip
    setting = Setting("sync", 8, 4, 4, Uniform(20, 20), Uniform(50, 50))
    # All 32 responses run together, for 50 steps; a group has a prompt and four responses.
    sampling, training = 50 * 0.1, 8 * (20 + 4 * 50) * 0.01
    assert simulate(setting, costs, 3).seconds == pytest.approx(2.0 + sampling + training + 3.0 + 0.5)
    colocated = dataclasses.replace(costs, switch=4.0)
    seconds = simulate(dataclasses.replace(setting, schedule="colocated"), colocated, 3).seconds
    assert seconds == pytest.approx(2.0 + sampling + training + 3.0 + 0.5 + 2 * 4.0)


@settings(max_examples=40, deadline=None)
@given(runs, st.integers(0, 5))
def test_a_periodic_iteration_lies_between_its_longer_part_and_a_synchronous_one(setting, seed):
    costs = dataclasses.replace(COSTS, reward=0.0)
    periodic = simulate(dataclasses.replace(setting, schedule="periodic"), costs, 1, seed).iterations[0]
    sync = simulate(dataclasses.replace(setting, schedule="sync"), costs, 1, seed).iterations[0]
    updates = costs.trainer.update * setting.num_updates
    assert periodic.generation == pytest.approx(sync.generation)
    # Engines sample while all updates but the last are made.
    longer = max(periodic.generation + costs.trainer.update, periodic.trainer["busy"] + updates)
    assert periodic.seconds >= longer + costs.publish + costs.other - 1e-6
    # With several replicas slots may go to others than in a synchronous iteration: a few micro-batches' difference.
    slack = 0.25 * sync.trainer["busy"] if setting.num_replicas > 1 or setting.num_updates > 1 else 0.0
    assert periodic.seconds <= sync.seconds + slack + 1e-6


ONE_WAVE = change(
    num_prompts=32, group_size=8, micro_batch_size=8, num_engines=1, num_replicas=1, num_stages=1,
    prompts=Uniform(1, 1), responses=Uniform(100, 100),
)  # fmt: skip
CHOSEN = Costs(
    BatchingCosts(0.005, 1e-3, max_running=256, max_in_flight=512, is_chosen=True), TrainerCosts(per_token=1e-3)
)


def test_a_run_that_chooses_its_responses_in_flight_overlaps_where_all_fit_at_once():
    fixed = dataclasses.replace(CHOSEN, engine=dataclasses.replace(CHOSEN.engine, is_chosen=False))
    all_at_once, chosen = simulate(ONE_WAVE, fixed, 2), simulate(ONE_WAVE, CHOSEN, 2)
    assert all_at_once.opening is None
    assert chosen.opening.num_in_flight < 128
    assert chosen.seconds < 0.65 * all_at_once.seconds
    # The simulated pool opens as the forecast does.
    case = Case(StepCosts(0.005, 1e-3, 256), 32, 8, (100, 100), train_seconds=32 * 801 * 1e-3)
    (one,) = run_paced(case, 1, chosen.opening)
    assert chosen.seconds == pytest.approx(one.seconds, rel=0.01)


def test_a_synchronous_run_chooses_the_number_that_samples_fastest_and_others_choose_none():
    chosen = simulate(dataclasses.replace(ONE_WAVE, schedule="sync"), CHOSEN, 1)
    assert chosen.opening.num_in_flight >= 256
    assert simulate(dataclasses.replace(ONE_WAVE, schedule="async"), CHOSEN, 1).opening is None


def test_bounded_by_nothing_an_asynchronous_run_is_a_periodic_one():
    periodic = simulate(SETTING, COSTS, 4)
    none_ahead = simulate(change(schedule="async", staleness=0), COSTS, 4)
    assert none_ahead.seconds == pytest.approx(periodic.seconds)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3), st.integers(0, 5))
def test_no_group_is_older_by_more_updates_than_a_strict_asynchronous_run_allows(staleness, seed):
    setting = change(schedule="async", staleness=staleness)
    result = simulate(setting, COSTS, 6, seed)
    assert max(one.staleness for one in result.iterations) == staleness
    assert result.seconds <= simulate(change(schedule="periodic"), COSTS, 6, seed).seconds * 1.02


def test_groups_that_no_rank_waits_for_may_be_older_and_the_run_is_faster():
    tail = change(schedule="async", responses=Lognormal(150, 1.6, 8000), num_replicas=1)
    strict, loose = (simulate(dataclasses.replace(tail, is_strict=strict), COSTS, 12) for strict in (True, False))
    assert max(one.staleness for one in loose.iterations) > 1
    assert loose.seconds < strict.seconds


def test_a_balanced_run_is_nearly_twice_as_fast_periodically_and_others_less():
    """Compare with the paper: the gain is the sum of both over the longer one, less the time that cannot overlap."""
    costs = Costs(BatchingCosts(0.01, 1e-4, max_running=64, max_in_flight=64), TrainerCosts(per_token=1e-3))
    # An engine samples 8 groups at a time, and 160 in all: the time that overlaps with nothing is a small part of it.
    setting = Setting("sync", 640, 8, 8, Uniform(50, 50), Uniform(100, 300), num_engines=4)
    base = simulate(setting, costs, 2)
    sampling = sum(one.generation for one in base.iterations) / 2
    balance = base.mean()["busy"] / sampling
    gains = {}
    for load in (0.25, 0.5, 1.0, 2.0, 4.0):
        # `load` is sampling over training.
        loaded = dataclasses.replace(costs, engine=costs.engine.faster(1 / (balance * load)))
        sync, periodic = (
            simulate(dataclasses.replace(setting, schedule=name), loaded, 2).seconds for name in ("sync", "periodic")
        )
        gains[load] = sync / periodic
        assert gains[load] <= (1 + load) / max(1, load) + 1e-6
    assert gains[1.0] > 1.8
    assert max(gains.values()) == gains[1.0]
    assert gains[0.25] < gains[0.5] < gains[1.0] > gains[2.0] > gains[4.0] > 1.1


LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=4)


class StepByStep:
    """The naive twin of `SimulatedBatching`: one token a step."""

    def __init__(self, costs):
        self.costs = costs

    def run(self, groups):
        """Return the end of each group, if all have arrived at the start."""
        waiting = [(group, place) for group in groups for place in range(len(group.lengths))]
        running, now, ends = [], 0.0, {}
        while waiting or running:
            while waiting and len(running) < self.costs.max_running:
                group, place = waiting.pop(0)
                now += (place == 0) * (self.costs.per_prompt + group.prompt * self.costs.per_prompt_token)
                running.append([group, 0, group.lengths[place]])
            context = sum(group.prompt + done for group, done, _ in running)
            now += self.costs.step + len(running) * self.costs.per_sequence + context * self.costs.per_context
            for one in running:
                one[1] += 1
            for one in [one for one in running if one[1] == one[2]]:
                running.remove(one)
                if all(other[0] is not one[0] for other in [*running, *waiting]):
                    ends[one[0].index] = now
        return ends


@settings(max_examples=100, deadline=None)
@example([(1, [53]), (1, [1, 1, 1, 50]), (1, [1])], 2, 0.0)
@given(
    st.lists(st.tuples(st.integers(1, 50), LENGTHS), min_size=1, max_size=8),
    st.integers(1, 9),
    st.sampled_from([0.0, 1e-4]),
)  # fmt: skip
@example([(1, [1, 1, 1]), (1, [1])], 3, 0.0)
def test_closed_form_and_token_by_token_give_the_same_times(drawn, max_running, per_context):
    costs = BatchingCosts(0.1, 0.01, per_context, 0.002, 0.01, max_running=max_running, max_in_flight=1000)
    groups = [SimulatedGroup(index, 0, prompt, lengths) for index, (prompt, lengths) in enumerate(drawn)]
    pool = Pool([SimulatedBatching(costs)], costs.max_in_flight, 0.0, 1)
    pool.submit(groups, 0.0)
    pool.take(len(groups))
    naive = StepByStep(costs).run([dataclasses.replace(group) for group in groups])
    for group in groups:
        # In closed form context grows evenly, not by steps.
        assert group.sampled == pytest.approx(naive[group.index], rel=0.03 if per_context else 1e-9)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.01, 30.0), max_size=12), st.integers(0, 9))
def test_looking_at_an_engine_changes_nothing(times, seed):
    def run(looked):
        generator = np.random.default_rng(seed)
        engine = SimulatedBatching(BatchingCosts(0.1, 0.01, 1e-5, 0.002, max_running=6, max_in_flight=40))
        for index, lengths in enumerate(generator.integers(1, 80, (5, 4)).tolist()):
            engine.begin(SimulatedGroup(index, 0, 10, lengths), 0.0)
        ends = []
        for now in [*sorted(looked), math.inf]:
            while engine.peek() <= now and engine.peek() < math.inf:
                ends.append(engine.peek())
                engine.take()
            if now < math.inf:
                engine.settle(now)
        return ends

    assert run(times) == pytest.approx(run([]))


def test_a_prompt_is_prefilled_once_for_all_responses_of_its_group():
    costs = BatchingCosts(0.0, per_prompt_token=1.0, max_running=100, max_in_flight=1000)
    for size in (1, 8):
        pool = Pool([SimulatedBatching(costs)], costs.max_in_flight, 0.0, 1)
        pool.submit([SimulatedGroup(0, 0, 30, [5] * size)], 0.0)
        assert pool.take(1)[0].sampled == 30


def test_a_pause_delays_sampling_and_does_not_count_as_work():
    engine = SimulatedBatching(BatchingCosts(1.0, max_running=4, max_in_flight=4))
    engine.begin(SimulatedGroup(0, 0, 1, [10]), 0.0)
    engine.pause(4.0, 3.0)
    assert engine.peek() == pytest.approx(13.0)
    engine.take()
    assert engine.busy == pytest.approx(10.0)


def test_groups_go_to_the_emptiest_engine_and_wait_where_all_are_full():
    engines = [SimulatedBatching(BatchingCosts(1.0, max_running=8, max_in_flight=8)) for _ in range(2)]
    pool = Pool(engines, 8, 0.0, 1)
    groups = [SimulatedGroup(index, 0, 1, [length] * 4) for index, length in enumerate([10, 30, 30, 30, 5])]
    pool.submit(groups, 0.0)
    assert [group.begun for group in groups[:4]] == [0.0] * 4
    assert math.isnan(groups[4].begun)
    assert [group.index for group in pool.take(5)][:2] == [0, 4]
    assert groups[4].begun == 10.0


def test_a_group_that_is_larger_than_the_bound_has_an_engine_to_itself():
    pool = Pool([SimulatedBatching(BatchingCosts(1.0, max_running=8, max_in_flight=2))], 2, 0.0, 1)
    groups = [SimulatedGroup(index, 0, 1, [10] * 4) for index in range(2)]
    pool.submit(groups, 0.0)
    pool.take(2)
    assert [group.begun for group in groups] == [0.0, 10.0]


def test_rewards_wait_for_a_worker():
    pool = Pool([SimulatedBatching(BatchingCosts(1.0, max_running=9, max_in_flight=9))], 9, 5.0, 2)
    pool.submit([SimulatedGroup(index, 0, 1, [10]) for index in range(4)], 0.0)
    assert [group.finished for group in pool.take(4)] == [15.0, 15.0, 20.0, 20.0]


def test_a_scripted_engine_shares_its_speed_as_it_was_when_a_group_began():
    costs = dataclasses.replace(COSTS, engine=ScriptedCosts(100.0, (1.0, 1.0), max_in_flight=8), reward=0.0)
    setting = change(num_prompts=2, num_engines=1, num_replicas=1, responses=Uniform(25, 25))
    # 100 tokens each: the first has the engine for itself as it begins, the second shares it.
    assert simulate(setting, costs, 1).iterations[0].generation == pytest.approx(1.0 + 2.0)


def drain(pipeline, arrivals, seconds):
    for arrival in arrivals:
        pipeline.give(arrival, seconds)
    return pipeline


@pytest.mark.parametrize(
    ("stages", "virtual", "slots"), [(1, 1, 5), (2, 1, 8), (4, 1, 8), (4, 1, 3), (2, 2, 8), (4, 3, 8)]
)
def test_a_schedule_takes_its_micro_batches_and_its_bubble(stages, virtual, slots):
    pipeline = drain(Pipeline(TrainerCosts(per_token=1.0), stages, virtual, slots, 0.0), [0.0] * slots, 6.0)
    # Of a micro-batch in a stage: a third forward, two thirds backward.
    of_stage = 6.0 / stages
    assert pipeline.end == pytest.approx(slots * of_stage + (stages - 1) * of_stage / virtual)
    for spent in pipeline.spent(0.0):
        assert spent.busy == pytest.approx(slots * of_stage)
        assert spent.bubble == pytest.approx((stages - 1) * of_stage / virtual)
        assert spent.first == spent.starved == spent.tail == 0


@pytest.mark.parametrize(("stages", "virtual"), [(1, 1), (3, 1), (2, 2), (4, 2)])
def test_every_stage_does_each_chunk_of_each_micro_batch_forward_before_backward(stages, virtual):
    for stage in range(stages):
        steps = order_steps(stages, virtual, 4 * stages, stage)
        wanted = {(chunk, number) for chunk in range(virtual) for number in range(4 * stages)}
        for is_forward in (True, False):
            assert {(chunk, number) for forward, chunk, number in steps if forward == is_forward} == wanted
        assert len(steps) == 2 * len(wanted)
        assert all(steps.index((True, *one)) < steps.index((False, *one)) for one in wanted)


def test_a_stage_waits_for_slots_and_says_so():
    pipeline = drain(Pipeline(TrainerCosts(per_token=1.0), 1, 1, 3, 10.0), [12.0, 13.0, 30.0], 6.0)
    assert pipeline.end == 36.0
    (spent,) = pipeline.spent(dry=26.0)
    # The second slot arrives in time, the third at 30: until 26 groups queue for engines, then they run dry.
    assert (spent.busy, spent.first, spent.starved, spent.tail, spent.bubble) == (18.0, 2.0, 2.0, 4.0, 0.0)


def test_frozen_models_and_the_output_layer_take_their_time():
    plain, frozen = (
        drain(Pipeline(TrainerCosts(1.0, num_frozen=number), 1, 1, 2, 0.0), [0, 0], 6.0).end for number in (0, 2)
    )
    assert (plain, frozen) == (12.0, 2 * (3 * 2.0 + 4.0))
    uneven = drain(Pipeline(TrainerCosts(1.0, output_share=0.5), 2, 1, 1, 0.0), [0], 12.0)
    assert [spent.busy for spent in uneven.spent(0.0)] == [3.0, 9.0]


def test_a_shared_prompt_is_counted_once():
    groups = [(10, [5, 7])]
    assert count_slot(groups, is_shared=True) == (22, 55 + 5 * 13 + 7 * 14)
    assert count_slot(groups, is_shared=False) == (32, 2 * 55 + 5 * 13 + 7 * 14)


def test_parts_of_a_group_make_as_many_tokens_as_the_group_and_more_prompts():
    whole = simulate(change(num_replicas=1), COSTS, 2)
    parts = simulate(change(num_replicas=1, micro_batch_size=2), COSTS, 2)
    prompts = SETTING.prompts.draw(np.random.default_rng(0), 24, 1)
    assert parts.iterations[0].tokens - whole.iterations[0].tokens == sum(map(sum, prompts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 3}, "--micro-batch-size 3 must be a multiple or a divisor of --grpo-group-size 4"),
        ({"num_replicas": 5}, "--grpo-prompts-per-step 24 must be a multiple of 5, for 5 replicas"),
        ({"num_updates": 7}, "--grpo-prompts-per-step 24 must be a multiple of the 7 updates"),
        ({"num_virtual": 2, "num_stages": 1}, "2 virtual stages need at least 2 stages"),
    ],
)
def test_a_run_that_does_not_divide_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        simulate(change(**changes), COSTS, 1)


def test_the_simulation_of_4096_devices_takes_time_by_responses_and_not_by_tokens():
    """Simulate 100 iterations in under a minute: a response is one event, a group one, a micro-batch one."""
    setting, costs = large_run()
    assert setting.num_devices == 4096
    num_responses = setting.num_prompts * setting.group_size
    short = simulate(setting, costs, 1).num_events
    longer = dataclasses.replace(setting, responses=Lognormal(9000, 1.0, 100_000, 0.3))
    assert short <= num_responses + 3 * setting.num_prompts + setting.num_engines
    assert simulate(longer, costs, 1).num_events == short


@pytest.mark.parametrize("of_group", [0.0, 0.6])
def test_lognormal_lengths_have_the_mean_that_they_say_and_a_tail_up_to_the_bound(of_group):
    lengths = Lognormal(400, 1.0, 3000, of_group)
    drawn = np.array(lengths.draw(np.random.default_rng(0), 4000, 8))
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.03)
    assert drawn.max() == 3000
    assert np.median(drawn) < 0.7 * drawn.mean()
    # The common part of a group's responses shows in the spread of the groups' means.
    spread = np.log(drawn).mean(axis=1).var() / np.log(drawn).var()
    assert spread == pytest.approx(of_group + (1 - of_group) / 8, abs=0.05)


def test_lengths_that_were_seen_are_drawn_group_by_group():
    seen = Empirical([[1, 2, 3], [100, 200, 300]])
    assert (seen.mean, seen.most) == (101, 300)
    for group in seen.draw(np.random.default_rng(0), 50, 3):
        assert group in ([1, 2, 3], [100, 200, 300])
    for group in seen.draw(np.random.default_rng(0), 50, 5):
        assert max(group) <= 3 or min(group) >= 100


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("fixed:30", Uniform(30, 30)),
        ("uniform:3:9", Uniform(3, 9)),
        ("lognormal:500:0.8", Lognormal(500, 0.8)),
        ("lognormal:500:0.8:4096", Lognormal(500, 0.8, 4096)),
    ],
)
def test_lengths_are_read_as_they_are_written(text, lengths):
    assert parse_lengths(text, "--response-length") == lengths


@pytest.mark.parametrize(
    "text", ["30", "fixed:x", "uniform:9:3", "lognormal:5", "fixed:0", "lognormal:5:inf", "fixed:nan"]
)
def test_other_lengths_are_refused_with_the_flag(text):
    with pytest.raises(UsageError, match="--response-length"):
        parse_lengths(text, "--response-length")
