"""Lines for people about iterations in which all responses of each group got the same reward, or some failed.

Pure. Such iterations come in streaks. A warning says that a streak begins, and a note gives the length of a longer one.
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.algorithm.library import ADVANTAGES
from megatron_rl.command_line.algorithm_checks import list_other_terms
from megatron_rl.config.settings import Settings
from megatron_rl.errors import count_noun

# The terms that advantages of these names have though all rewards of each group are equal.
_OF_ADVANTAGES = {
    "global": ["the distance to the mean reward of the iteration before (--grpo-advantage global)"],
    "gdpo": ["reward functions whose values differ where their sums do not (--grpo-advantage gdpo)"],
}


class Failures:
    """Follows the responses whose environment or agent failed."""

    def __init__(self, on_error: str) -> None:
        """`on_error` is the value of --rollout-env-on-error."""
        self._has_failed = False
        is_scored = on_error not in ("exclude", "refill", "stop")
        self._told = "have the reward of" if is_scored else "are not trained on, by"

    def follow(self, metrics: Mapping[str, Any]) -> str | None:
        """Return the line after the first of consecutive iterations with failures."""
        share, had_failed = _share_of_failures(metrics), self._has_failed
        num_silent = metrics.get("responses", {}).get("failures", {}).get("no reward", 0)
        self._has_failed = share > 0 or num_silent > 0
        if not self._has_failed or had_failed:
            return None
        if not share:
            responses = count_noun(num_silent, "response")
            return f"warning: every reward function returned None for {responses}, which are not trained on"
        name = "all responses" if share == 1 else f"{share:.0%} of responses"
        reason = metrics["responses"].get("failure", "the sidecar's log has it")
        return f"warning: {name} failed, and {self._told} --rollout-env-on-error; the first reason: {reason}"


def _share_of_failures(metrics: Mapping[str, Any]) -> float:
    return float(metrics.get("responses", {}).get("failed", 0.0))


class EqualRewards:
    """Follows the iterations of a run, and returns the lines about them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._length = 0
        advantage = ADVANTAGES.get(settings.algorithm.advantage)
        self._compares = advantage is None or advantage.compares

    def follow(self, metrics: Mapping[str, Any]) -> str | None:
        """Return the line after an iteration with these metrics, if there is one."""
        groups, equal = metrics["groups"], metrics["reward"]["all_equal_groups"]
        # Failures, which all have the same reward, are told by themselves.
        if self._compares and equal == groups and _share_of_failures(metrics) < 1:
            self._length += 1
            return self._warn(groups) if self._length == 1 else None
        length, self._length = self._length, 0
        if length < 2:
            return None
        return f"note: rewards within groups differ again, after {length} iterations in which none did"

    def end(self) -> str | None:
        """Return the line at the end of the run, if there is one."""
        length, self._length = self._length, 0
        if length < 2:
            return None
        return f"note: in each of the last {length} iterations every response of a group got the same reward"

    def _warn(self, num_groups: int) -> str:
        others = [*_OF_ADVANTAGES.get(self._settings.algorithm.advantage, ()), *list_other_terms(self._settings)]
        gradient = f"the gradient can come only from {' and '.join(others)}" if others else "the gradient is zero"
        return (
            f"warning: in all {num_groups} groups every response got the same reward: {gradient} (repeated only "
            "after rewards have differed)"
        )
