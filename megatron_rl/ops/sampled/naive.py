"""The naive twin of the kernel."""

import torch

from megatron_rl.ops.sampled import Scores


def score(logits_RV: torch.Tensor, chosen_R: torch.Tensor) -> Scores:
    """Score the chosen columns, in float64 if the logits are, else in float32."""
    dtype = torch.promote_types(logits_RV.dtype, torch.float32)
    values_RV, chosen_R1 = logits_RV.to(dtype), chosen_R[:, None]
    log_probs_R = values_RV.log_softmax(-1).gather(1, chosen_R1)[:, 0]
    return Scores(log_probs_R, (values_RV >= values_RV.gather(1, chosen_R1)).sum(-1))
