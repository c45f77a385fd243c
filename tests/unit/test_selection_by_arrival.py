"""The last groups of an iteration are put off: the groups that are trained on, and those that start the next one."""

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_rl.commands import audit
from megatron_rl.errors import InputError
from megatron_rl.shared.protocol.slots import Claim, divide
from megatron_rl.shared.protocol.wire import Plan, Submission, encode_tokens
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_log import AuditLog
from megatron_rl.sidecar.iteration import Iteration
from tests.submissions import make_group, make_plan, make_submission, plans, record_begin
from tests.unit.test_selection_by_signal import play, trained

at_any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def tailed(draw: st.DrawFn) -> tuple[Plan, int]:
    """Draw a plan that puts groups off, and the number of an iteration's prompts that were put off: none, or all."""
    plan = msgspec.structs.replace(draw(plans()), num_updates=1, order="completion", tail="carry")
    # Plans are drawn for several updates: one has all of their groups.
    plan = msgspec.structs.replace(plan, num_tail=draw(st.integers(1, plan.num_prompts)))
    return plan, draw(st.sampled_from([0, plan.num_prompts]))


@at_any_speed
@given(tailed(), st.integers(0, 1 << 30))
def test_groups_that_finish_first_are_trained_on_unless_all_were_put_off_before(drawn, seed) -> None:
    plan, num_carried = drawn
    finished: list[int] = []
    iteration = Iteration(
        make_submission(plan, num_carried=num_carried), lambda group: finished.append(group.prompt.index)
    )
    num_submitted = len(iteration.submission.prompts)
    called_off = play(iteration, [True] * num_submitted, random.Random(seed))
    chosen = sorted({prompt for prompts in trained(iteration).values() for prompt in prompts})
    assert num_submitted == plan.num_prompts + (0 if num_carried else plan.num_tail)
    assert chosen == sorted(finished[: plan.num_prompts])
    iteration.complete()
    census = iteration.census()
    assert census.num_considered == num_submitted
    assert census.put_off == [prompt for prompt in range(num_submitted) if prompt not in chosen]
    assert set(called_off) <= set(census.put_off)


@at_any_speed
@given(tailed(), st.integers(0, 1 << 30), st.integers(0, 40))
def test_an_iteration_that_is_restored_trains_on_what_had_finished_first(drawn, seed, moment) -> None:
    plan, num_carried = drawn
    submission = make_submission(plan, num_carried=num_carried)
    groups, claims, events = [], [], [(0, 0)]
    whole = Iteration(
        submission,
        lambda group: (groups.append(group), events.append((len(groups), len(claims)))),
        lambda claim: (claims.append(claim), events.append((len(groups), len(claims)))),
    )
    num_submitted = len(submission.prompts)
    play(whole, [True] * num_submitted, random.Random(seed))
    num_groups, num_claims = events[min(moment, len(events) - 1)]
    again = Iteration(submission)
    again.restore(groups[:num_groups], claims[:num_claims])
    play(again, [True] * num_submitted, random.Random(seed + 1))
    slots = trained(again)
    chosen = {prompt for prompts in slots.values() for prompt in prompts}
    assert len(chosen) == plan.num_prompts
    assert {group.prompt.index for group in groups[: min(num_groups, plan.num_prompts)]} <= chosen
    for claim in claims[:num_claims]:
        assert slots[claim.place] == claim.prompts


def write_log(path: Path, submissions: list[Submission], last_prompts: list[int] | None = None) -> list[list[int]]:
    """Write iterations down, with `last_prompts` in place of the last claim's; return the prompts that each put off."""
    put_off = []
    with AuditLog(path, "run") as log:
        for submission in submissions:
            version, plan = submission.version, submission.plan
            record_begin(log, submission)
            made: list[Claim] = []
            iteration = Iteration(
                submission, lambda group, version=version: log.record_group(version, group), made.append
            )
            play(iteration, [True] * len(submission.prompts), random.Random(version))
            trained(iteration)
            if last_prompts is not None:
                made[-1] = msgspec.structs.replace(made[-1], prompts=last_prompts)
            for claim in made:
                log.record_claim(version, claim)
            log.record_completion(version, plan.num_prompts, plan.num_prompts * plan.group_size)
            put_off.append(iteration.census().put_off)
    return put_off


