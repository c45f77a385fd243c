"""The norm of what a layer is about to add, which only some families have."""

from collections.abc import Callable

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig


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
