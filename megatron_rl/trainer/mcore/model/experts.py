"""Megatron's experts with biases, in layers of its own modules."""

from typing import Any

import torch
from megatron.core.tensor_parallel import RowParallelLinear


class _FreshOutput(RowParallelLinear):
    """Megatron's layer whose output is a tensor of its own.

    Megatron adds the weighted bias of an expert in place, which autograd forbids for what this layer otherwise returns.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(*args, **kwargs)
        return output.clone(), bias


def settle_expert_biases(chunk: torch.nn.Module) -> None:
    """Have the biases of experts' second layers added and reduced as those of experts must be.

    By the mark of sequence parallelism, Megatron would sum the gradient of a bias over tensor-parallel ranks. These
    have other experts, or copies whose gradients are already summed.
    """
    for name, module in chunk.named_modules():
        if ".local_experts." in name and type(module) is RowParallelLinear and module.bias is not None:
            module.__class__ = _FreshOutput
            setattr(module.bias, "sequence_parallel", False)  # noqa: B010
