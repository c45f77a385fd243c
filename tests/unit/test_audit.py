"""The audit log: an honest one is clean, and each way of tampering is caught by its name."""

import itertools
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl import cli
from megatron_rl.analysis.report import data
from megatron_rl.errors import ExitCode, ForeignVersion, InputError
from megatron_rl.shared.protocol.wire import WIRE_VERSION, Mismatch, Plan, Submission
from megatron_rl.shared.records import audit_log
from megatron_rl.shared.records.append_file import FileInUse
from megatron_rl.shared.records.audit_chain import BreachName
from megatron_rl.shared.records.audit_check import verify
from megatron_rl.shared.records.audit_events import EngineReport, ProbeRecord
from megatron_rl.shared.records.audit_log import FIRST_PREV, AuditBroken, AuditLog, hash_content, hash_line
from megatron_rl.shared.records.audit_report import Report
from megatron_rl.sidecar.iteration import Iteration
from tests.killing import kill_while_appending
from tests.submissions import FINGERPRINT, make_group, make_plan, make_submission, plans

Lines = list[dict]
ENGINES = ("engine-0", "engine-1")
STRUCTURAL = {
    BreachName.TRUNCATED_LINE,
    BreachName.UNREADABLE_LINE,
    BreachName.CHANGED_CONTENT,
    BreachName.BROKEN_CHAIN,
    BreachName.MISSING_LINE,
    BreachName.DOUBLED_LINE,
    BreachName.REORDERED_LINE,
}


def held(engine: str, version: int, fingerprint: str, mean: float = 1e-6) -> EngineReport:
    probe = ProbeRecord(mean=mean, largest=4 * mean, bound=1e-3)
    return EngineReport(engine=engine, version=version, fingerprint=fingerprint, compared=9, parameters=9, probe=probe)


def run_iteration(log: AuditLog, submission: Submission, order: list[int]) -> None:
    """Record a whole iteration, as the service does; its groups finish in this order."""
    version, plan = submission.version, submission.plan
    log.record_publish(
        version, submission.fingerprint, [held(engine, version, submission.fingerprint) for engine in ENGINES]
    )
    log.record_submission(submission)
    iteration = Iteration(
        submission, lambda group: log.record_group(version, group), lambda claim: log.record_claim(version, claim)
    )
    slots = itertools.product(range(plan.num_replicas), range(iteration.division.slots_per_replica))
    for replica, index in slots:
        iteration.claim(replica, index)
    for prompt in order:
        iteration.finished(make_group(submission, prompt, engine=ENGINES[prompt % 2]))
    assert iteration.is_claimed
    log.record_completion(version, plan.num_prompts, plan.num_prompts * plan.group_size)


def write_log(path: Path, plan: Plan | None = None, versions: tuple[int, ...] = (3, 4)) -> str:
    """Write a log of these iterations, by default each of two groups of two responses; return its head."""
    plan = plan or make_plan(num_prompts=2, group_size=2, micro_batch_size=2)
    with AuditLog(path, "run", clock=lambda: 1.0) as log:
        for version in versions:
            run_iteration(log, make_submission(plan, version=version), list(reversed(range(plan.num_prompts))))
        return log.head


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def names(report: Report) -> set[BreachName]:
    return {breach.name for breach in report.breaches}


def chained(events: Lines) -> bytes:
    """Write the events in a valid chain, as a forger who knows the format would."""
    lines, prev = [], FIRST_PREV
    for seq, event in enumerate(events):
        body = json.dumps({**{key: value for key, value in event.items() if key != "hash"}, "seq": seq, "prev": prev})
        unsealed = f'{body[:-1]},"hash":"{"0" * 64}"}}'.encode()
        prev = hash_line(unsealed)
        lines.append(unsealed.replace(b"0" * 64 + b'"}', prev.encode() + b'"}'))
    return b"".join(line + b"\n" for line in lines)


def find(events: Lines, kind: str, number: int = 0) -> dict:
    return [event for event in events if event["event"] == kind][number]


