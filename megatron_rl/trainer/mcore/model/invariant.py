"""Layers whose result for a row depends on that row alone, to the last bit (`--batch-invariant`).

Norms, SwiGLU and linear layers take the functions of `ops.invariant`. Attention, heads and the output layer have
backends of this name. Any other layer is refused with an error, so that no part computes in another way in silence.

Letters: R rows, F columns of an MLP, or pairs that rotate.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.mlp import MLP

from megatron_rl.errors import PlatformError
from megatron_rl.ops.invariant import gradients
from megatron_rl.ops.invariant.bit_equality import check_operations
from megatron_rl.ops.invariant.rows import multiply, turn
from megatron_rl.ops.linear import linear
from megatron_rl.ops.log_probs.invariant import list_widths
from megatron_rl.trainer.mcore.model.attention import SharedPromptAttention
from megatron_rl.trainer.mcore.model.fusions import RMSNorm
from megatron_rl.trainer.mcore.model.self_attention import InvariantSelfAttention
from megatron_rl.types import Architecture

# Modules that only call others, or add to a residual, and a critic's output layer, which engines do not have.
_PLAIN = (
    "PackedGPTModel", "LanguageModelEmbedding", "RotaryEmbedding", "Dropout", "TransformerBlock", "ModuleList",
    "TransformerLayer", "IdentityOp", "IdentityFuncOp", "ValueHead",
)  # fmt: skip
_READY = (SharedPromptAttention, InvariantSelfAttention, VocabParallelEmbedding)


class InvariantNorm(RMSNorm):
    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize the last dimension."""
        assert residual is None
        return gradients.normalize(hidden, self.weight, self.eps)


class InvariantMLP(MLP):
    """Megatron's MLP with SwiGLU, and without biases."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and None in place of a bias."""
        gate_up_R2F, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(gradients.swiglu(gate_up_R2F))  # type: ignore[no-any-return]


class _Product:
    """The method of Megatron's layers that multiplies by the weight, which one rank has whole."""

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        **_: Any,
    ) -> torch.Tensor:
        return linear(input, weight, bias, gradient_accumulation_fusion, multiply=multiply)


class InvariantColumnLinear(_Product, ColumnParallelLinear):
    """Megatron's layer whose ranks have rows of the weight."""


class InvariantRowLinear(_Product, RowParallelLinear):
    """Megatron's layer whose ranks have columns of the weight."""


_OURS: dict[type, type] = {
    RMSNorm: InvariantNorm,
    MLP: InvariantMLP,
    ColumnParallelLinear: InvariantColumnLinear,
    RowParallelLinear: InvariantRowLinear,
}


def make_invariant(chunk: torch.nn.Module) -> None:
    for name, module in chunk.named_modules():
        if type(module) in _OURS:
            module.__class__ = _OURS[type(module)]
        elif type(module) not in _READY and type(module).__name__ not in _PLAIN:
            raise PlatformError(
                f"--batch-invariant: {name} is a {type(module).__name__}, which has no batch-invariant form: choose a "
                "dense Qwen3 without TransformerEngine (--transformer-impl local), or drop the flag"
            )


def make_rotation(positions_R: torch.Tensor, frequencies_F: torch.Tensor) -> torch.Tensor:
    """Make the table by which heads at these positions are rotated: [R, 2, F]."""
    return torch.stack(turn(positions_R, frequencies_F), dim=1)


def try_operations(one: Architecture, dtype: torch.dtype) -> None:
    """Raise unless rows have the same bits in every batch on this CPU."""
    hidden, heads = one.hidden_size, one.num_attention_heads * one.kv_channels
    columns = heads + 2 * one.num_query_groups * one.kv_channels
    outputs = (columns, 2 * one.ffn_hidden_size, *list_widths(one.vocab_size))
    shapes = [(heads, hidden), (one.ffn_hidden_size, hidden), *((hidden, output) for output in outputs)]
    queries = one.num_attention_heads // one.num_query_groups
    check_operations(shapes, queries, one.kv_channels, dtype)
