"""What the ready-made rewards share: the text of a completion, and the column that holds the answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.rewards.types import GIVEN, MissingColumn


def text_of(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """A completion as text, also where it is a list of chat messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def column(columns: Mapping[str, Sequence[Any]], name: str, reward: str) -> Sequence[Any]:
    """A column of the data; the error says which there are."""
    if name not in columns:
        there = ", ".join(sorted(set(columns) - set(GIVEN))) or "none"
        raise MissingColumn(
            f"the data has no column {name} (it has {there}): write --answer-key COLUMN for the column that holds the "
            f"answer, or --reward {reward}:COLUMN"
        )
    return columns[name]
