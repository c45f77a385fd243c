"""A reward from reasoning-gym, by each task's own rule: --reward examples/gym/reward.py:score

A row's column `entry` is an entry of a data set of reasoning-gym.
"""

import functools
from typing import Any

import reasoning_gym

get_scorer = functools.cache(reasoning_gym.get_score_answer_fn)


def score(completions: list[list[dict[str, Any]]], entry: list[dict[str, Any]], **columns: object) -> list[float]:
    """Return what the task of each row gives for the answer."""
    pairs = zip(completions, entry, strict=True)
    return [get_scorer(row["metadata"]["source_dataset"])(chat[-1]["content"], row) for chat, row in pairs]
