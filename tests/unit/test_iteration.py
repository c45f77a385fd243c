"""One iteration: each group is claimed by the right unit, in the right order, exactly once."""

import collections
import contextlib
import sys
import types
from collections.abc import Callable, Iterator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.provenance import GroupRefused, check_group, check_rewards
from megatron_rl.shared.protocol.slots import Claim, Division, Place, divide
from megatron_rl.shared.protocol.wire import (
    Group,
    Plan,
    Sampling,
    Slot,
    VersionSpan,
    decode,
    encode,
    encode_log_probs,
    encode_tokens,
)
from megatron_rl.shared.records.journal import Journal
from megatron_rl.sidecar.iteration import (
    ClaimConflict,
    GroupFinishedTwice,
    GroupState,
    Iteration,
    IterationFailed,
    NoSuchSlot,
    NotAllClaimed,
    WrongVersion,
    _part,
)
from tests.submissions import make_group, make_plan, make_submission, plans, with_response

# An example's speed shows how busy the machine is, and nothing of the code.
at_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
# An event of an iteration: a group finishes, or a slot is asked for.
Event = tuple[str, int | Place]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Plan, list[Event]]:
    """Draw a plan and its events in some order, each request at least once and some of them again."""
    plan = draw(plans())
    requests: list[Event] = [("ask", place) for place in all_places(plan)]
    finishes: list[Event] = [("finish", prompt) for prompt in range(plan.num_prompts)]
    again = draw(st.lists(st.sampled_from(requests), max_size=6))
    return plan, draw(st.permutations(requests + again + finishes))


def all_places(plan: Plan) -> list[Place]:
    slots = divide(plan).slots_per_replica
    return [Place(replica, index) for replica in range(plan.num_replicas) for index in range(slots)]


def play(iteration: Iteration, event: Event) -> bytes | None:
    kind, what = event
    if kind == "finish":
        iteration.finished(make_group(iteration.submission, what))
        return None
    return iteration.claim(*what)


def answers_of(iteration: Iteration) -> dict[Place, bytes]:
    answers = {place: iteration.claim(*place) for place in all_places(iteration.submission.plan)}
    assert None not in answers.values()
    return answers


def prompts_of(answer: bytes) -> list[int]:
    return [part.prompt_index for part in decode(answer, Slot).parts]


def expected_claims(plan: Plan, events: list[Event]) -> dict[Place, list[int]]:
    """Return the claims of the naive twin: after each event, it searches all units for the first that can be served."""
    division = divide(plan)
    asked: list[Place] = []
    finished: list[int] = []
    claims: dict[Place, list[int]] = {}
    for kind, what in events:
        if kind == "finish":
            finished.append(what)
        elif (unit := division.unit(*what)) not in asked:
            asked.append(unit)
        for unit in asked:
            if unit in claims:
                continue
            fitting = fitting_groups(division, unit, finished)
            if len(fitting) >= division.groups_per_unit:
                claims[unit] = fitting[: division.groups_per_unit]
                finished = [prompt for prompt in finished if prompt not in claims[unit]]
    return claims


