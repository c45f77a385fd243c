"""The core attention of the layer spec: shared-prompt attention over a packed micro-batch."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron_rl.ops.log_probs import TargetRows
from megatron_rl.ops.shared_prompt import shared_prompt_attention
from megatron_rl.trainer.data.packing import Pack
from megatron_rl.trainer.data.routing import Routing
from megatron_rl.trainer.mcore.model import context, rope
from megatron_rl.types import Architecture, Divergence


@dataclasses.dataclass
class PackParams(PackedSeqParams):
    """The parameters that carry a pack through Megatron's layers to the attention, recomputation included."""

    pack: Pack | None = None
    temperature: float = 1.0
    with_entropies: bool = False
    rotation_R2F: torch.Tensor | None = None
    """The cosines and sines of rope for this rank's rows; None if Megatron's operations rotate queries and keys."""
    routing: Routing | None = None
    """The given experts of the rows of this rank's routers; None if the routers choose."""
    teachers: Sequence[tuple[TargetRows, Divergence]] = ()
    gives_rows: bool = False
    """True if the model returns the rows that predict targets, and no log-probs."""
    heads: Sequence[torch.nn.Module] = ()
    """Layers that compute a value of each target from the rows that predict targets."""


class SharedPromptAttention(MegatronModule):
    """The core attention that Megatron builds from the layer spec, which gives `architecture` and `backend`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        architecture: Architecture,
        backend: str,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        width = architecture.scale_width or config.kv_channels
        scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(width)
        # Megatron counts layers from one.
        layer = layer_number - 1
        if architecture.latents is not None:
            # Only the rotated part has the factor of rope, and has got it already.
            self.scale = rope.score_factor(architecture.rope) / math.sqrt(architecture.kv_channels)
        else:
            # The factor applies to both queries and keys, so it is squared in their products.
            self.scale = scale * rope.attention_factor(architecture.find_rope(layer)) ** 2
        self.window = architecture.find_window(layer)
        self.backend = backend
        self.context_group = pg_collection.cp
        self.softmax_offset: torch.nn.Parameter | None = None
        if architecture.has_sinks:
            num_heads = architecture.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend with this rank's rows, [rows, 1, heads, head_dim] each, and return [rows, 1, heads x head_dim].

        Rows may lack the dimension of 1.
        """
        assert isinstance(packed_seq_params, PackParams) and packed_seq_params.pack is not None
        layout = packed_seq_params.pack.layout
        q_RHD, k_RGD, v_RGD = (one.squeeze(1) if one.dim() == 4 else one for one in (query, key, value))
        q_THD, k_TGD, v_TGD = context.exchange_rows_for_heads(q_RHD, k_RGD, v_RGD, self.context_group)
        out_THD = shared_prompt_attention(
            q_THD, k_TGD, v_TGD, layout, self.scale, self.window, self.backend, self._own_sinks()
        )
        return context.exchange_heads_for_rows(out_THD, self.context_group).reshape(len(query), 1, -1)

    def _own_sinks(self) -> torch.Tensor | None:
        """Return the sinks of the heads for which this context-parallel rank attends; None without sinks."""
        if self.softmax_offset is None:
            return None
        group = self.context_group
        return self.softmax_offset.unflatten(0, (group.size(), -1))[group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the sinks for a checkpoint, which tensor-parallel ranks divide."""
        if self.softmax_offset is None:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)
