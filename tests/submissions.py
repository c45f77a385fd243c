"""Submissions and the groups that answer them, small and deterministic."""

from typing import Any

import msgspec
from hypothesis import strategies as st

from megatron_rl.shared.protocol.provenance import derive_group_seed
from megatron_rl.shared.protocol.wire import (
    Group,
    Plan,
    Prompt,
    Response,
    Sampling,
    Submission,
    VersionSpan,
    encode_log_probs,
    encode_tokens,
)
from megatron_rl.shared.records.audit_events import EngineReport
from megatron_rl.shared.records.audit_log import AuditLog

FINGERPRINT = "f" * 64


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw plans that divide evenly: whole groups in a slot, or slots that hold a part of one."""
    group_size = draw(st.sampled_from([1, 2, 3, 4, 6]))
    divisors = [size for size in range(1, group_size) if group_size % size == 0]
    multiples = [group_size * factor for factor in (1, 2, 3)]
    micro_batch_size = draw(st.sampled_from(divisors + multiples))
    num_replicas, num_updates, num_units = draw(st.tuples(*[st.integers(1, 3)] * 3))
    return Plan(
        num_prompts=num_units * num_replicas * num_updates * max(1, micro_batch_size // group_size),
        group_size=group_size,
        num_replicas=num_replicas,
        micro_batch_size=micro_batch_size,
        num_updates=num_updates,
        order=draw(st.sampled_from(["completion", "prompt"])),
    )


def make_plan(**changes: Any) -> Plan:
    """Make a plan of eight prompts of four responses for two replicas, a group a slot, with any changes."""
    return Plan(**{"num_prompts": 8, "group_size": 4, "num_replicas": 2, "micro_batch_size": 4, **changes})


def make_submission(plan: Plan | None = None, **changes: Any) -> Submission:
    """Make a submission in which prompt i is the tokens [i, i + 1]."""
    plan = plan or make_plan()
    count = plan.count_submitted(changes.get("num_carried", 0))
    prompts = [Prompt(index=i, row=f"row-{i}", tokens=encode_tokens([i, i + 1])) for i in range(count)]
    values = {
        "run": "run",
        "version": 3,
        "fingerprint": FINGERPRINT,
        "plan": plan,
        "sampling": Sampling(max_tokens=5),
        "prompts": prompts,
        "deadline_seconds": 60.0,
        **changes,
    }
    return Submission(**values)


def make_group(
    submission: Submission, prompt: int, num_tokens: int = 3, engine: str = "engine-0", has_signal: bool = True
) -> Group:
    """Make the group that answers a prompt; response j has reward j, or 1 if all have the same."""
    seed = derive_group_seed(submission.run, submission.version, prompt)
    responses = [
        Response(
            tokens=encode_tokens(range(prompt + j, prompt + j + num_tokens)),
            log_probs=encode_log_probs([-0.5 - j] * num_tokens),
            finish_reason="stop",
            seed=seed + j,
            engine=engine,
            spans=[VersionSpan(version=str(submission.version), start=0, end=num_tokens)],
            fingerprint=submission.fingerprint,
            reward=float(j) if has_signal else 1.0,
            components={"exact": float(j), "other": None},
        )
        for j in range(submission.plan.group_size)
    ]
    return Group(prompt=submission.prompts[prompt], responses=responses)


def with_response(group: Group, number: int, **changes: Any) -> Group:
    """Return the group with one of its responses changed."""
    responses = list(group.responses)
    responses[number] = msgspec.structs.replace(responses[number], **changes)
    return msgspec.structs.replace(group, responses=responses)


def record_begin(log: AuditLog, submission: Submission) -> None:
    """Record that an engine holds the version of a submission, and the submission."""
    version, fingerprint = submission.version, submission.fingerprint
    log.record_publish(
        version, fingerprint, [EngineReport(engine="engine-0", version=version, fingerprint=fingerprint)]
    )
    log.record_submission(submission)
