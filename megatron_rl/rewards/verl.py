"""Support for reward functions of verl: a file needs only `reward = from_verl(compute_score)`."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron_rl.rewards.types import get_text


def from_verl(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's `compute_score` in a reward function of TRL's signature.

    It has the parameters `(data_source, solution_str, ground_truth, extra_info)` and may be async. Rows have verl's
    columns: `data_source`, `extra_info`, and `reward_model` with its `ground_truth`, or a column `ground_truth`. If a
    score is a dict, its "score" counts.
    """

    async def reward(completions: Sequence[Any], **columns: Any) -> list[Any]:
        scores = []
        for index, completion in enumerate(completions):
            score = compute_score(
                data_source=_get(columns, "data_source", index),
                solution_str=get_text(completion),
                ground_truth=_ground_truth(columns, index),
                extra_info=_get(columns, "extra_info", index),
            )
            score = await score if inspect.isawaitable(score) else score
            scores.append(score["score"] if isinstance(score, dict) else score)
        return scores

    return reward


def _get(columns: dict[str, Any], name: str, index: int) -> Any:
    return columns[name][index] if name in columns else None


def _ground_truth(columns: dict[str, Any], index: int) -> Any:
    if "ground_truth" in columns:
        return columns["ground_truth"][index]
    if "reward_model" in columns:
        return columns["reward_model"][index]["ground_truth"]
    raise ValueError("the data must have a column ground_truth, or verl's reward_model")
