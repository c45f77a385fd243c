"""Checks of a response in the audit log: its version, its turns and branches, and its end."""

import itertools
from collections.abc import Collection, Iterator

from megatron_rl.shared.protocol.provenance import FINISH_REASONS, tag_version
from megatron_rl.shared.protocol.turns import ENVIRONMENT
from megatron_rl.shared.records.audit_chain import BreachName
from megatron_rl.shared.records.audit_events import ResponseRecord, SpanRecord, Submit

Problems = Iterator[tuple[BreachName, str]]
"""Breaches, each with a detail."""


def find_response_problems(response: ResponseRecord, submit: Submit, engines: Collection[str]) -> Problems:
    """Yield what a response contradicts: what was submitted, and the engines that hold the version."""
    if response.fingerprint != submit.fingerprint:
        wanted = submit.fingerprint[:12]
        yield BreachName.FOREIGN_FINGERPRINT, f"has fingerprint {response.fingerprint[:12]}, wanted {wanted}"
    for engine in dict.fromkeys(span.engine or response.engine for span in response.spans) or (response.engine,):
        if engine not in engines:
            yield BreachName.UNKNOWN_ENGINE, f"comes from engine {engine}, which did not report the version"
    may_act = submit.sampling.max_turns > 0
    versions = sorted({span.version for span in response.spans if not (may_act and span.version == ENVIRONMENT)})
    position = 0
    for span in response.spans:
        position = span.end if span.start == position and span.end >= span.start else -1
    if len(versions) > 1:
        yield BreachName.TWO_VERSIONS, f"has versions {' and '.join(versions)}"
    elif position != response.num_tokens or versions not in ([], [tag_version(submit.version)]):
        spans = [(span.version, span.start, span.end) for span in response.spans]
        yield BreachName.WRONG_SPAN, f"has {response.num_tokens} tokens and spans {spans}"
    if response.finish_reason not in FINISH_REASONS:
        yield BreachName.NO_FINISH_REASON, f"has finish reason {response.finish_reason!r}"
    yield from _branch_problems(response, may_act)
    num_turns = 0
    for part in _divide_spans(response):
        given = [span.version == ENVIRONMENT for span in part]
        if may_act and (given[-1:] == [True] or any(one and other for one, other in itertools.pairwise(given))):
            yield BreachName.WRONG_SPAN, "ends with a turn of the environment, or has two in a row"
        num_turns += sum(not given for given, _ in itertools.groupby(given))
    if response.turn_rewards and len(response.turn_rewards) != num_turns:
        yield BreachName.WRONG_COUNT, f"has rewards of {len(response.turn_rewards)} turns, and {num_turns} turns"
    if may_act and num_turns > submit.sampling.max_turns:
        yield BreachName.CUT_OFF, f"has {num_turns} turns of {submit.sampling.max_turns}"
    if response.finish_reason in ("limit", "failed") and not may_act:
        yield BreachName.CUT_OFF, f"ends by {response.finish_reason}, without an environment"
    if response.finish_reason == "cut":
        is_allowed = submit.plan.tail == "truncate" and 0 < response.num_tokens < submit.sampling.max_tokens
        if not is_allowed:
            yield BreachName.CUT_OFF, f"is cut off after {response.num_tokens} tokens"
    limit = submit.sampling.max_tokens
    if response.num_tokens > limit or (response.finish_reason == "length" and response.num_tokens != limit):
        yield BreachName.CUT_OFF, f"ends by {response.finish_reason} after {response.num_tokens} tokens of {limit}"


def _divide_spans(response: ResponseRecord) -> list[list[SpanRecord]]:
    """Divide the spans of a response where its branches begin."""
    begins = [0, *(start for start, _ in response.branches)]
    ends = [*begins[1:], response.num_tokens]
    return [
        [span for span in response.spans if begin <= span.start < end]
        for begin, end in zip(begins, ends, strict=True)
        if begin < end
    ]


def _branch_problems(response: ResponseRecord, may_act: bool) -> Problems:
    begins = {span.start for span in response.spans}
    starts = [start for start, _ in response.branches]
    if starts and not may_act:
        yield BreachName.WRONG_SPAN, "branches, without an environment"
    if starts != sorted(set(starts)) or not begins.issuperset(starts):
        yield BreachName.WRONG_SPAN, f"has branches at tokens {starts}, where no spans begin"
    if any(after >= start for start, after in response.branches):
        yield BreachName.WRONG_SPAN, "has a branch that follows a token after it"
