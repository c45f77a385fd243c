"""exact[:COLUMN]: 1 for a completion that equals the answer, ignoring white space at both ends, else 0."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.rewards.types import get_column, get_text


def make(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    name = argument or "answer"

    def exact(completions: Sequence[Any], **columns: Any) -> list[float]:
        answers = get_column(columns, name, "exact")
        return [
            float(get_text(completion).strip() == str(answer).strip())
            for completion, answer in zip(completions, answers, strict=True)
        ]

    return exact