def find_breaches(path: Path) -> set[str]:
    return {str(breach.name) for breach in verify(path).breaches}


def test_the_audit_follows_prompts_that_are_put_off_and_finds_one_that_is_lost(tmp_path) -> None:
    plan = make_plan(tail="carry", num_tail=4)
    first, second = (number_from(make_submission(plan, version=version), 100 * version) for version in (0, 1))
    first_off, second_off = write_log(tmp_path / "first.jsonl", [first, second])
    # Two iterations have put off the number of prompts that one has.
    gathered = [first.prompts[i].tokens for i in first_off] + [second.prompts[i].tokens for i in second_off]
    fresh = number_from(make_submission(plan, version=2), 200)
    plain = make_submission(plan, version=2, num_carried=8)
    third = replace_tokens(plain, gathered)
    last = number_from(make_submission(plan, version=3), 300)
    write_log(tmp_path / "honest.jsonl", [first, second, third, last])
    assert verify(tmp_path / "honest.jsonl").breaches == []

    for name, wrong in (
        ("lost", fresh),
        ("swapped", replace_tokens(plain, [*gathered[:7], fresh.prompts[0].tokens])),
        ("in another order", replace_tokens(plain, gathered[::-1])),
    ):
        write_log(tmp_path / name, [first, second, wrong])
        assert find_breaches(tmp_path / name) == {"put-off prompt is missing"}, name
    at_once = replace_tokens(make_submission(plan, version=0, num_carried=8), gathered)
    write_log(tmp_path / "first of all.jsonl", [at_once])
    assert find_breaches(tmp_path / "first of all.jsonl") == {"put-off prompt is missing"}
    write_log(
        tmp_path / "early.jsonl", [first, replace_tokens(make_submission(plan, version=1, num_carried=8), gathered)]
    )
    assert "put-off prompt is missing" in find_breaches(tmp_path / "early.jsonl")


