"""The writers of a response's tokens, turn after turn, and the parts of a response that branches.

The spans of a response say who wrote what: those of the policy name the version that sampled them, those of the
environment name `ENVIRONMENT`. An environment may write first, but the policy writes last: what an environment says
then has no reader. Both hold for each part of a response that branches. Tokens are counted as in the spans, and the
tokens of the prompt from its end: -1 is its last one.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from megatron_rl.shared.protocol.wire import Response, VersionSpan, decode_log_probs


class ResponsePart(NamedTuple):
    """Consecutive tokens of a response, the first of which follows token `after - 1`."""

    start: int
    end: int
    after: int


def list_parts(response: Response) -> list[ResponsePart]:
    """List the parts of a response, which may be one alone."""
    begins = [(branch.start, branch.after) for branch in response.branches]
    if not begins or begins[0][0] > 0:
        begins.insert(0, (0, 0))
    ends = [*(start for start, _ in begins[1:]), len(response.tokens) // 4]
    return [ResponsePart(start, end, after) for (start, after), end in zip(begins, ends, strict=True)]


def trace_path(parts: Sequence[ResponsePart], number: int, prompt_length: int) -> list[tuple[int, int]]:
    """Return the ranges of tokens that a part follows, the earliest first."""
    path: list[tuple[int, int]] = []
    after = parts[number].after
    while after > 0:
        before = next(part for part in parts if part.start < after <= part.end)
        path.insert(0, (before.start, after))
        after = before.after
    return [(-prompt_length, after), *path] if after > -prompt_length else path


def find_branch_problems(response: Response, prompt_length: int) -> Iterator[str]:
    """Yield what is wrong with the branches of a response."""
    num_tokens, last = len(response.tokens) // 4, -1
    begins = {span.start for span in response.spans}
    for branch in response.branches:
        if not last < branch.start < num_tokens:
            yield f"a branch at token {branch.start} must begin after token {last} and before token {num_tokens}"
        elif branch.start not in begins:
            yield f"no span begins at token {branch.start}, where a branch does"
        if not -prompt_length <= branch.after < branch.start:
            yield (
                f"the branch at token {branch.start} follows token {branch.after - 1}, which must be one before it: a "
                f"token of the response, or of the {prompt_length} of its prompt"
            )
        last = branch.start


ENVIRONMENT = "environment"
"""The `VersionSpan.version` of tokens that the environment wrote, which are not trained on."""


def mask_sampled(response: Response) -> np.ndarray:
    """Return, for each token of a response, whether the policy sampled it."""
    mask = np.ones(len(response.tokens) // 4, dtype=bool)
    for span in response.spans:
        if span.version == ENVIRONMENT:
            mask[span.start : span.end] = False
    return mask


def count_sampled(response: Response) -> int:
    """Count the tokens of a response that the policy sampled."""
    given = sum(span.end - span.start for span in response.spans if span.version == ENVIRONMENT)
    return len(response.tokens) // 4 - given


def count_turns(response: Response) -> int:
    """Count the turns of the policy: runs of its tokens, between which an environment wrote or a branch begins."""
    return sum(not turn.is_given for turn in list_turns(response))


def list_spans_of_parts(response: Response) -> list[list[VersionSpan]]:
    begins = {branch.start for branch in response.branches}
    parts: list[list[VersionSpan]] = [[]]
    for span in response.spans:
        if span.start in begins and parts[-1]:
            parts.append([])
        parts[-1].append(span)
    return parts


class Rewarded(Protocol):
    @property
    def reward(self) -> float | None: ...


def list_rewards(responses: Sequence[Rewarded]) -> list[float]:
    """List the rewards of the responses that are scored."""
    return [response.reward for response in responses if response.reward is not None]


def divide_reward(response: Response) -> list[float]:
    """Divide a response's reward over its turns: what no turn was given belongs to the last one."""
    assert response.reward is not None
    rewards = response.turn_rewards or [0.0] * count_turns(response)
    return [*rewards[:-1], response.reward - math.fsum(rewards[:-1])]


def find_span_problems(response: Response, tag: str, max_turns: int, prompt_length: int) -> Iterator[str]:
    """Yield what is wrong with a response's spans, all of which must be of the version `tag` or the environment's.

    `max_turns` is the most turns that the policy may take, 0 without an environment.
    """
    num_tokens, position = len(response.tokens) // 4, 0
    own = {tag, ENVIRONMENT} if max_turns else {tag}
    for span in response.spans:
        if span.version not in own:
            yield f"tokens {span.start} to {span.end} have version {span.version!r}, wanted {tag!r}"
        if span.start != position or span.end < span.start:
            yield f"the span of tokens {span.start} to {span.end} must start at token {position} and not end before it"
        position = span.end
    if position != num_tokens:
        yield f"its spans end at token {position} of {num_tokens}"
    elif max_turns:
        yield from find_branch_problems(response, prompt_length)
        yield from _find_turn_problems(response, max_turns, prompt_length)
    elif response.branches:
        yield "it branches, without an environment"


def _find_turn_problems(response: Response, max_turns: int, prompt_length: int) -> Iterator[str]:
    rootless = {branch.start for branch in response.branches if branch.after == -prompt_length}
    if any(span.start in rootless and span.version != ENVIRONMENT for span in response.spans):
        yield "the policy wrote the first token of a part that follows no token"
    for spans in list_spans_of_parts(response):
        are_given = [span.version == ENVIRONMENT for span in spans]
        if are_given and are_given[-1]:
            yield f"the last token of a part, {spans[-1].end - 1}, must be the policy's, and the environment wrote it"
        if any(one and other for one, other in itertools.pairwise(are_given)):
            yield "the environment wrote two turns without one of the policy between them"
    if any(span.start == span.end for span in response.spans):
        yield "it has a turn without tokens"
    if (num_turns := count_turns(response)) > max_turns:
        yield f"the policy took {num_turns} turns, and {max_turns} were allowed"
    if response.turn_rewards and len(response.turn_rewards) != num_turns:
        yield f"it has rewards of {len(response.turn_rewards)} turns, and took {num_turns}"
    if decode_log_probs(response.log_probs)[~mask_sampled(response)].any():
        yield "a token of the environment has a log-prob, as if the policy had sampled it"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A turn: tokens [start, end) of a response, which the policy or the environment wrote."""

    start: int
    end: int
    is_given: bool
    """True if the environment wrote it."""
    after: int | None = None
    """`Branch.after` of the branch that it begins; None if it follows the turn before it."""


def list_turns(response: Response) -> list[Turn]:
    """List the turns of a response, in the order of its tokens; none reaches over the start of a branch."""
    branches = {branch.start: branch.after for branch in response.branches}
    turns: list[Turn] = []
    for span in response.spans:
        is_given = span.version == ENVIRONMENT
        if turns and span.start not in branches and turns[-1].is_given == is_given:
            turns[-1] = dataclasses.replace(turns[-1], end=span.end)
        else:
            turns.append(Turn(span.start, span.end, is_given, branches.get(span.start)))
    return turns
