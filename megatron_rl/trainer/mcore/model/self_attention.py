"""Megatron's self-attention with one kernel that splits, normalizes and rotates heads, with two ropes, or with norms of
all heads together.

A layer takes Megatron's own way if it has what the kernel lacks. The log names the reason once.

Letters: R rows of this rank, C columns of the product, E hidden size, H query heads, G key-value heads, D dimensions of
a head, F pairs that rotate.
"""

import functools
import logging
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.errors import PlatformError
from megatron_rl.ops.qkv import HeadNorms, split_heads
from megatron_rl.platforms.megatron_patches import replaced
from megatron_rl.trainer.mcore.model.attention import PackParams
from megatron_rl.types import Architecture

_log = logging.getLogger(__name__)

# Packages whose class RMSNorm is the norm of the kernel, with its weight and its epsilon under these names.
_NORM_PACKAGES = ("megatron_rl", "torch", "transformer_engine")
# Fields of Megatron's configuration that change what happens between the product and attention.
_CHANGES = ("multi_latent_attention", "attention_output_gate", "rotary_interleaved", "no_rope_freq", "test_mode")


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
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

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
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


class TwoRopesSelfAttention(SelfAttention):
    """Megatron's self-attention in a model whose layers with a window have a rope of their own."""

    def __init__(self, *args: Any, architecture: Architecture, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Megatron counts layers from one.
        self._is_local = architecture.is_local(self.layer_number - 1)

    def forward(self, *args: Any, rotary_pos_emb: torch.Tensor, **kwargs: Any) -> Any:
        """Compute attention with this layer's angles, of those of both ropes."""
        return super().forward(*args, rotary_pos_emb=rotary_pos_emb[int(self._is_local)], **kwargs)


class JoinedNormsSelfAttention(SelfAttention):
    """Megatron's self-attention that normalizes the queries of all heads together, and the keys."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        assert config.num_query_groups is not None
        self.q_norm = JoinedHeadsNorm(config, config.num_attention_heads)
        self.k_norm = JoinedHeadsNorm(config, config.num_query_groups)

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        """Return queries [R, 1, H, D], keys and values [R, 1, G, D]."""
        q_R1HD, k_R1GD, v_R1GD = super().get_query_key_value_tensors(*args, **kwargs)
        return self.q_norm(q_R1HD), self.k_norm(k_R1GD), v_R1GD


class FusedSelfAttention(SelfAttention):
    """Megatron's self-attention with one kernel between the product and attention."""

    backend = "triton"
    # The rotation of the forward pass that is running; None outside of it.
    _rotation_R2F: torch.Tensor | None = None

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        """Compute attention. The kernel rotates queries and keys, so Megatron gets no angles."""
        rotation_R2F = packed_seq_params.rotation_R2F if isinstance(packed_seq_params, PackParams) else None
        if rotation_R2F is None or self._takes_megatrons_way:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        with replaced(self, "_rotation_R2F", rotation_R2F):
            return super().forward(*args, packed_seq_params=packed_seq_params, **{**kwargs, "rotary_pos_emb": None})

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return queries [R, 1, H, D], keys and values [R, 1, G, D].

        Within `forward` they are ready for attention, and without the dimension of 1.
        """
        if self._rotation_R2F is None:
            return super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        mixed_R1C, _ = self.linear_qkv(hidden_states)
        num_groups, head_dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        norms = self._read_norms()
        return split_heads(mixed_R1C, num_groups, head_dim, self._rotation_R2F, norms, name=self.backend)

    def _read_norms(self) -> HeadNorms | None:
        if not _is_norm(self.q_layernorm):
            return None
        for norm in (self.q_layernorm, self.k_layernorm):
            # Megatron waits in such a hook for parameters that are still being gathered.
            for hook in norm._forward_pre_hooks.values():
                hook(norm, ())
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps, getattr(q_norm, "zero_centered_gamma", False))

    @functools.cached_property
    def _takes_megatrons_way(self) -> bool:
        reason = self._find_reason()
        if reason is not None:
            _say_once(reason)
        return reason is not None

    def _find_reason(self) -> str | None:
        """Return why the kernel cannot compute this layer; None if it can."""
        for name in _CHANGES:
            if getattr(self.config, name, None):
                return f"it has no {name}"
        assert self.config.num_query_groups is not None
        if self.config.num_query_groups < self.world_size:
            return "ranks share a key head"
        norms = [norm for norm in (self.q_layernorm, self.k_layernorm) if not isinstance(norm, IdentityOp | None)]
        if not norms:
            return None
        for norm in norms:
            if not _is_norm(norm):
                return f"it has no {type(norm).__name__} of {type(norm).__module__}"
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        kinds = {(norm.eps, getattr(norm, "zero_centered_gamma", False)) for norm in norms}
        if not _is_norm(q_norm) or not _is_norm(k_norm) or len(kinds) > 1:
            return "queries and keys must have norms of one kind"
        return None


class InvariantSelfAttention(FusedSelfAttention):
    """Megatron's self-attention whose heads have the bits of an engine's (`--batch-invariant`)."""

    backend = "invariant"

    @functools.cached_property
    def _takes_megatrons_way(self) -> bool:
        reason = self._find_reason()
        if reason is not None:
            raise PlatformError(f"--batch-invariant has no self-attention like this model's: {reason}: drop the flag")
        return False


def _is_norm(module: Any) -> bool:
    kind = type(module)
    has_values = getattr(module, "weight", None) is not None and getattr(module, "eps", None) is not None
    return (
        kind.__name__ in ("RMSNorm", "InvariantNorm") and kind.__module__.split(".")[0] in _NORM_PACKAGES and has_values
    )


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("--qkv-backend triton leaves layers to Megatron's own operations: %s", reason)
