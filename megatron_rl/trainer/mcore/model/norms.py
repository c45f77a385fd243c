"""Norms that only some families have: of what a layer is about to add, and of all heads together.

Letters: R rows of this rank, H heads of this tensor-parallel rank, D dimensions of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


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


class JoinedHeadsNorm(torch.nn.Module):
    """The norm of queries or of keys over the columns of all heads, which tensor-parallel ranks divide.

    Each rank has the weight of its own heads. A name with `q_layernorm` or `k_layernorm` in it would have Megatron sum
    the weight's gradient over these ranks.
    """

    def __init__(self, config: TransformerConfig, num_heads: int):
        """Make the norm of this number of heads, which are those of all ranks."""
        super().__init__()
        assert config.kv_channels is not None
        self.num_columns, self.eps = num_heads * config.kv_channels, config.layernorm_epsilon
        self.group = parallel_state.get_tensor_model_parallel_group()
        num_rows = self.num_columns // self.group.size()
        self.weight = torch.nn.Parameter(torch.ones(num_rows, dtype=config.params_dtype))
        # The marks by which the gradient norm counts each shard.
        for mark, value in (("tensor_model_parallel", True), ("partition_dim", 0), ("partition_stride", 1)):
            setattr(self.weight, mark, value)

    def forward(self, x_R1HD: torch.Tensor) -> torch.Tensor:
        """Normalize queries or keys, in fp32 at least."""
        wide_R1HD = x_R1HD.to(torch.promote_types(x_R1HD.dtype, torch.float32))
        squares_R111 = wide_R1HD.pow(2).sum(dim=(-2, -1), keepdim=True)
        # The heads of every rank take part in the gradient of the sum.
        total_R111 = tensor_parallel.copy_to_tensor_model_parallel_region(
            tensor_parallel.reduce_from_tensor_model_parallel_region(squares_R111, group=self.group), group=self.group
        )
        normed_R1HD = wide_R1HD * torch.rsqrt(total_R111 / self.num_columns + self.eps)
        return self.weight.view(x_R1HD.shape[-2:]) * normed_R1HD.to(x_R1HD.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight to checkpoints: ranks divide its rows."""
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
        return sharded
