"""regex:PATTERN: 1 for a completion in which the pattern is found, else 0; a dot matches a line's end too."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.rewards.types import get_text


def make(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    if not argument:
        raise ValueError("regex needs a pattern: write regex:PATTERN")
    try:
        pattern = re.compile(argument, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{argument!r} is not a regular expression: {error}") from None

    def regex(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(pattern.search(get_text(completion)) is not None) for completion in completions]

    return regex
