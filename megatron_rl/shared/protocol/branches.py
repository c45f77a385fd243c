"""The parts of a response that branches: what each of them follows.

Tokens are counted as in the spans of a response, and those of the prompt from its end: -1 is its last one.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_rl.shared.protocol.wire import Response


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