@given(plans(), st.data())
@settings(max_examples=30)
def test_an_honest_log_has_no_breach_and_its_summary_counts_what_was_done(tmp_path_factory, plan, data) -> None:
    path = tmp_path_factory.mktemp("run") / "audit.jsonl"
    with AuditLog(path, "run") as log:
        for version in (3, 4):
            order = data.draw(st.permutations(range(plan.num_prompts)))
            run_iteration(log, make_submission(plan, version=version), order)
        head = log.head
    report = verify(path, [head])
    assert report.breaches == []
    assert report.head == head
    assert report.num_covered == report.num_lines
    num_responses = plan.num_prompts * plan.group_size
    for summary, version in zip(report.iterations, (3, 4), strict=True):
        assert (summary.version, summary.fingerprint, summary.outcome) == (version, FINGERPRINT, "complete")
        assert (summary.num_groups, summary.num_responses) == (plan.num_prompts, num_responses)
        assert summary.num_tokens == 3 * num_responses
        assert summary.engines == set(ENGINES[: plan.num_prompts])


def test_an_objective_that_changes_is_listed_with_its_version_and_is_no_breach(path: Path, capsys) -> None:
    plan = make_plan(num_prompts=2, group_size=2, micro_batch_size=2)
    objectives = [{"--grpo-kl-beta": "0.05"}, {"--grpo-kl-beta": "0.05"}, {"--grpo-kl-beta": "0.5", "--new": "1"}]
    for version, objective in enumerate(objectives, start=3):
        with AuditLog(path, "run") as log:
            log.record_objective(version, objective)
            run_iteration(log, make_submission(plan, version=version), [0, 1])
    report = verify(path)
    assert (report.breaches, report.changes) == ([], [(5, ["--grpo-kl-beta 0.05 -> 0.5"])])
    assert cli.main(["audit", str(path)]) == 0
    assert "       5 was trained with another objective: --grpo-kl-beta 0.05 -> 0.5" in capsys.readouterr().out


def test_the_log_holds_hashes_and_no_token_of_a_prompt_or_a_response(path: Path) -> None:
    write_log(path)
    group = find([json.loads(line) for line in path.read_bytes().splitlines()], "group")
    assert re.fullmatch("[0-9a-f]{32}", group["prompt_hash"])
    for response in group["responses"]:
        assert re.fullmatch("[0-9a-f]{32}", response["tokens"])
        assert re.fullmatch("[0-9a-f]{32}", response["log_probs"])
    assert path.stat().st_mode & 0o777 == 0o600


# Each takes the raw lines, with their newlines, of a log of 15.
RAW_TAMPERINGS: list[tuple[BreachName, Callable[[list[bytes]], list[bytes]]]] = [
    (BreachName.TRUNCATED_LINE, lambda lines: [*lines[:-1], lines[-1][:40]]),
    (BreachName.TRUNCATED_LINE, lambda lines: [*lines[:-1], lines[-1][:-1]]),
    (BreachName.TRUNCATED_LINE, lambda lines: [*lines[:5], lines[5][:40] + b"\n", *lines[6:]]),
    (BreachName.UNREADABLE_LINE, lambda lines: [*lines[:5], lines[5].replace(b'"seq"', b'"sea"'), *lines[6:]]),
    (
        BreachName.CHANGED_CONTENT,
        lambda lines: [*lines[:5], lines[5].replace(b'"reward":1', b'"reward":2'), *lines[6:]],
    ),
    (BreachName.MISSING_LINE, lambda lines: lines[1:]),
    (BreachName.MISSING_LINE, lambda lines: lines[:5] + lines[6:]),
    (BreachName.MISSING_LINE, lambda lines: lines[:5] + lines[9:]),
    (BreachName.DOUBLED_LINE, lambda lines: lines[:6] + lines[5:]),
    (BreachName.DOUBLED_LINE, lambda lines: [*lines, lines[3]]),
    (BreachName.REORDERED_LINE, lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]]),
    (BreachName.REORDERED_LINE, lambda lines: [*lines[:3], *lines[6:9], *lines[3:6], *lines[9:]]),
]


