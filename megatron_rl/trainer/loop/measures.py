"""Measures of an iteration, by each replica, and the metrics of the iteration and of an evaluation."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import msgspec
import numpy as np

from megatron_rl.algorithm.advantages import is_all_equal
from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol.provenance import name_source
from megatron_rl.shared.protocol.turns import count_sampled, count_turns, list_rewards
from megatron_rl.shared.protocol.wire import Cause, Evaluated, Group, GroupPart, Mismatch, Response, Unscored
from megatron_rl.trainer.data.batch import BatchFacts
from megatron_rl.trainer.data.slots import Identity

_LONGEST_FAILURE = 500


class Measures(msgspec.Struct):
    """Sums, least and largest values, and first texts by name; `merge` adds those of another rank."""

    sums: dict[str, float] = {}
    least: dict[str, float] = {}
    largest: dict[str, float] = {}
    first: dict[str, str] = {}

    def add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value

    def bound(self, name: str, value: float) -> None:
        """Keep the least and the largest value."""
        self.least[name] = min(self.least.get(name, math.inf), value)
        self.largest[name] = max(self.largest.get(name, -math.inf), value)

    def merge(self, other: "Measures") -> None:
        for name, value in other.sums.items():
            self.add(name, value)
        for name, value in other.least.items():
            self.least[name] = min(self.least.get(name, math.inf), value)
        for name, value in other.largest.items():
            # NaN counts as the largest: Python's max would lose it.
            known = self.largest.get(name, -math.inf)
            self.largest[name] = value if value != value else max(known, value)
        self.first = {**other.first, **self.first}


def measure_batches(batches: Iterable[BatchFacts]) -> Measures:
    measures = Measures()
    for batch in batches:
        measures.add("tokens.computed", batch.num_tokens)
        measures.add("micro_batches", 1)
        measures.bound("micro_batch", batch.num_tokens)
        for part in batch.parts:
            _add_part(measures, part)
    return measures


def _add_part(measures: Measures, part: GroupPart) -> None:
    source = f"source.{name_source(part.row)}"
    if part.begins:
        all_equal = bool(part.rewards) and is_all_equal(np.asarray(part.rewards))
        measures.add("groups", 1)
        measures.add("groups.unscored", not part.rewards)
        measures.add("groups.all_equal", all_equal)
        measures.add(f"{source}.groups", 1)
        measures.add(f"{source}.all_equal", all_equal)
        measures.add("tokens.prompt", len(part.prompt_tokens) // 4)
    for failed in part.unscored:
        measures.add("unscored", 1)
        _add_failure(measures, part, failed)
    for response in part.responses:
        _add_failure(measures, part, response)
        length = count_sampled(response)
        measures.add("responses", 1)
        if part.turn_rewards:
            # Of conversations: an environment need not have written a token of one.
            measures.add("tokens.environment", len(response.tokens) // 4 - length)
            measures.add("turns", count_turns(response))
            measures.add("branches", len(response.branches))
            measures.add("limit", response.finish_reason == "limit")
        measures.add("tokens.response", length)
        measures.bound("length", length)
        measures.add("truncated", response.finish_reason not in ("stop", "failed"))
        assert response.reward is not None
        measures.add("reward", response.reward)
        measures.add("reward.square", response.reward**2)
        measures.bound("reward", response.reward)
        measures.add(f"{source}.responses", 1)
        measures.add(f"{source}.reward", response.reward)
        measures.add(f"{source}.length", length)
        for name, value in response.components.items():
            if value is not None:
                measures.add(f"component.{name}", value)
                measures.add(f"component.{name}.count", 1)


def _add_failure(measures: Measures, part: GroupPart, response: Response | Unscored) -> None:
    for cause in response.refilled:
        measures.add(f"refilled.{cause}", 1)
    if response.cause:
        measures.add(f"failures.{response.cause}", 1)
        has_failed = response.cause in ("raised", "timeout", "process")
        measures.add("failed", has_failed)
        if has_failed:
            measures.first.setdefault("failure", f"{part.row}: {response.failure[:_LONGEST_FAILURE]}")


@dataclasses.dataclass(frozen=True)
class UpdateOutcome:
    gradient_norm: float
    learning_rate: float
    was_taken: bool
    denominator: float
    gradient_zeros: int | None = None
    """Elements of the gradient that are zero; None without --log-num-zeros-in-grad."""
    critic: "UpdateOutcome | None" = None
    """The critic's update."""


NOTHING_SAMPLED = Mismatch(mean=0.0, largest=0.0, bound=None)
"""The mismatch of an iteration whose tokens no engine sampled."""