def fitting_groups(division: Division, unit: Place, finished: list[int]) -> list[int]:
    """Return the groups that a unit may take, of those that finished and are not claimed."""
    if division.plan.order == "prompt":
        return [prompt for prompt in division.bound_numbers(unit) if prompt in finished]
    update = unit.slot // division.slots_per_update
    return [prompt for prompt in finished if prompt // division.prompts_per_update == update]


@at_any_speed
@given(plans())
def test_every_replica_has_the_slots_that_the_sizes_give_and_updates_share_them(plan: Plan) -> None:
    division = divide(plan)
    assert division.slots_per_replica * plan.num_replicas * plan.micro_batch_size == plan.num_prompts * plan.group_size
    assert division.num_units * division.groups_per_unit == plan.num_prompts
    assert {division.update_of_slot(index) for index in range(division.slots_per_replica)} == set(
        range(plan.num_updates)
    )


@at_any_speed
@given(plans())
def test_every_prompt_is_bound_to_one_unit_of_its_update(plan: Plan) -> None:
    division = divide(plan)
    units = {division.unit(*place) for place in all_places(plan)}
    assert sorted(prompt for unit in units for prompt in division.bound_numbers(unit)) == list(range(plan.num_prompts))
    for unit in units:
        for prompt in division.bound_numbers(unit):
            assert division.bound_unit(prompt) == unit
            assert division.update_of_number(prompt) == division.update_of_slot(unit.slot)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"micro_batch_size": 6}, "--micro-batch-size 6 is neither a multiple nor a divisor of --grpo-group-size 4"),
        ({"num_updates": 3}, "--grpo-prompts-per-step 8 does not divide into 3 updates: set --global-batch-size to 32"),
        ({"num_replicas": 3}, "make --grpo-prompts-per-step a multiple of 3"),
        ({"micro_batch_size": 32}, "or --micro-batch-size smaller"),
        ({"group_size": 0}, "group_size of the plan must be at least 1, not 0"),
    ],
)
def test_a_plan_that_does_not_divide_evenly_is_refused_with_the_flag_to_change(changes, remedy) -> None:
    with pytest.raises(InputError) as caught:
        Iteration(make_submission(make_plan(**changes)))
    assert remedy in str(caught.value)


def test_prompts_that_are_not_those_of_the_plan_are_refused() -> None:
    submission = make_submission()
    for prompts in (submission.prompts[:-1], submission.prompts[::-1], [submission.prompts[0]] * 8):
        with pytest.raises(InputError, match="indices 0 to 7"):
            Iteration(msgspec.structs.replace(submission, prompts=prompts))


@at_any_speed
@given(histories())
def test_claims_equal_those_of_the_naive_twin_after_every_event(history) -> None:
    plan, events = history
    iteration = Iteration(make_submission(plan))
    for number, event in enumerate(events):
        play(iteration, event)
        claims = {claim.place: claim.prompts for claim in iteration.claims}
        assert claims == expected_claims(plan, events[: number + 1])


@at_any_speed
@given(histories())
def test_every_group_is_claimed_exactly_once_with_all_its_responses_in_order(history) -> None:
    plan, events = history
    iteration = Iteration(make_submission(plan))
    for event in events:
        play(iteration, event)
    assert iteration.is_claimed
    found: dict[int, list] = {}
    for place in sorted(all_places(plan)):
        slot = decode(iteration.claim(*place), Slot)
        assert (slot.replica, slot.index) == place
        assert sum(len(part.responses) for part in slot.parts) == plan.micro_batch_size
        for part in slot.parts:
            responses = found.setdefault(part.prompt_index, [])
            assert part.first_response == len(responses)
            assert part.rewards == [float(j) for j in range(plan.group_size)]
            responses += part.responses
    expected = [make_group(iteration.submission, prompt).responses for prompt in range(plan.num_prompts)]
    assert [found[prompt] for prompt in sorted(found)] == expected


@at_any_speed
@given(histories())
def test_a_slot_asked_for_twice_gives_the_same_bytes(history) -> None:
    plan, events = history
    iteration = Iteration(make_submission(plan))
    first: dict[Place, bytes] = {}
    for event in events:
        play(iteration, event)
        for place in all_places(plan):
            if iteration.division.unit(*place) in {claim.place for claim in iteration.claims}:
                answer = iteration.claim(*place)
                assert answer == first.setdefault(place, answer)
    iteration.complete()
    assert answers_of(iteration) == first


@at_any_speed
@given(histories())
def test_no_slot_waits_while_groups_for_it_are_finished_and_served_slots_are_returned(history) -> None:
    plan, events = history
    iteration = Iteration(make_submission(plan))
    division = iteration.division
    finished: list[int] = []

    def could_be_served(unit: Place) -> bool:
        claimed = {prompt for claim in iteration.claims for prompt in claim.prompts}
        unclaimed = [prompt for prompt in finished if prompt not in claimed]
        return len(fitting_groups(division, unit, unclaimed)) >= division.groups_per_unit

    for kind, what in events:
        waiting = set(iteration.asked())
        if kind == "finish":
            finished.append(what)
            served = iteration.finished(make_group(iteration.submission, what))
            assert set(served) == {s for unit in waiting - set(iteration.asked()) for s in division.slots(unit)}
        else:
            unit = division.unit(*what)
            is_expected = unit in {claim.place for claim in iteration.claims} or could_be_served(unit)
            assert is_expected == (iteration.claim(*what) is not None)
        assert not any(map(could_be_served, iteration.asked()))


