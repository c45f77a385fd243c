"""format[:TAG,TAG...]: 1 for a completion that is these tagged parts in this order, each once, and nothing else.

Without tags `<think>...</think>` and then `<answer>...</answer>`. White space may stand around the parts.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.rewards.types import get_text


def make(argument: str | None, timeout: float) -> Callable[..., list[float]]:
    tags = (argument or "think,answer").split(",")
    for tag in tags:
        if not re.fullmatch(r"\w+", tag):
            raise ValueError(f"{tag!r} is not the name of a tag: write format:think,answer")
    pattern = re.compile(r"\s*".join(["", *(rf"<{tag}>(.*?)</{tag}>" for tag in tags), ""]), re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]

    def well_formed(text: str) -> bool:
        return all(text.count(mark) == 1 for mark in marks) and pattern.fullmatch(text) is not None

    def format(completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(well_formed(get_text(completion))) for completion in completions]

    return format
