"""Evaluation on held-out prompts: engines sample responses to them between publish and submit."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_rl.config.settings import EvaluationConfig
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.provenance import name_source
from megatron_rl.shared.protocol.turns import count_sampled
from megatron_rl.shared.protocol.wire import Evaluated, Evaluation, Group, Prompt, Sampling
from megatron_rl.trainer.data.slots import Identity


class Evaluator(Protocol):
    """Measures the model between updates, on the ranks that have a part in it."""

    def is_due(self, version: int, is_last: bool) -> bool:
        """Return whether to evaluate this version: every `interval` iterations, and at the end."""
        ...

    def evaluate(self, identity: Identity) -> dict[str, Any]:
        """Evaluate the model of that identity, and return the metrics."""
        ...


class NoEvaluator:
    """Evaluates nothing: for runs without evaluation, and ranks that have no part in it."""

    def is_due(self, version: int, is_last: bool) -> bool:
        return False

    def evaluate(self, identity: Identity) -> dict[str, Any]:
        return {}


@dataclasses.dataclass(frozen=True)
class EngineEvaluator:
    """Has engines respond. Rank 0 alone has it; the others wait meanwhile until rank 0 submits the iteration."""

    config: EvaluationConfig
    client: RolloutClient
    prompts: Sequence[Prompt]
    sampling: Sampling
    deadline_seconds: float
    write_samples: Callable[[int, Sequence[Group]], None] = lambda version, groups: None
    """Called with the version and the groups of each evaluation."""

    def is_due(self, version: int, is_last: bool) -> bool:
        interval = self.config.interval
        return interval is not None and (is_last or version % interval == 0)

    def evaluate(self, identity: Identity) -> dict[str, Any]:
        evaluated = self.client.evaluate(
            Evaluation(
                run=identity.run,
                version=identity.version,
                fingerprint=identity.fingerprint,
                prompts=list(self.prompts),
                group_size=self.config.num_samples,
                sampling=self.sampling,
                deadline_seconds=self.deadline_seconds,
            )
        )
        self.write_samples(identity.version, evaluated.groups)
        return summarize(evaluated, self.config.pass_reward)


def summarize(evaluated: Evaluated, pass_reward: float) -> dict[str, Any]:
    """Compute the metrics: `pass` is pass@k over all k responses to a prompt, `mean` the mean reward of a response."""
    lengths = [count_sampled(response) for group in evaluated.groups for response in group.responses]
    by_source: dict[str, list[Group]] = {}
    for group in evaluated.groups:
        by_source.setdefault(name_source(group.prompt.row), []).append(group)
    sources = {name: _count_success(by_source[name], pass_reward) for name in sorted(by_source)}
    return {
        **_count_success(evaluated.groups, pass_reward),
        "num_samples": len(evaluated.groups[0].responses),
        "length_mean": statistics.fmean(lengths),
        **({"sources": sources} if len(sources) > 1 else {}),
    }


def _count_success(groups: Sequence[Group], pass_reward: float) -> dict[str, float]:
    rewards = [[response.reward for response in group.responses] for group in groups]
    return {
        "mean": statistics.fmean(reward for group in rewards for reward in group),
        "pass": statistics.fmean(max(group) >= pass_reward for group in rewards),
        "num_prompts": len(rewards),
    }