@at_any_speed
@given(histories())
def test_a_slot_of_an_update_holds_groups_of_this_update_only(history) -> None:
    plan, events = history
    iteration = Iteration(make_submission(plan))
    for event in events:
        play(iteration, event)
    for place, answer in answers_of(iteration).items():
        update = place.slot // iteration.division.slots_per_update
        assert {prompt * plan.num_updates // plan.num_prompts for prompt in prompts_of(answer)} == {update}


@at_any_speed
@given(histories(), st.randoms())
def test_in_prompt_order_the_slots_do_not_depend_on_the_order_of_events(history, random) -> None:
    plan, events = history
    submission = make_submission(msgspec.structs.replace(plan, order="prompt"))
    answers = []
    for _ in range(2):
        iteration = Iteration(submission)
        for event in events:
            play(iteration, event)
        answers.append(answers_of(iteration))
        random.shuffle(events)
    assert answers[0] == answers[1]


@at_any_speed
@given(histories(), st.data())
def test_an_iteration_restored_from_what_was_recorded_answers_the_same_bytes(history, data) -> None:
    plan, events = history
    submission, groups, claims = make_submission(plan), [], []
    iteration = Iteration(submission, groups.append, claims.append)
    cut = data.draw(st.integers(0, len(events)))
    for event in events[:cut]:
        play(iteration, event)
    before = {place: iteration.claim(*place) for claim in claims for place in iteration.division.slots(claim.place)}
    recorded: list = []
    restored = Iteration(submission, recorded.append, recorded.append)
    restored.restore(list(groups), list(claims))
    assert not recorded
    assert {place: restored.claim(*place) for place in before} == before
    assert restored.counts()[GroupState.CLAIMED] == iteration.counts()[GroupState.CLAIMED]
    missing = set(range(plan.num_prompts)) - {group.prompt.index for group in groups}
    assert [restored.next_prompt().index for _ in missing] == sorted(missing)
    assert restored.next_prompt() is None


def test_a_claim_that_contradicts_what_was_restored_is_named() -> None:
    submission = make_submission()
    groups = [make_group(submission, prompt) for prompt in range(4)]
    first = Claim(replica=0, index=0, prompts=[1])
    for claims, message in [
        ([first, first], r"slot \(0, 0\) is claimed twice"),
        ([first, Claim(replica=1, index=0, prompts=[1])], "prompt 1, which is claimed"),
        ([Claim(replica=0, index=0, prompts=[5])], "prompt 5, which is waiting"),
        ([Claim(replica=0, index=4, prompts=[1])], "not among the 4 slots"),
        ([Claim(replica=0, index=0, prompts=[1, 2])], "takes 2 groups, and 1 belong in it"),
        ([Claim(replica=0, index=0, prompts=[8])], "prompt 8, which is not among the 8 of the iteration"),
    ]:
        with pytest.raises(ClaimConflict, match=message):
            Iteration(submission).restore(groups, claims)
    submission = make_submission(make_plan(micro_batch_size=2))
    with pytest.raises(ClaimConflict, match="is not the first of its group's 2 slots"):
        Iteration(submission).restore([make_group(submission, 1)], [Claim(replica=0, index=1, prompts=[1])])
    submission = make_submission(make_plan(micro_batch_size=8))
    with pytest.raises(ClaimConflict, match="takes the group of prompt 1 more than once"):
        Iteration(submission).restore([make_group(submission, 1)], [Claim(replica=0, index=0, prompts=[1, 1])])
    submission = make_submission(make_plan(order="prompt"))
    with pytest.raises(ClaimConflict, match=r"takes prompts \[1\], and \[0\] are bound to it"):
        Iteration(submission).restore([make_group(submission, 1)], [first])


def test_a_request_for_another_slot_or_version_than_there_is_is_an_error() -> None:
    iteration = Iteration(make_submission())
    for replica, index in [(2, 0), (0, 4), (-1, 0), (0, -1)]:
        with pytest.raises(NoSuchSlot, match="4 slots for each of 2 replicas"):
            iteration.claim(replica, index)
    with pytest.raises(WrongVersion, match="of version 4 was asked for, and the iteration has version 3"):
        iteration.claim(0, 0, version=4)
    assert iteration.asked() == []
    assert iteration.claim(0, 0, version=3) is None
    assert iteration.asked() == [Place(0, 0)]


def test_an_iteration_that_failed_answers_nothing_but_its_first_failure() -> None:
    iteration = Iteration(make_submission())
    iteration.finished(make_group(iteration.submission, 0))
    assert iteration.claim(0, 0)
    assert iteration.is_same(make_submission())
    iteration.failed("no engine is left")
    iteration.failed("and the disk is full")
    for act in (
        lambda: iteration.claim(0, 0),
        lambda: iteration.claim(0, 1),
        lambda: iteration.finished(make_group(iteration.submission, 1)),
        iteration.complete,
    ):
        with pytest.raises(IterationFailed, match="iteration 3 failed: no engine is left$"):
            act()
    assert iteration.is_over
    assert not iteration.is_same(make_submission())


def test_an_iteration_is_complete_only_when_every_group_was_claimed() -> None:
    iteration = Iteration(make_submission(make_plan(num_prompts=2)))
    iteration.finished(make_group(iteration.submission, 1))
    with pytest.raises(NotAllClaimed, match=r"1 of 2 groups are not finished \(prompts 0\), 1 finished ones are not"):
        iteration.complete()
    iteration.finished(make_group(iteration.submission, 0))
    answers = answers_of(iteration)
    iteration.complete()
    iteration.complete()
    assert iteration.is_over
    assert answers_of(iteration) == answers


@at_any_speed
@given(plans(), st.data())
def test_each_prompt_is_handed_out_once_in_order(plan, data) -> None:
    iteration = Iteration(make_submission(plan))
    waiting, running = list(range(plan.num_prompts)), list[int]()
    for action in data.draw(st.lists(st.sampled_from(["next", "next", "finish"]), max_size=30)):
        if action == "next":
            prompt = iteration.next_prompt()
            assert (prompt.index if prompt else None) == (waiting[0] if waiting else None)
            running += waiting[:1]
            waiting = waiting[1:]
        elif running:
            prompt = running.pop(data.draw(st.integers(0, len(running) - 1)))
            iteration.finished(make_group(iteration.submission, prompt))
        assert iteration.prompts_in(GroupState.WAITING) == waiting
        assert iteration.prompts_in(GroupState.RUNNING) == sorted(running)
        counts = iteration.counts()
        assert sum(counts.values()) == plan.num_prompts
        assert all(count == len(iteration.prompts_in(state)) for state, count in counts.items())


def test_a_group_that_finishes_twice_is_said_and_the_first_is_kept() -> None:
    iteration = Iteration(make_submission())
    for place in [None, (0, 0)]:
        if place is None:
            iteration.finished(make_group(iteration.submission, 0, engine="first"))
        else:
            iteration.claim(*place)
        with pytest.raises(GroupFinishedTwice, match="prompt 0 of version 3 finished twice"):
            iteration.finished(make_group(iteration.submission, 0, engine="second"))
    assert decode(iteration.claim(0, 0), Slot).parts[0].responses[0].engine == "first"


SUBMISSION = make_submission()
GROUP = make_group(SUBMISSION, 2)


def moved(index: int) -> Group:
    """Return the group with another prompt's index."""
    return msgspec.structs.replace(GROUP, prompt=msgspec.structs.replace(GROUP.prompt, index=index))


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (msgspec.structs.replace(GROUP, responses=GROUP.responses[:3]), "it has 3 responses, wanted 4"),
        (moved(9), "only 8 prompts were submitted"),
        (moved(1), "tokens of its prompt differ from those that were submitted"),
        (with_response(GROUP, 1, fingerprint="e" * 64), "response 1 of engine engine-0: its fingerprint"),
        (with_response(GROUP, 1, seed=7), "response 1 has seed 7"),
        (with_response(GROUP, 1, tokens=b"abc"), "3 bytes of tokens"),
        (with_response(GROUP, 1, log_probs=encode_log_probs([0.0])), "12 bytes of tokens and 4 of log-probs"),
        (with_response(GROUP, 1, log_probs=encode_log_probs([0.0, float("nan"), 0.0])), "a log-prob is not finite"),
        (with_response(GROUP, 1, finish_reason="abort"), "its finish reason is 'abort'"),
        (with_response(GROUP, 1, finish_reason="length"), "cut off after 3 tokens, and 5 were allowed"),
        (with_response(GROUP, 1, spans=[]), "its spans end at token 0 of 3"),
        (with_response(GROUP, 1, spans=[VersionSpan(version="2", start=0, end=3)]), "have version '2', wanted '3'"),
        (
            with_response(GROUP, 1, spans=[VersionSpan(version="3", start=1, end=3)]),
            "the span of tokens 1 to 3 must start at token 0",
        ),
        (
            with_response(
                GROUP, 1, spans=[VersionSpan(version="3", start=0, end=5), VersionSpan(version="3", start=5, end=3)]
            ),
            "the span of tokens 5 to 3 must start at token 5",
        ),
        (
            with_response(
                GROUP, 1, spans=[VersionSpan(version="3", start=0, end=2), VersionSpan(version="4", start=2, end=3)]
            ),
            "tokens 2 to 3 have version '4', wanted '3'",
        ),
    ],
)
def test_a_group_that_differs_from_what_was_submitted_is_refused_by_name(group, message) -> None:
    check_group(SUBMISSION, GROUP)
    with pytest.raises(GroupRefused) as caught:
        check_group(SUBMISSION, group)
    assert message in str(caught.value)


