"""The writers of a response's tokens: the policy, turn after turn, or the environment between its turns.

The spans of a response say it. Those of the policy name the version that sampled them; those of the environment name
`ENVIRONMENT`. An environment may write first, but the policy writes last: what an environment says then has no reader.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_rl.shared.protocol.wire import Response, VersionSpan, decode_log_probs

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


def count_turns(spans: Sequence[VersionSpan]) -> int:
    """Count the turns of the policy: runs of its tokens, between which an environment wrote."""
    are_given = [True, *(span.version == ENVIRONMENT for span in spans)]
    return sum(before and not given for before, given in itertools.pairwise(are_given))


def find_span_problems(response: Response, tag: str, max_turns: int) -> Iterator[str]:
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
        yield from _find_turn_problems(response, max_turns)


def _find_turn_problems(response: Response, max_turns: int) -> Iterator[str]:
    spans = response.spans
    are_given = [span.version == ENVIRONMENT for span in spans]
    if are_given and are_given[-1]:
        yield "its last token must be the policy's, and the environment wrote it"
    if any(one and other for one, other in itertools.pairwise(are_given)):
        yield "the environment wrote two turns without one of the policy between them"
    if any(span.start == span.end for span in spans):
        yield "it has a turn without tokens"
    if (num_turns := count_turns(spans)) > max_turns:
        yield f"the policy took {num_turns} turns, and {max_turns} were allowed"
    if decode_log_probs(response.log_probs)[~mask_sampled(response)].any():
        yield "a token of the environment has a log-prob, as if the policy had sampled it"
