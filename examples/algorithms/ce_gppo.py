"""CE-GPPO (https://arxiv.org/abs/2509.20712): clipped tokens keep a gradient of bounded size.

PPO's clip ends the gradient of a token whose ratio has left the bounds. Here such a token counts as if its ratio were
the bound, times a weight: `KEEP_LOW` for bad tokens that have become unlikely, `KEEP_HIGH` for good tokens that have
become likely. With weights of 0 the gradient is that of PPO, with weights of 1 that of GPPO
(https://arxiv.org/abs/2508.07629).

    --grpo-loss examples/algorithms/ce_gppo.py:ce_gppo --grpo-metric examples/algorithms/ce_gppo.py:kept
"""

KEEP_LOW, KEEP_HIGH = 0.75, 1.0


def ce_gppo(targets, settings):
    """Return the loss of each token; the signs of advantages and the ratios decide which tokens are kept by weight."""
    is_low_N, is_high_N = _find_clipped(targets, settings)
    ratio_N = targets.ratio_N
    fixed_N = ratio_N.detach()
    # Divided by the ratio, which is held fixed: the gradient is the bound's times that of the log-prob.
    weight_N = fixed_N.new_ones(()).where(~is_low_N, KEEP_LOW * (1 - settings.clamp_eps_lower) / fixed_N)
    weight_N = weight_N.where(~is_high_N, KEEP_HIGH * (1 + settings.clamp_eps_upper) / fixed_N)
    return -weight_N * ratio_N * targets.advantages_N


def kept(targets, settings):
    """Return 1 for each token that PPO would clip, else 0: the metric is their share."""
    is_low_N, is_high_N = _find_clipped(targets, settings)
    return (is_low_N | is_high_N).float()


def _find_clipped(targets, settings):
    ratio_N, advantages_N = targets.ratio_N.detach(), targets.advantages_N
    is_low_N = (ratio_N < 1 - settings.clamp_eps_lower) & (advantages_N < 0)
    is_high_N = (ratio_N > 1 + settings.clamp_eps_upper) & (advantages_N > 0)
    return is_low_N, is_high_N


def centered_ranks(group, settings):
    """Return advantages by rank (`--grpo-advantage`): only the order of rewards counts, from -1 to 1."""
    rewards_K = group.rewards_K
    below_K = (rewards_K[:, None] > rewards_K).sum(1)
    above_K = (rewards_K[:, None] < rewards_K).sum(1)
    return (below_K - above_K) / (len(rewards_K) - 1)