@pytest.mark.parametrize(("name", "tamper"), RAW_TAMPERINGS, ids=[str(name) for name, _ in RAW_TAMPERINGS])
def test_each_tampering_with_lines_is_caught_by_its_name(path: Path, name, tamper) -> None:
    write_log(path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 15
    path.write_bytes(b"".join(tamper(lines)))
    found = names(verify(path))
    assert name in found
    assert name is BreachName.MISSING_LINE or BreachName.MISSING_LINE not in found
    assert name is not BreachName.DOUBLED_LINE or found == {name}


def test_the_head_of_a_changed_line_is_not_found(path: Path) -> None:
    head = write_log(path)
    path.write_bytes(path.read_bytes().replace(b'"num_groups":2', b'"num_groups":3'))
    assert {BreachName.CHANGED_CONTENT, BreachName.HEAD_NOT_FOUND} <= names(verify(path, [head]))


def test_a_line_whose_hash_was_made_again_breaks_the_chain_after_it(path: Path) -> None:
    write_log(path)
    lines = path.read_bytes().splitlines(keepends=True)
    forged = lines[3].replace(b'"reward":1', b'"reward":2')
    assert forged != lines[3]
    sealed = forged.replace(forged[-67:-3], hash_line(forged[:-1]).encode())
    path.write_bytes(b"".join([*lines[:3], sealed, *lines[4:]]))
    report = verify(path)
    assert [(breach.name, breach.line) for breach in report.breaches] == [(BreachName.BROKEN_CHAIN, 5)]


def _set(kind: str, number: int = 0, **values: object) -> Callable[[Lines], Lines]:
    def tamper(events: Lines) -> Lines:
        find(events, kind, number).update(values)
        return events

    return tamper


def _set_response(**values: object) -> Callable[[Lines], Lines]:
    def tamper(events: Lines) -> Lines:
        find(events, "group")["responses"][1].update(values)
        return events

    return tamper


def _drop(kind: str, number: int = 0) -> Callable[[Lines], Lines]:
    return lambda events: [event for event in events if event is not find(events, kind, number)]


def _repeat(kind: str, **values: object) -> Callable[[Lines], Lines]:
    def tamper(events: Lines) -> Lines:
        place = events.index(find(events, kind)) + 1
        return [*events[:place], {**events[place - 1], **values}, *events[place:]]

    return tamper


def _short_group(events: Lines) -> Lines:
    find(events, "group")["responses"].pop()
    find(events, "complete")["num_responses"] -= 1
    return events


def _no_finish_reason(events: Lines) -> Lines:
    del find(events, "group")["responses"][0]["finish_reason"]
    return events


def _far_probe(events: Lines) -> Lines:
    find(events, "publish")["engines"][1]["probe"]["mean"] = 0.2
    return events


def _other_base(events: Lines) -> Lines:
    find(events, "publish")["base"] = "a" * 64
    find(events, "publish", 1)["base"] = "b" * 64
    return events


def _other_engine_report(events: Lines) -> Lines:
    find(events, "publish")["engines"][1]["fingerprint"] = "e" * 64
    return events


# Each takes the events of an honest log; then the chain is forged again, so that it is valid.
FORGERIES: list[tuple[BreachName, Callable[[Lines], Lines]]] = [
    (BreachName.FOREIGN_FINGERPRINT, _set_response(fingerprint="e" * 64)),
    (BreachName.FOREIGN_FINGERPRINT, _set("publish", fingerprint="e" * 64, engines=[])),
    (BreachName.WRONG_SPAN, _set_response(spans=[["3", 0, 2]])),
    (BreachName.WRONG_SPAN, _set_response(spans=[["3", 1, 3]])),
    (BreachName.WRONG_SPAN, _set_response(spans=[])),
    (BreachName.WRONG_SPAN, _set_response(spans=[["2", 0, 3]])),
    (BreachName.TWO_VERSIONS, _set_response(spans=[["2", 0, 1], ["3", 1, 3]])),
    (BreachName.NEVER_SUBMITTED, _repeat("group", prompt=2)),
    (BreachName.NEVER_SUBMITTED, _repeat("group", version=2)),
    (BreachName.FINISHED_TWICE, _repeat("group")),
    (BreachName.INCOMPLETE_GROUP, _short_group),
    (BreachName.NO_FINISH_REASON, _no_finish_reason),
    (BreachName.NO_FINISH_REASON, _set_response(finish_reason="abort")),
    (BreachName.CUT_OFF, _set_response(finish_reason="length")),
    (BreachName.WRONG_SEED, _set_response(seed=7)),
    (BreachName.WRONG_SEED, _set_response(refilled=("raised",))),
    (BreachName.LEFT_OUT, _set_response(reward=None)),
    (BreachName.WRONG_COUNT, _set_response(reward=None, cause="raised")),
    (BreachName.WRONG_SEED, _set("submit", seeds=[1, 2])),
    (BreachName.WRONG_PROMPT, _set("group", prompt_hash="0" * 32)),
    (BreachName.UNKNOWN_ENGINE, _set_response(engine="engine-9")),
    (BreachName.UNKNOWN_ENGINE, _set("publish", 1, engines=[])),
    (BreachName.ENGINE_DIFFERS, _other_engine_report),
    (BreachName.PROBE_DIFFERS, _far_probe),
    (BreachName.OTHER_BASE, _other_base),
    (BreachName.CLAIMED_TWICE, _set("claim", 1, prompts=[1])),
    (BreachName.SLOT_CLAIMED_TWICE, _repeat("claim")),
    (BreachName.CLAIM_OUTSIDE, _set("claim", 1, version=9)),
    (BreachName.CLAIM_UNFINISHED, _set("claim", 0, prompts=[0])),
    (BreachName.WRONG_SLOT, _set("claim", index=1)),
    (BreachName.WRONG_SLOT, _set("claim", prompts=[1, 0])),
    (BreachName.NEVER_CLAIMED, _drop("claim")),
    (BreachName.NEVER_FINISHED, _drop("group", 1)),
    (BreachName.WRONG_COUNT, _set("complete", num_responses=3)),
    (BreachName.WRONG_COUNT, _set("submit", seeds=[])),
    (BreachName.COMPLETE_OUTSIDE, _repeat("complete")),
    (BreachName.NOT_PUBLISHED, _drop("publish", 1)),
    (BreachName.SKIPPED_VERSION, _set("submit", 1, version=9)),
    (BreachName.FOREIGN_RUN, _repeat("start", run="another")),
    (BreachName.UNREADABLE_LINE, _set("group", event="grope")),
]


@pytest.mark.parametrize(("name", "tamper"), FORGERIES, ids=[str(name) for name, _ in FORGERIES])
def test_each_contradiction_is_caught_by_its_name_even_if_the_chain_was_forged_again(path: Path, name, tamper) -> None:
    head = write_log(path)
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    path.write_bytes(chained(events))
    assert names(verify(path)) == set()
    path.write_bytes(chained(tamper(events)))
    report = verify(path, [head])
    assert name in names(report), report.breaches
    assert BreachName.HEAD_NOT_FOUND in names(report)
    assert not names(report) & (STRUCTURAL - {BreachName.UNREADABLE_LINE})


def test_a_failed_proof_and_a_mismatch_above_its_bound_are_breaches(path: Path) -> None:
    with AuditLog(path, "run") as log:
        submission = make_submission(make_plan(num_prompts=2))
        run_iteration(log, submission, [0, 1])
        log.record_refusal(4, FINGERPRINT, "engine-1", "engine engine-1: 1 tensors are held with other numbers")
    assert names(verify(path)) == {BreachName.NOT_PROVEN}
    path.unlink()
    for mean, bound, found in (
        (1e-6, 5e-3, set()),
        (0.2, None, set()),
        (0.2, 5e-3, {BreachName.MISMATCH}),
        (math.nan, 5e-3, {BreachName.MISMATCH}),
    ):
        with AuditLog(path, "run") as log:
            log.record_publish(3, FINGERPRINT, [held("engine-0", 3, FINGERPRINT)])
            log.record_submission(submission)
            log.record_mismatch(3, Mismatch(mean=mean, largest=4 * mean, bound=bound))
        assert names(verify(path)) == found
        path.unlink()


def test_the_audit_counts_how_engines_proved_their_weights(path: Path) -> None:
    other = EngineReport(engine="engine-2", version=3, fingerprint=FINGERPRINT, compared=3, parameters=9)
    with AuditLog(path, "run") as log:
        log.record_publish(
            3, FINGERPRINT, [held("engine-0", 3, FINGERPRINT, 2e-5), held("engine-1", 3, FINGERPRINT), other]
        )
    proofs = verify(path).proofs
    assert (proofs.num_reports, proofs.num_whole, proofs.num_probed, proofs.furthest) == (3, 2, 2, 2e-5)


def test_the_audit_says_what_engines_quantize(path: Path, capsys) -> None:
    plain = held("engine-0", 3, FINGERPRINT)
    with AuditLog(path, "run") as log:
        log.record_publish(3, FINGERPRINT, [plain, msgspec.structs.replace(plain, quantization="fp8_per_channel")])
    assert [line.count("quantization") for line in path.read_text().splitlines()][-1] == 1
    assert verify(path).proofs.quantizations == {"fp8_per_channel": 1}
    cli.main(["audit", str(path)])
    assert "engines quantize (fp8_per_channel): in 1 of 2 reports" in capsys.readouterr().out


def test_parameters_that_are_not_compared_are_a_breach_unless_the_weaker_proof_is_accepted(path, capsys) -> None:
    submission = make_submission(make_plan(num_prompts=2))
    few = EngineReport(engine="engine-1", version=3, fingerprint=FINGERPRINT, compared=3, parameters=9)
    for proof, found, num_weaker in (("digests", {BreachName.NOT_COMPARED}, 0), ("probe", set(), 1), (None, set(), 0)):
        with AuditLog(path, "run") as log:
            log.record_publish(3, FINGERPRINT, [held("engine-0", 3, FINGERPRINT), few], proof)
            log.record_submission(submission)
        report = verify(path)
        assert names(report) == found
        assert [item.compared for item in report.iterations] == [(3, 9)]
        assert report.proofs.num_weaker == num_weaker
        assert cli.main(["audit", str(path)]) == (ExitCode.RUN if found else ExitCode.OK)
        line = "the weaker proof was accepted (--publish-proof probe): in 1 of 2 reports"
        for said in (capsys.readouterr().out, data._check(path)["weaker"] or ""):
            assert (line in said) == (num_weaker > 0)
        path.unlink()


def test_a_probe_without_a_bound_is_written_and_read(path: Path) -> None:
    report = held("engine-0", 3, FINGERPRINT)
    assert report.probe is not None
    unbounded = msgspec.structs.replace(report, probe=msgspec.structs.replace(report.probe, mean=7.0, bound=math.inf))
    with AuditLog(path, "run") as log:
        log.record_publish(3, FINGERPRINT, [unbounded])
    assert names(verify(path)) == set()
    assert verify(path).proofs.furthest == 7.0


def test_a_consistent_forgery_is_caught_by_the_head_alone(path: Path) -> None:
    head = write_log(path)
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    find(events, "group")["responses"][0]["tokens"] = "0" * 32
    path.write_bytes(chained(events))
    assert names(verify(path)) == set()
    assert names(verify(path, [head])) == {BreachName.HEAD_NOT_FOUND}


def test_lines_lost_at_the_end_are_caught_by_the_head_alone_and_lines_added_later_are_not_covered(path: Path) -> None:
    head = write_log(path)
    with AuditLog(path, "run") as log:
        run_iteration(log, make_submission(make_plan(num_prompts=2), version=5), [0, 1])
    report = verify(path, [head])
    assert report.breaches == []
    assert (report.num_covered, report.num_lines) == (15, 23)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:14]))
    assert names(verify(path)) == set()
    assert names(verify(path, [head])) == {BreachName.HEAD_NOT_FOUND}


