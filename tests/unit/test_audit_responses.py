"""Responses in the audit log: their branches, the rewards of their turns, and the sources of their prompts."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from megatron_rl.commands import audit
from megatron_rl.errors import ExitCode
from megatron_rl.shared.protocol.slots import Claim
from megatron_rl.shared.protocol.turns import ENVIRONMENT
from megatron_rl.shared.protocol.wire import FileSource, Group, Sampling, VersionSpan, Weights, encode_log_probs
from megatron_rl.shared.records.audit_check import find_response_problems
from megatron_rl.shared.records.audit_events import ResponseRecord, SpanRecord, Submit
from megatron_rl.shared.records.audit_log import FILE_NAME, AuditLog
from megatron_rl.sidecar.engines import WeightReport
from megatron_rl.sidecar.publication import Proof
from megatron_rl.sidecar.recorder import RunRecorder
from tests.submissions import FINGERPRINT, make_group, make_plan, make_submission, record_begin, with_response


@pytest.mark.parametrize(
    ("branches", "spans", "problem"),
    [
        ([], [], None),
        ([(2, 1)], [], None),
        ([(2, -3), (6, 6)], [("3", 6, 7)], "follows a token after it"),
        ([(5, 1)], [], "branches at tokens [5], where no spans begin"),
        ([(4, 1), (0, 0)], [], "branches at tokens [4, 0]"),
        ([(2, 1)], [("environment", 6, 7)], "ends with a turn of the environment"),
        ([(6, 1)], [("3", 6, 7), ("environment", 7, 8)], "ends with a turn of the environment"),
        ([(4, 1)], [], "ends with a turn of the environment"),
        ([(2, 1), (6, 1)], [("3", 6, 7)], "has 3 turns of 2"),
    ],
)
def test_the_branches_of_a_response_are_checked(branches, spans, problem: str | None) -> None:
    found = check(branches, spans)
    assert (problem is None and not found) or problem in " ".join(found)


def test_rewards_of_turns_are_one_for_each_turn() -> None:
    assert check(turn_rewards=[0.5, -1.0]) == check(turn_rewards=[]) == []
    assert check(turn_rewards=[0.5]) == ["has rewards of 1 turns, and 2 turns"]
    assert check([(2, 1), (6, 1)], [("3", 6, 7)], turn_rewards=[0.5, 0.5]) == [
        "has rewards of 2 turns, and 3 turns",
        "has 3 turns of 2",
    ]


def test_groups_are_counted_by_the_source_of_their_prompts_and_keep_the_rewards_of_turns(tmp_path, capsys) -> None:
    plan, path = make_plan(num_prompts=4, num_replicas=1), tmp_path / FILE_NAME
    submission = make_submission(plan)
    rows = ["math.jsonl:7", "games.jsonl:1", "math.jsonl:8", "math.jsonl:2"]
    with AuditLog(path, "run") as log:
        record_begin(log, submission)
        for prompt, row in enumerate(rows):
            group = with_response(make_group(submission, prompt), 1, turn_rewards=[0.25 * prompt])
            log.record_group(3, Group(prompt=msgspec.structs.replace(group.prompt, row=row), responses=group.responses))
            log.record_claim(3, Claim(replica=0, index=prompt, prompts=[prompt]))
        log.record_completion(3, 4, 16)
    groups = [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == "group"]
    assert [group["row"] for group in groups] == rows
    assert [[one.get("turn_rewards") for one in group["responses"]] for group in groups[1:]] == [
        [None, [0.25 * prompt], None, None] for prompt in (1, 2, 3)
    ]
    assert audit.main([str(path)]) == ExitCode.OK
    printed = capsys.readouterr().out
    # Of a group, response j has reward j.
    assert "source games.jsonl: 1 groups, 4 responses, mean reward 1.5000\n" in printed
    assert "source math.jsonl: 3 groups, 12 responses, mean reward 1.5000\n" in printed


def check(branches: Sequence[tuple[int, int]] = (), spans: Sequence[Any] = (), **changes: Any) -> list[str]:
    """Check a response of two tokens of the policy, two of the environment, and two of the policy."""
    written = [("3", 0, 2), ("environment", 2, 4), ("3", 4, 6), *spans]
    sampling = Sampling(max_tokens=8, max_turns=2)
    submit = Submit(version=3, fingerprint="f", plan=make_plan(), sampling=sampling, prompts=[], seeds=[])
    record = ResponseRecord(
        tokens="", log_probs="", num_tokens=written[-1][2], finish_reason="stop", seed=1, engine="engine-0",
        spans=[SpanRecord(*span) for span in written], branches=list(branches), fingerprint="f", reward=0.0, **changes,
    )  # fmt: skip
    return [detail for _, detail in find_response_problems(record, submit, {"engine-0"})]


def test_a_restored_conversation_is_no_breach_though_the_engine_of_a_turn_has_left(tmp_path, capsys) -> None:
    sampling = Sampling(max_tokens=8, max_turns=2)
    submission = msgspec.structs.replace(make_submission(make_plan(num_prompts=1, num_replicas=1)), sampling=sampling)
    group = make_group(submission, 0)
    spans = [
        VersionSpan(version="3", start=0, end=1, engine="engine-1"),
        VersionSpan(version=ENVIRONMENT, start=1, end=2),
        VersionSpan(version="3", start=2, end=3),
    ]
    log_probs = encode_log_probs([-1.0, 0.0, -1.0])
    responses = [msgspec.structs.replace(one, spans=spans, log_probs=log_probs) for one in group.responses]
    for engines in (["engine-0", "engine-1"], ["engine-0"]):
        recorder = RunRecorder(tmp_path, "run")
        # The trainer resumes with the version before.
        for version, fingerprint in ((2, "before"), (3, FINGERPRINT)):
            weights = Weights(
                run="run", version=version, fingerprint=fingerprint, source=FileSource(folder=""), dtype="float32"
            )
            recorder.published(weights, [Proof(engine, WeightReport(version, fingerprint)) for engine in engines])
        groups, _ = recorder.begin(submission)
        recorder.restored()
        if not groups:
            recorder.finished(Group(prompt=group.prompt, responses=responses))
            recorder.close()
    assert len(groups) == 1
    recorder.claimed(Claim(replica=0, index=0, prompts=[0]))
    recorder.completed(3)
    recorder.close()
    assert audit.main([str(tmp_path / FILE_NAME)]) == ExitCode.OK, capsys.readouterr()