def test_a_reward_that_is_not_finite_is_refused_by_name() -> None:
    check_rewards(SUBMISSION, GROUP)
    for reward in (float("inf"), float("nan")):
        with pytest.raises(GroupRefused, match=f"response 1 of engine engine-0: its reward is {reward}"):
            check_rewards(SUBMISSION, with_response(GROUP, 1, reward=reward))


def test_a_rollout_that_its_agent_did_not_end_may_lack_the_reward_that_decides() -> None:
    submission = msgspec.structs.replace(
        SUBMISSION, plan=msgspec.structs.replace(SUBMISSION.plan, deciding_rewards=["correct"])
    )
    named = [msgspec.structs.replace(response, components={"correct": 1.0}) for response in GROUP.responses]
    check_rewards(submission, msgspec.structs.replace(GROUP, responses=named))
    other = {"agent": -1.0}
    for reason in ("failed", "limit"):
        broken = with_response(
            msgspec.structs.replace(GROUP, responses=named), 0, components=other, finish_reason=reason
        )
        check_rewards(submission, broken)
        # Whoever reads them finds those of every response.
        part = _part(broken, first=0, size=1, has_turns=False)
        assert part.components == {
            "agent": [-1.0, *[None] * (len(named) - 1)],
            "correct": [None, *[1.0] * (len(named) - 1)],
        }
    with pytest.raises(GroupRefused, match="correct is to decide .* the sidecar's rewards are agent: write one of"):
        check_rewards(submission, with_response(broken, 0, finish_reason="stop"))


