"""Engine and trainer compute the same log-probs with other kernels; what is sampled is corrected for the difference.

Letters: N targets.
"""

import torch


def importance(trainer_N: torch.Tensor, engine_N: torch.Tensor, truncation: float | None) -> torch.Tensor:
    """The trainer's probability of each token over the engine's, both of the version that sampled, truncated."""
    weight_N = (trainer_N - engine_N).exp()
    return weight_N if truncation is None else weight_N.clamp(max=truncation)
