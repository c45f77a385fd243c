"""The settings of environments. As in `trainer`."""

import dataclasses

from megatron_rl.config.flag import own_flag


@dataclasses.dataclass(frozen=True)
class EnvironmentConfig:
    """Environments that the policy acts in, turn after turn, and the processes that run them."""

    source: str | None = own_flag(
        None,
        "A class of environments, FILE.py:CLASS: each response is a conversation with one of them.",
        "--rollout-env",
    )
    max_turns: int = own_flag(
        8, "The most turns of the policy in a response.", "--rollout-env-max-turns", bound="at least 1"
    )
    timeout: float = own_flag(
        30.0,
        "Seconds that a call of an environment may take.",
        "--rollout-env-timeout",
        bound="a finite duration above 0",
    )
    on_error: str = own_flag(
        "0",
        "The reward of a response whose environment fails, which ends there; or `stop`, to end the run.",
        "--rollout-env-on-error",
    )
    workers: int = own_flag(2, "Processes that run environments.", "--rollout-env-workers", bound="at least 1")
    concurrency: int = own_flag(256, "The most conversations at once.", "--rollout-env-concurrency", bound="at least 1")