def test_more_tokens_than_allowed_are_refused_and_exactly_the_allowed_number_is_not() -> None:
    submission = make_submission(sampling=Sampling(max_tokens=2))
    with pytest.raises(GroupRefused, match="it has 3 tokens, and 2 were allowed"):
        check_group(submission, make_group(submission, 0))
    cut = make_group(submission, 0, num_tokens=2)
    empty = with_response(cut, 0, tokens=b"", log_probs=b"", spans=[])
    check_group(submission, with_response(empty, 1, finish_reason="length"))


def test_a_group_or_claim_that_cannot_be_recorded_does_not_count_and_fails_the_iteration() -> None:
    def record(what: object) -> None:
        raise OSError("no space left on device")

    iteration = Iteration(make_submission(), record_group=record)
    with pytest.raises(OSError, match="no space"):
        iteration.finished(make_group(iteration.submission, 0))
    assert iteration.counts()[GroupState.FINISHED] == 0
    assert iteration.failure == "the journal cannot be written: no space left on device"

    asked, unasked = (Iteration(make_submission(), record_claim=record) for _ in range(2))
    assert asked.claim(0, 0) is None
    with pytest.raises(OSError, match="no space"):
        asked.finished(make_group(asked.submission, 0))
    unasked.finished(make_group(unasked.submission, 0))
    with pytest.raises(OSError, match="no space"):
        unasked.claim(0, 0)
    for iteration in (asked, unasked):
        assert iteration.claims == []
        assert iteration.counts()[GroupState.FINISHED] == 1
        with pytest.raises(IterationFailed, match="the journal cannot be written"):
            iteration.claim(0, 0)


