"""A linear layer in place of self-attention: convolution, gated delta rule, gated norm.

One layer of ours serves every megatron-core: its own cannot start the responses of a group from their prompt's state,
and takes packs from 0.18 on only. Heads are divided over tensor-parallel ranks, with the channels of their convolution.
For convolution and rule, context-parallel ranks exchange rows for heads, as for attention.

Letters: T tokens of the pack, R rows and G key heads of this rank, I value heads of a key head, H value heads. D is the
dimensions of a query and a key, V of a value, W the tokens of the convolution's window. X is the columns of a key head:
its query and key, then the values, betas, inputs of decays and gates of its value heads.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.ops.gated_delta import compute_log_decay, gated_delta_rule
from megatron_rl.ops.gated_delta.convolution import causal_convolution
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.trainer.mcore.model import context
from megatron_rl.trainer.mcore.model.attention import PackParams
from megatron_rl.types import Architecture

# Parameters of this module itself, whose rows are divided over tensor-parallel ranks by key heads.
_DIVIDED = ("A_log", "dt_bias", "conv_weight")


class GatedDeltaRule(torch.nn.Module):
    """The part of a linear layer that needs all rows of a pack; its parameters are the layer's."""

    def __init__(self, backend: str):
        super().__init__()
        self.backend = backend

    def forward(
        self,
        q_TGD: torch.Tensor,
        k_TGD: torch.Tensor,
        v_THV: torch.Tensor,
        log_decay_TH: torch.Tensor,
        beta_TH: torch.Tensor,
        layout: Layout,
    ) -> torch.Tensor:
        """Compute what each token reads, [T, H, V]."""
        return gated_delta_rule(q_TGD, k_TGD, v_THV, log_decay_TH, beta_TH, layout, self.backend)


class GatedDeltaNet(MegatronModule):
    """The layer that Megatron builds from the layer spec, which gives `architecture` and `backend`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        architecture: Architecture,
        backend: str,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ):
        super().__init__(config=config)
        linear = architecture.linear
        assert linear is not None
        self.layer_number = layer_number
        self.tp_group, self.context_group = pg_collection.tp, pg_collection.cp
        self.num_groups = linear.num_key_heads // self.tp_group.size()
        self.copies = linear.num_value_heads // linear.num_key_heads
        self.key_dim, self.value_dim = linear.key_head_dim, linear.value_head_dim
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            linear.num_key_heads * linear.columns_of_key_head,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            tp_group=self.tp_group,
        )
        num_heads, channels = self.num_groups * self.copies, self.num_groups * linear.channels_of_key_head
        self.conv_weight = self._add_divided(channels, 1, linear.window)
        self.A_log = self._add_divided(num_heads)
        self.dt_bias = self._add_divided(num_heads)
        self.rule = GatedDeltaRule(backend)
        self.norm_weight = torch.nn.Parameter(torch.ones(self.value_dim, dtype=config.params_dtype))
        self.epsilon = config.layernorm_epsilon
        self.out_proj = RowParallelLinear(
            linear.num_value_heads * linear.value_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=self.tp_group,
        )

    def _add_divided(self, *shape: int) -> torch.nn.Parameter:
        """Make a parameter with the marks by which the gradient norm counts each shard."""
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=self.config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute this rank's rows, [rows, 1, hidden size], and no bias."""
        assert isinstance(packed_seq_params, PackParams)
        assert packed_seq_params.pack is not None
        mixed_R1X, _ = self.in_proj(hidden_states)
        mixed_RGX = mixed_R1X.unflatten(-1, (self.num_groups, -1)).squeeze(1)
        num_gates = self.copies * self.value_dim
        inputs_RGX, gate_RGX = mixed_RGX.split((mixed_RGX.shape[-1] - num_gates, num_gates), dim=-1)
        inputs_TGX = context.exchange_rows_for_groups(inputs_RGX, self.context_group)
        attend = functools.partial(self._attend, packed_seq_params.pack.layout)
        config = self.config
        is_selective = config.recompute_granularity == "selective" and "core_attn" in (config.recompute_modules or ())
        is_recomputed = self.training and is_selective
        out_THV = tensor_parallel.checkpoint(attend, False, inputs_TGX) if is_recomputed else attend(inputs_TGX)
        out_RHV = context.exchange_heads_for_rows(out_THV, self.context_group)
        gated_RHV = self._gate(out_RHV, gate_RGX.unflatten(-1, (self.copies, -1)).flatten(1, 2))
        output_R1E, _ = self.out_proj(gated_RHV.flatten(1).unsqueeze(1))
        return output_R1E, None

    def _attend(self, layout: Layout, inputs_TGX: torch.Tensor) -> torch.Tensor:
        """Compute what the heads read that are this rank's among context-parallel ranks."""
        num_groups, num_values = inputs_TGX.shape[1], self.copies * self.value_dim
        channels = 2 * self.key_dim + num_values
        qkv_TGX, beta_TGI, decay_TGI = inputs_TGX.split((channels, self.copies, self.copies), dim=-1)
        groups = slice(self.context_group.rank() * num_groups, (self.context_group.rank() + 1) * num_groups)
        weight_GXW, log_rate_GI, bias_GI = (
            one.unflatten(0, (self.num_groups, -1))[groups].flatten(0, 1)
            for one in (self.conv_weight.squeeze(1), self.A_log, self.dt_bias)
        )
        convolved_TX = F.silu(causal_convolution(qkv_TGX.flatten(1), weight_GXW, layout))
        q_TGD, k_TGD, v_TGX = convolved_TX.unflatten(1, (num_groups, -1)).split(
            (self.key_dim, self.key_dim, num_values), dim=-1
        )
        v_THV = v_TGX.unflatten(-1, (self.copies, -1)).flatten(1, 2)
        log_decay_TH = compute_log_decay(decay_TGI.flatten(1), log_rate_GI, bias_GI)
        beta_TH = beta_TGI.flatten(1).to(log_decay_TH.dtype).sigmoid()
        return self.rule(q_TGD, k_TGD, v_THV, log_decay_TH, beta_TH, layout)

    def _gate(self, out_RHV: torch.Tensor, gate_RHV: torch.Tensor) -> torch.Tensor:
        """Normalize each head, and multiply it by its gate, in fp32 at least."""
        # Each rank has other heads, so the weight's gradient is a sum over ranks.
        weight_V = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        wide = torch.promote_types(out_RHV.dtype, torch.float32)
        normed_RHV = F.rms_norm(out_RHV.to(wide), (self.value_dim,), weight_V.to(wide), self.epsilon)
        return (normed_RHV * F.silu(gate_RHV.to(wide))).to(out_RHV.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the parameters to checkpoints; those of this module itself are divided by rows."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        divided = {name: getattr(self, name) for name in _DIVIDED}
        return state | make_sharded_tensors_for_checkpoint(
            divided,
            prefix,
            dict.fromkeys(divided, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
