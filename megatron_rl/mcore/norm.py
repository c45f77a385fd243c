"""The norm of Megatron's local layer spec, for sequence parallelism too."""

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """torch's RMSNorm with the mark that makes Megatron sum its gradient over the ranks that share a sequence.

    Megatron's own wrapper around torch's norm refuses sequence parallelism, and its fused norm needs apex.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        assert config.normalization == "RMSNorm" and not config.layernorm_zero_centered_gamma
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        return torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)
