"""Groups without a signal: the groups that are trained on then, their places, and when those are known."""

import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.shared.protocol.selection import SelectionBySignal, has_signal
from megatron_rl.shared.protocol.slots import Claim, Place, divide
from megatron_rl.shared.protocol.wire import Plan, Slot, Submission, decode
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_log import FILE_NAME, AuditLog
from megatron_rl.sidecar.iteration import GroupState, Iteration, NotAllClaimed
from tests.submissions import make_group, make_plan, make_submission, plans, record_begin, with_response

at_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def filtered(draw: st.DrawFn, most_spare: int = 12) -> tuple[Plan, list[bool], list[int]]:
    """Draw a plan with spare prompts, the prompts that have a signal, and an order in which they finish."""
    plan = msgspec.structs.replace(draw(plans()), num_spare=draw(st.integers(1, most_spare)))
    count = plan.num_prompts + plan.num_spare
    share = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    drawn = random.Random(draw(st.integers(0, 1 << 30)))
    return plan, [drawn.random() < share for _ in range(count)], drawn.sample(range(count), count)


def numbers_of(plan: Plan, signals: list[bool]) -> dict[int, int]:
    """Return the naive twin's numbers of prompts, if all signals are known."""
    ordered = sorted(range(len(signals)), key=lambda prompt: (not signals[prompt], prompt))
    return {prompt: number for number, prompt in enumerate(ordered[: plan.num_prompts])}


def pool_of(plan: Plan, number: int) -> int | Place:
    division = divide(plan)
    return division.bound_unit(number) if plan.order == "prompt" else division.update_of_number(number)


def trained(iteration: Iteration) -> dict[Place, list[int]]:
    plan, slots = iteration.submission.plan, iteration.division.slots_per_replica
    answers = {Place(*at): iteration.claim(*at) for at in itertools.product(range(plan.num_replicas), range(slots))}
    return {
        place: [part.prompt_index for part in decode(answer, Slot).parts]
        for place, answer in answers.items()
        if answer is not None
    }


def play(iteration: Iteration, signals: list[bool], drawn: random.Random, at_once: int = 5) -> list[int]:
    """Sample as an engine would that answers in any order; return the prompts that were called off."""
    running: list[int] = []
    called_off: list[int] = []
    while True:
        while len(running) < at_once and (prompt := iteration.next_prompt()) is not None:
            running.append(prompt.index)
        unwanted = [prompt for prompt in running if not iteration.is_wanted(prompt)]
        called_off += unwanted
        running = [prompt for prompt in running if prompt not in unwanted]
        if not running:
            return called_off
        prompt = running.pop(drawn.randrange(len(running)))
        iteration.finished(make_group(iteration.submission, prompt, has_signal=signals[prompt]))
        if drawn.random() < 0.5:
            trained(iteration)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(filtered(most_spare=4))
def test_a_known_place_holds_whatever_the_other_signals_turn_out_to_be(drawn) -> None:
    plan, signals, order = drawn
    if len(signals) > 12:
        plan = msgspec.structs.replace(make_plan(num_prompts=4, num_updates=2, order=plan.order), num_spare=3)
        signals, order = signals[:7], [prompt for prompt in order if prompt < 7]
    selection = SelectionBySignal(divide(plan))
    is_known = [False] * len(signals)
    for prompt in [None, *order]:
        if prompt is not None:
            selection.learn(prompt, signals[prompt])
            is_known[prompt] = True
        open_ones = [one for one, known in enumerate(is_known) if not known]
        found: list[dict[int, int]] = []
        for choice in itertools.product([False, True], repeat=len(open_ones)):
            possible = list(signals)
            for one, has in zip(open_ones, choice, strict=True):
                possible[one] = has
            found.append(numbers_of(plan, possible))
        for one in range(len(signals)):
            pools = {pool_of(plan, numbers[one]) if one in numbers else None for numbers in found}
            if is_known[one]:
                assert selection.find_binding(one) == (pools.pop() if len(pools) == 1 else None), (one, is_known)
            else:
                assert selection.is_wanted(one) == any(one in numbers for numbers in found)


