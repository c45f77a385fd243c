"""The naive twin of ops/log_probs: every logit at once, and torch's own softmax and gradient.

Letters: N targets, E hidden size, V columns of the vocabulary.
"""

import torch


def naive_log_probs(
    hidden_NE: torch.Tensor, weight_VE: torch.Tensor, targets_N: torch.Tensor, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Return log-probs at each row's target, over the columns below `vocab_size`, in float32 at least."""
    return _all_log_probs(hidden_NE, weight_VE, vocab_size, temperature).gather(1, targets_N[:, None])[:, 0]


def naive_entropies(
    hidden_NE: torch.Tensor, weight_VE: torch.Tensor, vocab_size: int, temperature: float
) -> torch.Tensor:
    """Return the entropy of each row's distribution over those columns."""
    log_probs_NV = _all_log_probs(hidden_NE, weight_VE, vocab_size, temperature)
    return -(log_probs_NV.exp() * log_probs_NV).sum(dim=1)


def _all_log_probs(
    hidden_NE: torch.Tensor, weight_VE: torch.Tensor, vocab_size: int, temperature: float
) -> torch.Tensor:
    logits_NV = torch.nn.functional.linear(hidden_NE, weight_VE[:vocab_size])
    return (logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)) / temperature).log_softmax(dim=1)