def test_a_group_costs_as_many_calls_among_many_as_among_few() -> None:
    """Count calls: a search through all groups or places for each of them would show."""

    def calls_a_group(num_prompts: int) -> float:
        plan = Plan(num_prompts=num_prompts, group_size=16, num_replicas=num_prompts // 8, micro_batch_size=4)
        submission = make_submission(plan, sampling=Sampling(max_tokens=4))
        groups = [make_group(submission, prompt, num_tokens=4) for prompt in range(num_prompts)]
        places = all_places(plan)
        with counted_calls() as calls:
            iteration = Iteration(submission)
            for group in groups:
                iteration.next_prompt()
                iteration.finished(group)
            for _ in range(8):
                for place in places:
                    assert iteration.claim(*place)
        return calls.total() / num_prompts

    assert calls_a_group(512) <= 1.05 * calls_a_group(64)


@contextlib.contextmanager
def counted_calls() -> Iterator[collections.Counter]:
    """Count calls and lines of Python: a loop or a comprehension is counted, however fast the machine is."""
    counted: collections.Counter = collections.Counter()

    def trace(frame: types.FrameType, event: str, _: object) -> Callable:
        counted[event] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)


def test_tokens_and_log_probs_reach_the_slot_unchanged() -> None:
    iteration = Iteration(make_submission())
    iteration.finished(make_group(iteration.submission, 0))
    part = decode(iteration.claim(1, 3), Slot).parts[0]
    assert part.responses[2].tokens == encode_tokens([2, 3, 4])
    assert part.responses[2].log_probs == encode_log_probs([-2.5] * 3)
    assert part.responses[2].components == {"exact": 2.0, "other": None}
    assert (part.row, part.prompt_tokens) == ("row-0", encode_tokens([0, 1]))


def test_the_experts_of_a_prompt_reach_each_part_of_its_group_once_and_come_back_from_the_journal(tmp_path) -> None:
    submission = make_submission(make_plan(micro_batch_size=2))
    group = make_group(submission, 0)
    plain = encode(group)
    first, *others = [
        msgspec.structs.replace(response, experts=bytes([number] * 4))
        for number, response in enumerate(group.responses)
    ]
    group = msgspec.structs.replace(
        group, responses=[msgspec.structs.replace(first, prompt_experts=b"prompt"), *others]
    )
    # A group without experts takes no byte more than before.
    assert b"experts" not in plain
    with Journal(tmp_path / "journal", submission) as journal:
        journal.append_group(group)
    with Journal(tmp_path / "journal", submission) as journal:
        (restored,) = journal.recovered.groups
    assert restored == group
    iteration = Iteration(submission)
    iteration.finished(restored)
    for index in (0, 1):
        (part,) = decode(iteration.claim(0, index), Slot).parts
        assert part.prompt_experts == b"prompt"
        assert [response.experts for response in part.responses] == [bytes([2 * index + i] * 4) for i in (0, 1)]
        assert all(response.prompt_experts is msgspec.UNSET for response in part.responses)