@dataclasses.dataclass(frozen=True)
class Learned:
    """The outcome of an iteration's updates."""

    updates: Sequence[UpdateOutcome]
    measures: Measures
    """Measures of this rank's replica, on the replica's reporting rank; each rank has its part of auxiliary losses."""
    mismatch: Mismatch = NOTHING_SAMPLED
    """Difference from the engines' log-probs over all replicas' tokens; the same on every rank."""
    batches: Sequence[BatchFacts] = ()
    """Facts of the replica's batches, in the order of their slots."""
    log_probs: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
    """Log-probs of the targets of the first slots, by slot: the trainer's, under the policy that sampled.

    Only the replica's reporting rank has them.
    """


def compute_metrics(measures: Measures, updates: Sequence[UpdateOutcome], largest_micro_batch: int) -> dict[str, Any]:
    """Compute the metrics of an iteration from all replicas' measures."""
    sums = measures.sums
    responses, targets = sums["responses"], sums["targets"]
    mean = sums["reward"] / responses
    reward: dict[str, float] = {
        "mean": mean,
        "std": math.sqrt(max(0.0, sums["reward.square"] / responses - mean**2)),
        "min": measures.least["reward"],
        "max": measures.largest["reward"],
        "all_equal_groups": int(sums["groups.all_equal"]),
    }
    for name in sums:
        if name.startswith("component.") and not name.endswith(".count"):
            reward[name.removeprefix("component.")] = sums[name] / sums[f"{name}.count"]
    metrics: dict[str, Any] = {
        "reward": reward,
        "groups": int(sums["groups"]),
        "loss": sums["loss"] / sum(update.denominator for update in updates),
        "entropy": sums["entropy"] / targets,
        "ratio": sums["ratio"] / targets,
        **{
            f"clip_fraction_{bound}": sums[f"clipped_{bound}"] / targets
            for bound in ("low", "high", "dual")
            if f"clipped_{bound}" in sums
        },
        "gradient_norm": updates[-1].gradient_norm,
        "learning_rate": updates[-1].learning_rate,
        "skipped_updates": sum(not update.was_taken for update in updates),
        "mismatch": {
            "mean": sums["mismatch"] / targets,
            "max": measures.largest["mismatch"],
            "kl": sums["mismatch_kl"] / targets,
            "differing": int(sums["mismatch_differing"]),
        },
        "responses": {
            "count": int(responses),
            "length_mean": sums["tokens.response"] / responses,
            "length_max": int(measures.largest["length"]),
            "truncated": sums["truncated"] / responses,
        },
        "tokens": {
            "prompt": int(sums["tokens.prompt"]),
            "response": int(sums["tokens.response"]),
            "computed": int(sums["tokens.computed"]),
            "utilisation": sums["tokens.computed"] / (sums["micro_batches"] * largest_micro_batch),
        },
    }
    if "turns" in sums:
        metrics["responses"] |= {name: sums[name] / responses for name in ("turns", "limit")}
        metrics["responses"]["failed"] = 0.0
        metrics["tokens"]["environment"] = int(sums["tokens.environment"])
    metrics["responses"] |= _describe_failures(sums)
    if "failure" in measures.first:
        metrics["responses"]["failure"] = measures.first["failure"]
    if sums.get("branches"):
        metrics["responses"]["branches"] = sums["branches"] / responses
    if len(sources := _describe_sources(sums)) > 1:
        metrics["sources"] = sources
    own = {name.removeprefix("metric."): sums[name] / targets for name in sums if name.startswith("metric.")}
    if own:
        metrics["metric"] = own
    if updates[-1].gradient_zeros is not None:
        metrics["gradient_zeros"] = updates[-1].gradient_zeros
    if "kl" in sums:
        metrics["kl"] = sums["kl"] / targets
    if "teacher_kl" in sums:
        metrics["teacher_kl"] = sums["teacher_kl"] / targets
    # Responses without a token of the policy have no targets.
    targets_of = {
        name.removeprefix("teacher_targets."): sums[name] for name in sums if name.startswith("teacher_targets.")
    }
    if chosen := {name: count for name, count in targets_of.items() if count}:
        metrics["teachers"] = {name: sums[f"teacher_kl.{name}"] / count for name, count in chosen.items()}
    if updates[-1].critic is not None:
        metrics["critic"] = _describe_critic(sums, updates[-1].critic)
    if "entropy_policy" in sums:
        metrics["entropy_policy"] = sums["entropy_policy"] / targets
    if "correction" in sums:
        metrics["correction"] = {
            "mean": sums["correction"] / targets,
            "bounded": sums["correction.bounded"] / targets,
            "rejected": sums["correction.rejected"] / targets,
        }
    if replayed := sums.get("routing.replayed"):
        metrics["routing"] = {"replayed": int(replayed), "changed": sums["routing.changed"] / replayed}
    return metrics | describe_auxiliary(sums)


