"""How good the policy is on held-out prompts: engines sample responses to them between publish and submit."""

import statistics
from typing import Any

from megatron_rl.config.settings import EvaluationConfig
from megatron_rl.protocol.client import RolloutClient
from megatron_rl.protocol.wire import Evaluated, Evaluation, Prompt, Sampling


class Evaluator:
    """Evaluates on rank 0; meanwhile the other ranks wait for it to submit the iteration."""

    def __init__(
        self,
        config: EvaluationConfig,
        client: RolloutClient,
        run: str,
        prompts: list[Prompt],
        sampling: Sampling,
        deadline_seconds: float,
    ):
        self._config = config
        self._client = client
        self._run = run
        self._prompts = prompts
        self._sampling = sampling
        self._deadline_seconds = deadline_seconds

    def is_due(self, version: int, is_last: bool) -> bool:
        """Whether to evaluate now: every `interval` iterations, and at the end."""
        interval = self._config.interval
        return interval is not None and (is_last or version % interval == 0)

    def evaluate(self, version: int, fingerprint: str) -> Evaluated:
        """Have the engines respond to all held-out prompts, and return the responses."""
        return self._client.evaluate(
            Evaluation(
                run=self._run,
                version=version,
                fingerprint=fingerprint,
                prompts=self._prompts,
                group_size=self._config.num_samples,
                sampling=self._sampling,
                deadline_seconds=self._deadline_seconds,
            )
        )

    def summary(self, evaluated: Evaluated) -> dict[str, Any]:
        """Return the mean reward, and the share of prompts for which some response passes."""
        return summary(evaluated, self._config.pass_reward)


def summary(evaluated: Evaluated, pass_reward: float) -> dict[str, Any]:
    """Summarise: `pass` is pass@k over all k responses to a prompt, `mean` the mean reward of a single response."""
    rewards = [[response.reward for response in group.responses] for group in evaluated.groups]
    lengths = [len(response.tokens) // 4 for group in evaluated.groups for response in group.responses]
    return {
        "mean": statistics.fmean(reward for group in rewards for reward in group),
        "pass": statistics.fmean(max(group) >= pass_reward for group in rewards),
        "num_prompts": len(rewards),
        "num_samples": len(rewards[0]),
        "length_mean": statistics.fmean(lengths),
    }
