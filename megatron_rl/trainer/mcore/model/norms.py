"""Norms that only some families have: of weights around zero, and of what a layer is about to add."""

from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig


class ZeroCenteredRMSNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight. It computes in float32 and rounds once, as the families do."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object):
        super().__init__()
        assert config.normalization == "RMSNorm" and config.layernorm_zero_centered_gamma
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # With this mark Megatron sums the gradient over the ranks that share a sequence.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        wide = torch.promote_types(hidden.dtype, torch.float32)
        factor = 1 + self.weight.to(wide)
        return torch.nn.functional.rms_norm(hidden.to(wide), (hidden.shape[-1],), factor, self.eps).to(hidden.dtype)


class NormalizeAndAdd(torch.nn.Module):
    """A layer's function that adds to the residual, which first normalizes what it adds."""

    def __init__(self, config: TransformerConfig, norm: type):
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return a function of an output with its bias, the residual, and the probability of dropout."""
        add_plainly = get_bias_dropout_add(training, fused)

        def add(
            output_with_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
        ) -> torch.Tensor:
            output, bias = output_with_bias
            normed = self.norm(output if bias is None else output + bias)
            total: torch.Tensor = add_plainly((normed, None), residual, prob)
            return total

        return add
