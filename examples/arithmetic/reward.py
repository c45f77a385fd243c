"""Rewards, in TRL's signature: --reward examples/arithmetic/reward.py:right_answer"""

import random
from typing import Any


def right_answer(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
) -> list[float]:
    """Return one where the completion is the answer and nothing else."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def shuffled(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
) -> list[float]:
    """Return the control: the rewards of a group, each given to a response drawn at random.

    Mean and spread of every group stay, and so do the sizes of its advantages; but each response's advantage is zero on
    average, whatever it says. Any learning from these is learning from noise.
    """
    rewards = right_answer(prompts, completions, completion_ids, answer)
    return random.sample(rewards, len(rewards))
