"""The critic, a model that is trained to predict the rewards to come: advantages are what goes beyond it (`--critic`).

With V the value before a target, r its reward, and V' the value before the next target of its response, 0 after the
last one: d = r + g V' - V. The advantage of a target is the sum of d over it and later targets, each discounted by g
times lambda a token (generalized advantage estimation). The critic learns V plus such a sum with another lambda.

Letters: N targets, S responses.
"""

from typing import Any

import torch

from megatron_rl.algorithm.declaration import CRITIC, OLD_CRITIC, LossRole, RoleLogProbs, Term
from megatron_rl.algorithm.sequences import Sequences


def judge(log_probs: RoleLogProbs, sequences: Sequences, config: Any) -> Term:
    """Compute the advantages from the old critic's values, and the critic's own loss."""
    value_N, rewards_N = log_probs.others[CRITIC], log_probs.rewards_N
    assert rewards_N is not None
    old_N = log_probs.others.get(OLD_CRITIC, value_N).detach()
    beyond_N = rewards_N + config.gae_discount * sequences.shift(old_N) - old_N
    advantages_N = sequences.sum_from(beyond_N, config.gae_discount * find_lambda(sequences, config, old_N.dtype))
    of_critic = config.gae_lambda if config.critic_lambda is None else config.critic_lambda
    target_N = old_N + sequences.sum_from(beyond_N, config.gae_discount * of_critic)
    error_N = (value_N - target_N).square()
    is_clipped_N = torch.zeros_like(error_N, dtype=torch.bool)
    if config.critic_clip is not None:
        bounded_N = old_N + (value_N - old_N).clamp(-config.critic_clip, config.critic_clip)
        is_clipped_N = (bounded_N - target_N).square() > error_N
        error_N = error_N.maximum((bounded_N - target_N).square())
    with torch.no_grad():
        measured = {
            "loss": error_N / 2,
            "value": old_N,
            "target": target_N,
            "target_square": target_N.double().square(),
            "away_square": (target_N - old_N).double().square(),
            "clipped": is_clipped_N,
        }
        sums = {f"critic.{name}": value.sum(dtype=torch.float64) for name, value in measured.items()}
    return Term(advantages_N=advantages_N, loss_N=config.critic_loss_coef * error_N / 2, sums=sums)


def find_lambda(sequences: Sequences, config: Any, dtype: torch.dtype) -> float | torch.Tensor:
    """Return lambda, one for each response with `--gae-length-alpha`: 1 - 1 / (alpha length), and at least 0."""
    if config.gae_length_alpha is None:
        return float(config.gae_lambda)
    return (1 - 1 / (config.gae_length_alpha * sequences.lengths_S.clamp(min=1).to(dtype))).clamp(min=0.0)


ROLE = LossRole(CRITIC, is_used=lambda config: config.critic is not None, compute=judge)