@at_any_speed
@given(filtered(), st.integers(0, 1 << 30))
def test_the_first_groups_with_a_signal_are_trained_on_however_they_finish(drawn, seed) -> None:
    plan, signals, _ = drawn
    iteration = Iteration(make_submission(plan))
    called_off = play(iteration, signals, random.Random(seed))
    numbers = numbers_of(plan, _with_one_response(plan, signals))
    slots = trained(iteration)
    assert sorted({prompt for prompts in slots.values() for prompt in prompts}) == sorted(numbers)
    assert iteration.is_claimed
    iteration.complete()
    assert iteration.counts()[GroupState.CLAIMED] == plan.num_prompts
    assert set(called_off).isdisjoint(numbers)
    for place, prompts in slots.items():
        division = iteration.division
        unit = division.unit(*place)
        if plan.order == "prompt":
            assert [numbers[prompt] for prompt in prompts] == list(division.bound_numbers(unit))
        else:
            update = division.update_of_slot(place.slot)
            assert {division.update_of_number(numbers[prompt]) for prompt in prompts} == {update}
    signals = _with_one_response(plan, signals)
    census = iteration.census()
    ends = [end for end in range(1, len(signals) + 1) if sum(signals[:end]) >= plan.num_prompts]
    assert census.num_considered == (ends[0] if ends else len(signals))
    assert census.num_without_signal == signals[: census.num_considered].count(False)
    mean = sum((plan.group_size - 1) / 2 if has else 1.0 for has in signals[: census.num_considered])
    if plan.group_size > 1:
        assert census.reward == pytest.approx(mean / census.num_considered)


def _with_one_response(plan: Plan, signals: list[bool]) -> list[bool]:
    """Return the signals, or none for groups of one response, which never differs from the others."""
    return signals if plan.group_size > 1 else [False] * len(signals)


@at_any_speed
@given(filtered(), st.integers(0, 1 << 30), st.integers(0, 60))
def test_an_iteration_that_is_restored_at_any_moment_hands_out_what_it_would_have(drawn, seed, moment) -> None:
    plan, signals, _ = drawn
    groups, claims, events = [], [], []
    whole = Iteration(
        make_submission(plan),
        lambda group: (groups.append(group), events.append((len(groups), len(claims)))),
        lambda claim: (claims.append(claim), events.append((len(groups), len(claims)))),
    )
    play(whole, signals, random.Random(seed))
    expected = trained(whole)
    num_groups, num_claims = ([(0, 0), *events])[min(moment, len(events))]
    again = Iteration(make_submission(plan))
    again.restore(groups[:num_groups], claims[:num_claims])
    play(again, signals, random.Random(seed + 1))
    slots = trained(again)
    for claim in claims[:num_claims]:
        assert slots[claim.place] == expected[claim.place] == claim.prompts
    assert {p for prompts in slots.values() for p in prompts} == {p for prompts in expected.values() for p in prompts}
    if plan.order == "prompt":
        assert slots == expected
    assert again.census() == whole.census()


@at_any_speed
@given(filtered(), st.integers(0, 1 << 30))
def test_the_audit_finds_no_breach_in_it_and_finds_a_group_that_was_not_due(tmp_path_factory, drawn, seed) -> None:
    plan, signals, _ = drawn
    folder = tmp_path_factory.mktemp("run")
    write_log(folder / "honest.jsonl", make_submission(plan), signals, seed)
    report = verify(folder / "honest.jsonl")
    assert report.breaches == []
    assert [summary.outcome for summary in report.iterations] == ["complete"]

    signals = _with_one_response(plan, signals)
    numbers = numbers_of(plan, signals)
    claims, groups = write_log(folder / "again.jsonl", make_submission(plan), signals, seed)
    others = [prompt for prompt in groups if prompt not in numbers]
    if not others:
        return
    changed = [*claims[:-1], msgspec.structs.replace(claims[-1], prompts=[others[0], *claims[-1].prompts[1:]])]
    write_log(folder / "forged.jsonl", make_submission(plan), signals, seed, changed)
    assert {str(breach.name) for breach in verify(folder / "forged.jsonl").breaches} == {
        "wrong slot", "group never claimed",
    }  # fmt: skip


def write_log(
    path: Path, submission: Submission, signals: list[bool], seed: int, claims: list[Claim] | None = None
) -> tuple[list[Claim], list[int]]:
    """Write a log as the service does; with `claims`, these in place of those that were made."""
    version, plan, made, finished = submission.version, submission.plan, [], []
    with AuditLog(path, "run") as log:
        record_begin(log, submission)

        def claim(one: Claim) -> None:
            made.append(one)
            log.record_claim(version, one if claims is None else claims[len(made) - 1])

        iteration = Iteration(
            submission, lambda group: (finished.append(group.prompt.index), log.record_group(version, group)), claim
        )
        play(iteration, signals, random.Random(seed))
        trained(iteration)
        log.record_completion(version, plan.num_prompts, plan.num_prompts * plan.group_size)
    return made, finished


