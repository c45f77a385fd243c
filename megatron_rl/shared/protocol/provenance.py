"""Checks that a group is the one asked for, and that every token was sampled under the version of its iteration.

A group is checked here when it is made. Its spans are checked again before it is trained on (`trainer/data/slots.py`).
"""

import hashlib
from collections.abc import Iterator
from typing import get_args

import numpy as np

from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol.turns import find_span_problems
from megatron_rl.shared.protocol.wire import Evaluation, FinishReason, Group, Response, Submission, decode_log_probs


def derive_group_seed(run: str, version: int, prompt_index: int) -> int:
    """Derive the seed of a group's first response.

    vLLM gives response i this seed + i, so the seeds of groups must lie far apart.
    """
    text = f"{run}\0{version}\0{prompt_index}".encode()
    # Below 2**62, so that adding the number of a sample stays within a signed 64-bit integer.
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2


Assignment = Submission | Evaluation
"""Prompts to sample: those of an iteration or of an evaluation."""

FINISH_REASONS = frozenset(get_args(FinishReason))


def may_be_cut(assignment: Assignment) -> bool:
    """Check whether responses may be cut off before they end."""
    return isinstance(assignment, Submission) and assignment.plan.tail == "truncate"


class GroupRefused(MegatronRLError):
    """A group differs from what was submitted: it must be sampled again, and not trained on."""


def tag_version(version: int) -> str:
    """Return the `VersionSpan.version` of tokens that were sampled under this version."""
    return str(version)


def derive_first_seed(assignment: Assignment, prompt_index: int) -> int:
    """Derive the seed of the first response to a prompt; those of evaluations differ from those of training."""
    run = f"{assignment.run}\0evaluation" if isinstance(assignment, Evaluation) else assignment.run
    return derive_group_seed(run, assignment.version, prompt_index)


def derive_refill_seed(seed: int, num_refills: int) -> int:
    """Derive the seed of a response that was sampled again, after failures that are not the policy's."""
    if not num_refills:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}\0refill\0{num_refills}".encode(), digest_size=8).digest()) >> 2


def check_group(assignment: Assignment, group: Group) -> None:
    """Raise GroupRefused, with the problem, unless every response is as it was asked for."""
    _refuse(assignment, group, _find_problems(assignment, group))


def check_rewards(assignment: Assignment, group: Group) -> None:
    """Raise GroupRefused unless every reward of a scored group is finite, and those that decide are included."""
    _refuse(assignment, group, _find_reward_problems(assignment, group))


def _find_reward_problems(assignment: Assignment, group: Group) -> Iterator[str]:
    deciding = [] if isinstance(assignment, Evaluation) else assignment.plan.deciding_rewards
    for number, response in enumerate(group.responses):
        if response.reward is None:
            if not response.cause:
                yield f"response {number} of engine {response.engine}: it has no reward, and no cause of that"
            continue
        if not np.isfinite(response.reward):
            yield f"response {number} of engine {response.engine}: its reward is {response.reward}"
        # A rollout that its agent did not end has the reward for that, and not those that the agent names.
        for name in () if response.finish_reason in ("failed", "limit") else deciding:
            if name not in response.components:
                yield (
                    f"{name} is to decide whether it has a signal, and the sidecar's rewards are "
                    f"{', '.join(response.components) or 'none'}: write one of these at --grpo-filter-by"
                )


def _refuse(assignment: Assignment, group: Group, problems: Iterator[str]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise GroupRefused(f"group of prompt {group.prompt.index} of version {assignment.version}: {problem}")


def _find_problems(assignment: Assignment, group: Group) -> Iterator[str]:
    index = group.prompt.index
    if not 0 <= index < len(assignment.prompts):
        yield f"only {len(assignment.prompts)} prompts were submitted"
        return
    if group.prompt.tokens != assignment.prompts[index].tokens:
        yield "the tokens of its prompt differ from those that were submitted"
    if len(group.responses) != assignment.group_size:
        yield f"it has {len(group.responses)} responses, wanted {assignment.group_size}"
    seed = derive_first_seed(assignment, index)
    for number, response in enumerate(group.responses):
        for problem in _find_response_problems(assignment, response, len(group.prompt.tokens) // 4):
            yield f"response {number} of engine {response.engine}: {problem}"
        if response.seed != (wanted := derive_refill_seed(seed + number, len(response.refilled))):
            yield f"response {number} has seed {response.seed}, wanted {wanted}"


def _find_response_problems(assignment: Assignment, response: Response, prompt_length: int) -> Iterator[str]:
    num_tokens, remainder = divmod(len(response.tokens), 4)
    if remainder or len(response.log_probs) != len(response.tokens):
        yield f"{len(response.tokens)} bytes of tokens and {len(response.log_probs)} of log-probs must be 4 a token"
        return
    if response.fingerprint != assignment.fingerprint and not is_silent(response):
        yield f"its fingerprint is {response.fingerprint!r}, wanted {assignment.fingerprint!r}"
    tag, max_turns = tag_version(assignment.version), assignment.sampling.max_turns
    yield from find_span_problems(response, tag, max_turns, prompt_length)
    if response.finish_reason not in FINISH_REASONS:
        yield f"its finish reason is {response.finish_reason!r}"
    if response.finish_reason == "cut" and not may_be_cut(assignment):
        yield "it was cut off, and --rollout-tail does not allow that"
    if response.finish_reason in ("limit", "failed") and not assignment.sampling.max_turns:
        yield f"it ended by {response.finish_reason}, without an environment"
    if response.finish_reason == "length" and num_tokens != assignment.sampling.max_tokens:
        yield f"it was cut off after {num_tokens} tokens, and {assignment.sampling.max_tokens} were allowed"
    if num_tokens > assignment.sampling.max_tokens:
        yield f"it has {num_tokens} tokens, and {assignment.sampling.max_tokens} were allowed"
    if not np.isfinite(decode_log_probs(response.log_probs)).all():
        yield "a log-prob is not finite"


def is_silent(response: Response) -> bool:
    """Check whether a response failed before the policy said a word: no engine is named for it."""
    return response.reward is None and not response.tokens


def name_source(row: str) -> str:
    """Return the source of a row from its identity, FILE:LINE."""
    return row.rpartition(":")[0]