def test_the_audit_names_the_prompts_that_are_put_off_when_the_log_ends(tmp_path, capsys) -> None:
    plan = make_plan(tail="carry", num_tail=4)
    first, second, last = (number_from(make_submission(plan, version=version), 100 * version) for version in (0, 1, 3))
    put_off = write_log(tmp_path / "a.jsonl", [first, second])
    left = [(version, prompt) for version, prompts in enumerate(put_off) for prompt in prompts]
    found = verify(tmp_path / "a.jsonl").put_off
    assert found is not None
    assert [(one.version, one.prompt) for one in found] == left
    assert {one.num_responses for one in found} == {plan.group_size}
    assert audit.main([str(tmp_path / "a.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert f"8 prompts ({8 * plan.group_size} responses) are put off and not trained on when the log ends:" in printed
    assert [line.split(",")[0].strip() for line in printed.splitlines() if line.startswith("  prompt ")] == [
        f"prompt {prompt} of version {version}" for version, prompt in left
    ]

    gathered = [(first, second)[version].prompts[prompt].tokens for version, prompt in left]
    third = replace_tokens(make_submission(plan, version=2, num_carried=8), gathered)
    write_log(tmp_path / "carried.jsonl", [first, second, third])
    assert verify(tmp_path / "carried.jsonl").put_off == []
    assert audit.main([str(tmp_path / "carried.jsonl")]) == 0
    assert "put off" not in capsys.readouterr().out
    # A log that begins in the midst of a run does not say what the run had put off before.
    write_log(tmp_path / "late.jsonl", [last])
    audit.main([str(tmp_path / "late.jsonl")])
    assert "which prompts are put off is unknown" in capsys.readouterr().out


def test_an_iteration_that_begins_again_puts_off_what_its_last_attempt_puts_off(tmp_path) -> None:
    plan = make_plan(tail="carry", num_tail=2)
    first, second = (number_from(make_submission(plan, version=version), 100 * version) for version in (0, 1))
    (before, *_) = write_log(tmp_path / "a.jsonl", [first, second])
    with AuditLog(tmp_path / "a.jsonl", "run") as log:
        record_begin(log, second)
    found = verify(tmp_path / "a.jsonl").put_off
    assert found is not None
    assert [(one.version, one.prompt) for one in found] == [(0, prompt) for prompt in before]


def number_from(submission: Submission, first: int) -> Submission:
    """Return the same submission with prompts of its own."""
    return replace_tokens(submission, [encode_tokens([first + prompt.index]) for prompt in submission.prompts])


def replace_tokens(submission: Submission, tokens: list[bytes]) -> Submission:
    prompts = [
        msgspec.structs.replace(prompt, tokens=of_prompt)
        for prompt, of_prompt in zip(submission.prompts, tokens, strict=True)
    ]
    return msgspec.structs.replace(submission, prompts=prompts)


def test_the_audit_finds_a_claim_of_a_group_that_came_too_late(tmp_path) -> None:
    submission = make_submission(make_plan(tail="carry", num_tail=2))
    (put_off,) = write_log(tmp_path / "honest.jsonl", [submission])
    write_log(tmp_path / "forged.jsonl", [submission], last_prompts=[put_off[0]])
    assert "wrong slot" in find_breaches(tmp_path / "forged.jsonl")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_tail": 0}, "--rollout-tail-groups 0 must be from 1 to --grpo-prompts-per-step, which is 8"),
        ({"num_tail": 9}, "--rollout-tail-groups 9 must be from 1"),
        ({"order": "prompt"}, "--rollout-tail carry depends on which groups finish last"),
        ({"order": "prompt", "tail": "truncate"}, "--rollout-tail truncate depends on which groups finish last"),
        ({"num_spare": 1}, "--grpo-filter-groups-with-same-reward must not: leave one out"),
        ({"num_updates": 2}, "must have one update an iteration, not 2"),
    ],
)
def test_a_plan_that_cannot_put_groups_off_is_refused_by_name(changes, words) -> None:
    with pytest.raises(InputError, match=words):
        divide(make_plan(**{"tail": "carry", "num_tail": 2, **changes}))


def test_groups_may_be_cut_off_in_any_update() -> None:
    divide(make_plan(tail="truncate", num_tail=2, num_updates=2))


def test_more_prompts_put_off_than_an_iteration_has_are_refused() -> None:
    with pytest.raises(InputError, match="9 prompts that were put off are more than the 8 of an iteration"):
        Iteration(make_submission(make_plan(), num_carried=9))


def make_cut(submission: Submission, prompt: int, num_tokens: int = 3):
    group = make_group(submission, prompt, num_tokens)
    return msgspec.structs.replace(
        group, responses=[msgspec.structs.replace(one, finish_reason="cut") for one in group.responses]
    )


@pytest.mark.parametrize(
    ("plan", "num_cut", "num_tokens", "num_breaches"),
    [
        (make_plan(tail="truncate", num_tail=2), 2, 3, 0),
        (make_plan(tail="truncate", num_tail=2), 3, 3, 1),
        (make_plan(tail="truncate", num_tail=2), 1, 5, 4),
        (make_plan(), 1, 3, 5),
    ],
)
def test_the_audit_allows_as_many_groups_to_be_cut_off_as_the_plan(
    tmp_path, plan, num_cut, num_tokens, num_breaches
) -> None:
    submission = make_submission(plan)
    with AuditLog(tmp_path / "log.jsonl", "run") as log:
        record_begin(log, submission)
        for prompt in range(num_cut):
            log.record_group(3, make_cut(submission, prompt, num_tokens))
    breaches = verify(tmp_path / "log.jsonl").breaches
    assert [str(breach.name) for breach in breaches] == ["response cut off"] * num_breaches