def _describe_critic(sums: Mapping[str, float], update: UpdateOutcome) -> dict[str, float]:
    """Compute the means of the critic's values, and the share of their targets' variance that the values explain."""
    targets = sums["targets"]
    variance = sums["critic.target_square"] / targets - (sums["critic.target"] / targets) ** 2
    return {
        **{name: sums[f"critic.{name}"] / targets for name in ("loss", "value", "target", "clipped")},
        "explained": 1 - sums["critic.away_square"] / targets / variance if variance > 0 else 0.0,
        "gradient_norm": update.gradient_norm,
        "learning_rate": update.learning_rate,
    }


def _describe_failures(sums: Mapping[str, float]) -> dict[str, Any]:
    """Compute the shares of all responses that failed, and that are not scored, and counts by cause."""
    counts = {
        name: {cause: int(sums[f"{name}.{cause}"]) for cause in get_args(Cause) if f"{name}.{cause}" in sums}
        for name in ("failures", "refilled")
    }
    described: dict[str, Any] = {name: of_causes for name, of_causes in counts.items() if of_causes}
    if "failures" in described:
        unscored = sums.get("unscored", 0.0)
        num_all = sums["responses"] + unscored
        described |= {"failed": sums["failed"] / num_all, "unscored": unscored / num_all}
    if sums["groups.unscored"]:
        described["unscored_groups"] = int(sums["groups.unscored"])
    return described


def _describe_sources(sums: Mapping[str, float]) -> dict[str, dict[str, float]]:
    names = [name.removesuffix(".groups") for name in sums if name.startswith("source.") and name.endswith(".groups")]
    return {
        name.removeprefix("source."): {
            "reward": sums[f"{name}.reward"] / sums[f"{name}.responses"],
            "groups": int(sums[f"{name}.groups"]),
            "all_equal_groups": int(sums[f"{name}.all_equal"]),
            "length_mean": sums[f"{name}.length"] / sums[f"{name}.responses"],
        }
        for name in sorted(names)
        if f"{name}.responses" in sums
    }


def describe_auxiliary(sums: Mapping[str, float]) -> dict[str, float]:
    """Compute the means of the routers' auxiliary losses."""
    names = ("moe_load_balancing_loss", "moe_z_loss")
    return {name: sums[name] / sums["micro_batches"] for name in names if name in sums}


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Measures the model between updates; without an interval never, as on ranks that have no part in it."""

    interval: int | None = None
    evaluate: Callable[[Identity], dict[str, Any]] = lambda identity: {}
    """Evaluates the model of that identity, and returns the metrics."""

    def is_due(self, version: int, is_last: bool) -> bool:
        """Return whether to evaluate this version: every `interval` iterations, and at the end."""
        return self.interval is not None and (is_last or version % self.interval == 0)


def summarize(evaluated: Evaluated, pass_reward: float) -> dict[str, Any]:
    """Compute the metrics: `pass` is pass@k over all k responses to a prompt, `mean` the mean reward of a response.

    Responses that are not scored count for neither, and prompts that have only such responses do not count.
    """
    everything = [response for group in evaluated.groups for response in group.responses]
    scored = [response for response in everything if response.reward is not None]
    if not scored:
        raise MegatronRLError(
            f"no response of the evaluation is scored: {everything[0].failure}; correct that and resume"
        )
    num_unscored = len(everything) - len(scored)
    by_source: dict[str, list[Group]] = {}
    for group in evaluated.groups:
        if list_rewards(group.responses):
            by_source.setdefault(name_source(group.prompt.row), []).append(group)
    sources = {name: _count_success(by_source[name], pass_reward) for name in sorted(by_source)}
    return {
        **_count_success(evaluated.groups, pass_reward),
        "num_samples": len(evaluated.groups[0].responses),
        "length_mean": statistics.fmean(map(count_sampled, scored)),
        **({"unscored": num_unscored} if num_unscored else {}),
        **({"sources": sources} if len(sources) > 1 else {}),
        **({"command": evaluated.figures} if isinstance(evaluated.figures, dict) else {}),
        **({"command_failed": 1} if isinstance(evaluated.figures, str) else {}),
    }


def _count_success(groups: Sequence[Group], pass_reward: float) -> dict[str, float]:
    rewards = [scored for group in groups if (scored := list_rewards(group.responses))]
    return {
        "mean": statistics.fmean(reward for group in rewards for reward in group),
        "pass": statistics.fmean(max(group) >= pass_reward for group in rewards),
        "num_prompts": len(rewards),
    }
