"""Multi-latent attention on packs: keys and values are products of one narrow row of a token.

Megatron's own rotates queries and keys by the rows that they have in sequences, and not by their positions in a pack.
With tensor parallelism it also loses the other ranks' part of the gradient of the key part that rotates: all heads
share that part.

Letters: R rows of this rank, H heads of this tensor-parallel rank, E hidden size, L columns of a narrow row, F pairs
that rotate.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_rl.trainer.mcore.model.attention import PackParams


class PackedLatentAttention(MLASelfAttention):
    """Megatron's multi-latent attention, whose queries and keys rotate by their positions in a pack."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the products and norms that the layer spec names, as Megatron builds them before 0.19.

        Later versions find norms by `qk_layernorm`, and refuse one without narrow rows for queries. With the setting,
        Megatron would sum the gradients of norms of narrow rows, which are whole on each rank.
        """
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return queries and keys [R, H, plain + rotated columns], values [R, H, value columns], and twice None."""
        assert isinstance(packed_seq_params, PackParams) and packed_seq_params.rotation_R2F is not None
        rotation_R2F = packed_seq_params.rotation_R2F
        config: Any = self.config
        queries = hidden_states
        if config.q_lora_rank is not None:
            queries = self.q_layernorm(self._divide_rows(self._narrow(self.linear_q_down_proj, hidden_states)))
            project = self.linear_q_up_proj
        else:
            project = self.linear_q_proj
        q_RHD = self._split_heads(project(queries)[0])
        narrow_R1L = self._narrow(self.linear_kv_down_proj, hidden_states)
        shared_R1L, rotated_R1P = narrow_R1L.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        kv_RHD = self._split_heads(self.linear_kv_up_proj(self.kv_layernorm(self._divide_rows(shared_R1L)))[0])

        q_plain_RHD, q_rotated_RHP = q_RHD.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        k_plain_RHD, v_RHV = kv_RHD.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        # The heads of every rank take part in its gradient.
        rotated_R1P = tensor_parallel.copy_to_tensor_model_parallel_region(rotated_R1P, group=self.pg_collection.tp)
        k_rotated_RHP = _turn(rotated_R1P, rotation_R2F).expand(-1, k_plain_RHD.shape[1], -1)
        return (
            torch.cat((q_plain_RHD, _turn(q_rotated_RHP, rotation_R2F)), dim=-1),
            torch.cat((k_plain_RHD, k_rotated_RHP), dim=-1),
            v_RHV,
            None,
            None,
        )

    def _narrow(self, project: Any, hidden_R1E: torch.Tensor) -> torch.Tensor:
        """Return all columns of narrow rows, of which the layer computes those of this tensor-parallel rank."""
        return tensor_parallel.gather_from_tensor_model_parallel_region(
            project(hidden_R1E)[0], group=self.pg_collection.tp
        )

    def _divide_rows(self, narrow_R1L: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows with sequence parallelism, since the next layer gathers them; else all rows."""
        if not self.config.sequence_parallel:
            return narrow_R1L
        return tensor_parallel.scatter_to_sequence_parallel_region(narrow_R1L, group=self.pg_collection.tp)

    def _split_heads(self, columns_R1C: torch.Tensor) -> torch.Tensor:
        return columns_R1C.squeeze(1).unflatten(-1, (self.num_attention_heads_per_partition, -1))


def _turn(x_RHP: torch.Tensor, rotation_R2F: torch.Tensor) -> torch.Tensor:
    """Multiply the complex numbers x[2i] + j x[2i + 1] by cos + j sin; return real parts, then imaginary parts."""
    cos_R1F, sin_R1F = rotation_R2F.to(x_RHP.dtype).unsqueeze(1).unbind(2)
    real_RHF, imaginary_RHF = x_RHP[..., 0::2], x_RHP[..., 1::2]
    return torch.cat(
        (real_RHF * cos_R1F - imaginary_RHF * sin_R1F, imaginary_RHF * cos_R1F + real_RHF * sin_R1F), dim=-1
    )