@given(st.data())
@settings(max_examples=150)
def test_any_changed_byte_is_a_breach(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("run") / "audit.jsonl"
    write_log(path, versions=(3,))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert names(verify(path))


@pytest.mark.parametrize("seed", range(4))
def test_any_lines_deleted_doubled_or_moved_are_named_for_what_they_are(path: Path, seed: int) -> None:
    random_number = random.Random(seed)
    write_log(path, versions=(3, 4, 5))
    lines = path.read_bytes().splitlines(keepends=True)
    for _ in range(10):
        start = random_number.randrange(len(lines) - 1)
        stop = random_number.randrange(start + 1, len(lines))
        for name, changed in [
            (BreachName.MISSING_LINE, lines[:start] + lines[stop:]),
            (BreachName.DOUBLED_LINE, lines[:stop] + lines[start:]),
            (BreachName.REORDERED_LINE, lines[:start] + lines[stop : stop + 1] + lines[start:stop] + lines[stop + 1 :]),
        ]:
            path.write_bytes(b"".join(changed))
            structural = names(verify(path)) & STRUCTURAL
            assert structural == {name}


def test_a_log_continues_after_a_restart_and_an_attempt_begins_again(path: Path) -> None:
    submission = make_submission(make_plan(num_prompts=2))
    group = make_group(submission, 1)
    with AuditLog(path, "run") as log:
        log.record_publish(3, FINGERPRINT, [held("engine-0", 3, FINGERPRINT)])
        log.record_submission(submission)
        log.record_group(3, group)
    with AuditLog(path, "run") as log:
        log.record_publish(3, FINGERPRINT, [held("engine-1", 3, FINGERPRINT)])
        log.record_submission(submission)
        iteration = Iteration(submission, record_claim=lambda claim: log.record_claim(3, claim))
        log.record_group(3, group, is_restored=True)
        iteration.restore([group], [])
        log.record_publish(3, FINGERPRINT, [held("engine-2", 3, FINGERPRINT)])
        log.record_group(3, make_group(submission, 0, engine="engine-2"))
        iteration.finished(make_group(submission, 0))
        assert iteration.claim(0, 0)
        assert iteration.claim(1, 0)
        log.record_completion(3, 2, 8)
        log.record_publish(4, FINGERPRINT, [held("engine-0", 4, FINGERPRINT)])
        log.record_submission(make_submission(make_plan(num_prompts=2), version=4))
        log.record_failure(4, "x" * 1000)
    report = verify(path)
    assert report.breaches == []
    assert report.num_starts == 2
    outcomes = [(summary.version, summary.outcome, summary.num_restored) for summary in report.iterations]
    assert outcomes == [(3, "unfinished", 0), (3, "complete", 1), (4, "failed", 0)]
    assert b"x" * 201 not in path.read_bytes()


def test_a_torn_last_line_is_cut_at_reopening_and_said(path: Path) -> None:
    write_log(path, versions=(3,))
    content = path.read_bytes()
    lengths = [0, *itertools.accumulate(len(line) for line in content.splitlines(keepends=True))]
    for size in [*range(lengths[-2] + 1, len(content)), lengths[1] - 1, lengths[2] + 100]:
        path.write_bytes(content[:size])
        assert names(verify(path)) == {BreachName.TRUNCATED_LINE}
        with AuditLog(path, "run"):
            pass
        report = verify(path)
        assert report.breaches == []
        assert report.num_recovered == 1
        last = json.loads(path.read_bytes().splitlines()[-1])
        assert (last["event"], last["num_bytes"]) == ("recovered", size - max(n for n in lengths if n <= size))


def test_a_log_whose_last_line_is_damaged_is_not_continued(path: Path) -> None:
    write_log(path)
    content = path.read_bytes()
    for damaged in (content.replace(b'"num_groups":2', b'"num_groups":3'), content[:-80] + b"\n", b"nonsense\n"):
        path.write_bytes(damaged)
        with pytest.raises(AuditBroken, match="its last line is damaged"):
            AuditLog(path, "run")
        assert path.read_bytes() == damaged


def test_a_log_of_another_version_is_neither_read_nor_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_log(path)
    content = path.read_bytes()
    monkeypatch.setattr(audit_log, "WIRE_VERSION", WIRE_VERSION + 1)
    text = rf"{path} was written by another version of megatron_rl \(its format is {WIRE_VERSION}, .*\): "
    with pytest.raises(ForeignVersion, match=text + "read it with that version"):
        verify(path)
    with pytest.raises(ForeignVersion, match=text + "resume with that version, or move the log's files away"):
        AuditLog(path, "run")
    assert path.read_bytes() == content


def test_a_log_has_one_writer(path: Path) -> None:
    with AuditLog(path, "run"), pytest.raises(FileInUse):
        AuditLog(path, "run")


def test_a_line_longer_than_what_is_read_at_once_is_continued(path: Path) -> None:
    with AuditLog(path, "run") as log:
        log.record_submission(make_submission(make_plan(num_prompts=4096)))
        head = log.head
    assert path.stat().st_size > 200_000
    with AuditLog(path, "run"):
        pass
    assert json.loads(path.read_bytes().splitlines()[-1])["prev"] == head
    os.truncate(path, path.stat().st_size - 100_000)
    with AuditLog(path, "run"):
        pass
    assert [event["event"] for event in map(json.loads, path.read_bytes().splitlines())] == ["start"] * 2 + [
        "recovered"
    ]


def test_kill_9_in_the_middle_of_writing_leaves_a_log_that_can_be_continued(path: Path) -> None:
    random_number = random.Random(7)
    for _ in range(5):
        told = kill_while_appending(
            f"""
            from pathlib import Path
            from megatron_rl.shared.records.audit_log import AuditLog
            from tests.submissions import make_plan, make_submission
            submission = make_submission(make_plan(num_prompts=4096))
            log = AuditLog(Path({str(path)!r}), "run")
            for version in range(4096):
                log.record_submission(submission)
                print(version)
            """,
            random_number,
        )
        with AuditLog(path, "run"):
            pass
        events = [json.loads(line)["event"] for line in path.read_bytes().splitlines()]
        assert events.count("submit") in (told, told + 1)
        assert names(verify(path)) == {BreachName.NOT_PUBLISHED}
        path.unlink()


def lines_of(output: str, start: str) -> Iterator[str]:
    return (line for line in output.splitlines() if line.startswith(start))


def test_the_command_prints_each_iteration_and_breach_and_its_exit_code_says_whether_there_is_one(path, capsys) -> None:
    head = write_log(path)
    assert cli.main(["audit", str(path.parent), "--head", head]) == ExitCode.OK
    printed = capsys.readouterr().out
    assert "run run: 15 lines, 1 start, 0 recovered" in printed
    assert next(lines_of(printed, "       3 ffffffffffff")).split()[2:] == [
        "complete",
        "2",
        "4",
        "12",
        "9/9",
        "engine-0,",
        "engine-1",
    ]
    assert f"2 of 2 iterations complete, 0 breaches\nhead {head}\nlines 1 to 15" in printed
    path.write_bytes(path.read_bytes().replace(b'"reward":1', b'"reward":2'))
    assert cli.main(["audit", str(path)]) == ExitCode.RUN
    assert len(list(lines_of(capsys.readouterr().out, "BREACH line"))) == 4
    assert cli.main(["audit", str(path.parent / "nothing")]) == ExitCode.INPUT
    with pytest.raises(InputError, match="name the log, or the folder"):
        verify(path.parent / "nothing")


def test_an_empty_log_is_clean_and_holds_nothing(path: Path) -> None:
    path.touch(mode=0o600)
    assert verify(path).breaches == []
    assert names(verify(path, ["a" * 64])) == {BreachName.HEAD_NOT_FOUND}


def test_the_experts_of_a_response_are_in_the_log_and_so_is_a_mismatch_without_them(tmp_path: Path) -> None:
    submission = make_submission()
    group = make_group(submission, 0)
    first, *others = [msgspec.structs.replace(response, experts=b"ab") for response in group.responses]
    routed = msgspec.structs.replace(group, responses=[msgspec.structs.replace(first, prompt_experts=b"p"), *others])
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, "run", clock=lambda: 1.0) as log:
        log.record_group(3, group)
        log.record_group(3, routed)
        log.record_mismatch(3, Mismatch(mean=0.1, largest=0.5, bound=0.2, num_differing=7))
        log.record_mismatch(3, Mismatch(mean=0.1, largest=0.5, bound=0.2, without_replay=0.15))
    _, plain, with_experts, measured, compared = map(json.loads, path.read_text().splitlines())
    assert all("experts" not in response for response in plain["responses"])
    hashes = [response["experts"] for response in with_experts["responses"]]
    assert hashes == [hash_content(b"pab"), *[hash_content(b"ab")] * 3]
    assert "without_replay" not in measured
    assert measured["num_differing"] == 7
    assert compared["without_replay"] == 0.15