def test_prompts_are_sampled_ahead_as_far_as_the_last_iteration_needed() -> None:
    plan = make_plan(num_prompts=4, num_replicas=1, num_spare=12)
    for before, count in [((0, 0), 4), ((5, 10), 8), ((3, 4), 16), ((4, 4), 16)]:
        iteration = Iteration(make_submission(plan), before=before)
        prompts = [iteration.next_prompt() for _ in range(count)]
        assert [prompt.index for prompt in prompts if prompt is not None] == list(range(count))
        assert iteration.next_prompt() is None


def test_missing_groups_are_counted_without_those_sampled_ahead() -> None:
    iteration = Iteration(make_submission(make_plan(num_spare=8)), before=(4, 8))
    for _ in range(16):
        iteration.next_prompt()
    iteration.finished(make_group(iteration.submission, 0, has_signal=False))
    iteration.finished(make_group(iteration.submission, 1))
    iteration.finished(make_group(iteration.submission, 12))
    assert iteration.missing() == (
        "7 of 8 groups are not finished (prompts 2, 3, 4, 5, 6, 7, 8), 1 had no signal, 1 finished ones are not claimed"
    )
    with pytest.raises(NotAllClaimed, match="7 of 8 groups"):
        iteration.complete()


def rewarded(rewards: list[float], **components: list[float | None]) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(reward=reward, components={name: values[place] for name, values in components.items()})
        for place, reward in enumerate(rewards)
    ]


def test_the_rewards_that_the_plan_names_decide_whether_a_group_has_a_signal() -> None:
    all_wrong = rewarded([0.0, -0.5], right=[0.0, 0.0], length=[0.0, -0.5])
    of_equal_sums = rewarded([1.0, 1.0], right=[1.0, 0.0], length=[0.0, 1.0])
    cases = (
        ([], True, False),
        (["right"], False, True),
        (["length"], True, True),
        (["right", "length"], True, True),
    )
    for names, *expected in cases:
        plan = make_plan(num_spare=1, deciding_rewards=names)
        assert [has_signal(group, plan) for group in (all_wrong, of_equal_sums)] == expected, names


def test_a_function_decides_by_the_responses_that_it_applies_to() -> None:
    plan = make_plan(num_spare=1, deciding_rewards=["right"])
    assert not has_signal(rewarded([0.0] * 3, right=[None, 1.0, 1.0]), plan)
    assert not has_signal(rewarded([0.0, 1.0], right=[None, None]), plan)
    assert has_signal(rewarded([0.0] * 3, right=[None, 1.0, 0.0]), plan)


def test_groups_are_chosen_by_the_named_reward_in_the_iteration_and_in_its_audit(tmp_path) -> None:
    """Make every sum differ; in each third group the named reward does not."""
    plan = make_plan(num_prompts=4, num_replicas=1, num_spare=4, deciding_rewards=["exact"])
    submission = make_submission(plan)
    log = AuditLog(tmp_path / FILE_NAME, submission.run)
    record_begin(log, submission)
    iteration = Iteration(
        submission,
        lambda group: log.record_group(submission.version, group),
        lambda claim: log.record_claim(submission.version, claim),
    )
    for prompt in range(6):
        group = make_group(submission, prompt)
        if prompt % 3 == 0:
            for number in range(plan.group_size):
                group = with_response(group, number, components={"exact": 1.0, "other": float(number)})
        iteration.finished(group)
    for index in range(4):
        iteration.claim(0, index)
    iteration.complete()
    log.record_completion(submission.version, 4, 16)
    log.close()
    assert sorted(prompt for claim in iteration.claims for prompt in claim.prompts) == [1, 2, 4, 5]
    assert iteration.census().num_without_signal == 2
    assert not verify(tmp_path / FILE_NAME).breaches


def test_rewards_count_within_their_bounds() -> None:
    plan = make_plan(num_spare=1, least_reward=-1.0, largest_reward=1.0)
    assert not has_signal(rewarded([2.0, 1.0, 7.0]), plan)
    assert not has_signal(rewarded([-2.0, -1.0]), plan)
    assert has_signal(rewarded([2.0, 0.5]), plan)
    assert has_signal(rewarded([2.0, 1.0]), make_plan())
