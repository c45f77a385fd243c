"""The model: megatron-core's GPTModel, which takes packs and answers with log-probs, or with a critic's values.

Letters: T tokens of the pack, R of its rows, which this rank computes, N targets, M targets that these rows predict,
E hidden size.
"""

import contextlib
import copy
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module, MegatronModule

from megatron_rl.config.settings import Settings
from megatron_rl.ops.log_probs import TargetRows, VocabularyShard, output_log_probs
from megatron_rl.ops.qkv import make_rotation
from megatron_rl.platforms import select
from megatron_rl.trainer.data.packing import Pack
from megatron_rl.trainer.data.routing import Routing
from megatron_rl.trainer.mcore.model import context, rope
from megatron_rl.trainer.mcore.model.attention import PackParams
from megatron_rl.trainer.mcore.model.fusions import fuse_layers
from megatron_rl.trainer.mcore.model.replay import select_routing
from megatron_rl.trainer.mcore.model.router import counting, freeze_router_biases, settle_choices, settle_expert_biases
from megatron_rl.trainer.mcore.model.spec import block_spec
from megatron_rl.types import Architecture, Divergence

INVARIANT = "megatron_rl.trainer.mcore.model.invariant"
"""The module of --batch-invariant, which other runs do not import."""
_DIVERGENCE = "megatron_rl.ops.log_probs.divergence"
"""The module of distributions that a teacher gives, which other runs do not import."""
ADAPTER = "adapter"
"""The name under which a linear layer has its adapter (`lora.py`)."""

BuildModel = Callable[[Settings], list["PackedGPTModel"]]
"""The builder of this rank's chunks of a model, with unfilled weights; called once for each model of a run."""


class PackedGPTModel(GPTModel):
    """One stage of the model. The last stage returns the log-probs of the pack's targets, the others hidden states."""

    def __init__(
        self,
        config: TransformerConfig,
        architecture: Architecture,
        output_layer_backend: str,
        qkv_backend: str,
        **options: Any,
    ):
        super().__init__(config, **options)
        self.take_packs(architecture, output_layer_backend, qkv_backend)

    def take_packs(self, architecture: Architecture, output_layer_backend: str, qkv_backend: str) -> None:
        """Set the attributes that `forward` needs besides a GPTModel's own."""
        self.architecture = architecture
        self.output_layer_backend = output_layer_backend
        self.qkv_backend = qkv_backend
        device, local_rope = next(self.parameters()).device, architecture.local_rope
        # Not buffers: mixed precision would round them.
        self._rope_frequencies_F = rope.inverse_frequencies(architecture.rope, architecture.rope_channels).to(device)
        self._local_frequencies_F = (
            None if local_rope is None else rope.inverse_frequencies(local_rope, architecture.kv_channels).to(device)
        )
        if architecture.latents is None:
            # Megatron computes the angles of rows, cached for 32 lengths. They are not used here.
            self.rotary_pos_emb.forward = lambda *_, **__: None

    def forward(  # type: ignore[override]
        self,
        pack: Pack,
        temperature: float = 1.0,
        with_entropies: bool = False,
        routing: Routing | None = None,
        teachers: Sequence[tuple[TargetRows, Divergence]] = (),
        gives_rows: bool = False,
        heads: Sequence[torch.nn.Module] = (),
    ) -> torch.Tensor | TargetRows:
        """Compute log-probs [N] of logits / temperature, or the hidden states for the next stage.

        With `with_entropies`, `teachers` or `heads`, return a column for each log-prob, the entropy of its
        distribution, its divergence from each teacher's distribution, and the value of each head, [N, ...]. With
        `gives_rows`, the last stage returns the rows that such a distribution is made of. `routing` has the experts of
        this rank's rows; without it, they are those of the pack, if it has any.
        """
        rows = context.own_rows(pack.num_tokens, self.pg_collection.cp)
        has_kernel = self.qkv_backend != "torch" and self._local_frequencies_F is None
        is_turned_here = has_kernel or self.architecture.latents is not None
        rotation_R2F = self._make_rotation(pack.positions_T[rows]) if is_turned_here else None
        routing = select_routing(self, pack, rows) if routing is None else routing
        # With these, Megatron computes on [tokens, 1, ...], without cumulative lengths.
        params = PackParams(
            qkv_format="sbhd",
            max_seqlen_q=pack.num_tokens,
            max_seqlen_kv=pack.num_tokens,
            pack=pack,
            temperature=temperature,
            with_entropies=with_entropies,
            rotation_R2F=rotation_R2F,
            routing=routing,
            teachers=teachers,
            gives_rows=gives_rows,
            heads=heads,
        )
        with counting(self, pack, rows):
            return super().forward(
                input_ids=pack.tokens_T[None, rows],
                position_ids=pack.positions_T[None, rows],
                attention_mask=None,
                packed_seq_params=params,
            )

    def _make_rotation(self, positions_R: torch.Tensor) -> torch.Tensor:
        """Make the table by which all layers rotate queries and keys, with the factor of Megatron's operations."""
        if self.qkv_backend == "invariant":
            return importlib.import_module(INVARIANT).make_rotation(positions_R, self._rope_frequencies_F)
        if self.architecture.latents is not None:
            factor = rope.attention_factor(self.architecture.rope)
        else:
            factor = _yarn_get_concentration_factor_from_config(self.config)
        return make_rotation(rope.pair_angles(self._rope_frequencies_F, positions_R), factor)

    def _preprocess(self, input_ids: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        """Replace Megatron's rotary angles, which follow rows, by angles that follow the pack's positions."""
        decoder_input, _, *rest = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        if decoder_input is not None:
            # With the strides of the embedding's transposed [R, 1, E], a frozen weight is multiplied row by row. That
            # is slower than all rows at once, and rounded differently from the same weight when it is trained.
            decoder_input = decoder_input.squeeze(1).unsqueeze(1)
            if self.architecture.scales_embedding:
                # The models round this factor to the dtype of the embedding.
                factor = torch.tensor(self.architecture.hidden_size**0.5, dtype=decoder_input.dtype, device="cpu")
                decoder_input = decoder_input * factor.item()
            is_frozen = torch.is_grad_enabled() and not decoder_input.requires_grad
            if is_frozen and self.config.recompute_granularity is not None:
                # Layers that are computed again get gradients only if their input has one.
                decoder_input = decoder_input.detach().requires_grad_()
        has_latents = self.architecture.latents is not None
        return (decoder_input, None if has_latents else self._compute_angles(position_ids[0]), *rest)

    def _compute_angles(self, positions_R: torch.Tensor) -> torch.Tensor:
        """Compute the angles of rope; with a local rope, those of both, the local ones last."""
        angles_R11D = rope.angles(self._rope_frequencies_F, positions_R, self.architecture.rope.interleaved)
        if self._local_frequencies_F is None:
            return angles_R11D
        return torch.stack((angles_R11D, rope.angles(self._local_frequencies_F, positions_R)))

    def _postprocess(self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: PackParams, **__: Any) -> Any:
        """Apply the output layer to the rows that predict targets, and return the targets' log-probs."""
        if not self.post_process:
            return hidden_states
        pack = packed_seq_params.pack
        assert pack is not None
        is_critic = self.architecture.is_critic
        if self.config.sequence_parallel:
            # Each rank continues with its own part of the vocabulary, so the backward pass sums gradients. A critic has
            # no such parts.
            hidden_R1E = tensor_parallel.gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=not is_critic, group=self.pg_collection.tp
            )
        elif is_critic:
            hidden_R1E = hidden_states
        else:
            hidden_R1E = tensor_parallel.copy_to_tensor_model_parallel_region(
                hidden_states, group=self.pg_collection.tp
            )
        hidden_RE, group = hidden_R1E.squeeze(1), self.pg_collection.cp
        if group.size() == 1:
            return self._read_targets(hidden_RE, pack, packed_seq_params)
        rows = context.own_rows(pack.num_tokens, group)
        places_M = pack.places_of_part(group.rank(), group.size())
        rows_M, tokens_M = (
            targets_N.index_select(0, places_M) for targets_N in (pack.target_rows_N, pack.target_tokens_N)
        )
        read = self._log_probs(hidden_RE, rows_M - rows.start, tokens_M, packed_seq_params)
        if isinstance(read, TargetRows):
            return read
        return context.combine_targets(read, places_M, len(pack.target_rows_N), group)

    def _read_targets(self, hidden_RE: torch.Tensor, pack: Pack, params: PackParams) -> torch.Tensor | TargetRows:
        """Compute the log-probs of a pack's targets. Those without gradients take no part in the backward pass."""
        rows_N, tokens_N, count = pack.target_rows_N, pack.target_tokens_N, pack.num_trained
        read = self._log_probs(hidden_RE, rows_N[:count], tokens_N[:count], params)
        if count is None or count == len(rows_N) or isinstance(read, TargetRows):
            return read
        with torch.no_grad():
            others = self._log_probs(hidden_RE, rows_N[count:], tokens_N[count:], params)
        assert isinstance(others, torch.Tensor)
        return torch.cat([read, others])

    def _log_probs(
        self, hidden_RE: torch.Tensor, rows_M: torch.Tensor, tokens_M: torch.Tensor, params: PackParams
    ) -> torch.Tensor | TargetRows:
        # Rows repeat, as a prompt's last one does: index_select adds gradients in a fixed order, and indexing does not.
        hidden_ME = hidden_RE.index_select(0, rows_M)
        weight_VE, group = self.output_weight(), self.pg_collection.tp
        if self.architecture.is_critic:
            return (hidden_ME.float() @ weight_VE.float().t()).squeeze(1)
        shard = VocabularyShard(group.rank() * len(weight_VE), self.architecture.vocab_size, group)
        if params.gives_rows:
            # Detached, it stays what the parameter is now: one in host memory is taken back after the pass.
            return TargetRows(hidden_ME, weight_VE.detach())
        options = {
            "with_entropies": params.with_entropies,
            "backend": self.output_layer_backend,
            "adds_to_main_grad": self.config.gradient_accumulation_fusion,
        }
        if not params.teachers:
            read = output_log_probs(hidden_ME, weight_VE, tokens_M, shard, params.temperature, **options)
        else:
            rows = TargetRows(hidden_ME, weight_VE)
            read = importlib.import_module(_DIVERGENCE).output_divergences(
                rows, tokens_M, params.teachers, shard, params.temperature, **options
            )
        if not params.heads:
            return read
        # The backward pass sums the gradients of rows over tensor-parallel ranks, and a head is whole on each.
        rows_ME = hidden_ME if group.rank() == 0 else hidden_ME.detach()
        return torch.column_stack([read, *(head(rows_ME) for head in params.heads)])

    def output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output layer's weight, which may be tied to the embedding."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def padded_vocab_size(vocab_size: int, tensor_size: int, divisible_by: int = 128) -> int:
    """Round up, as Megatron does, to a multiple of `divisible_by` times the tensor-parallel size."""
    multiple = divisible_by * tensor_size
    return -(-vocab_size // multiple) * multiple


def build_chunks(
    config: TransformerConfig,
    architecture: Architecture,
    vocab_divisible_by: int = 128,
    attention_backend: str = "naive",
    output_layer_backend: str = "auto",
    elementwise_backend: str = "torch",
    qkv_backend: str = "torch",
    linear_attention_backend: str = "torch",
    device: torch.device | None = None,
) -> list[PackedGPTModel]:
    """Build this rank's chunks: one, or one per virtual stage. Weights are allocated, not initialized."""
    num_virtual = config.virtual_pipeline_model_parallel_size
    vocab_size = padded_vocab_size(architecture.vocab_size, config.tensor_model_parallel_size, vocab_divisible_by)

    def build_stage(vp_stage: int | None) -> PackedGPTModel:
        where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
        backends = (attention_backend, qkv_backend, linear_attention_backend)
        return PackedGPTModel(
            config,
            architecture,
            output_layer_backend,
            qkv_backend,
            transformer_layer_spec=block_spec(config, architecture, vp_stage, *backends),
            vocab_size=vocab_size,
            max_sequence_length=architecture.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            share_embeddings_and_output_weights=architecture.tied_embeddings and not architecture.is_critic,
            position_embedding_type="rope",
            rotary_base=int(architecture.rope.base),
            vp_stage=vp_stage,
        )

    # Megatron allocates some parameters on the host, such as a router's weights, and moves whole models later.
    with device or contextlib.nullcontext():
        chunks = [build_stage(vp_stage) for vp_stage in (range(num_virtual) if num_virtual else [None])]
        for chunk in chunks:
            if architecture.is_critic and chunk.post_process:
                chunk.output_layer = ValueHead(config)
            mark_tensor_parallel(chunk)
            freeze_router_biases(chunk)
            settle_expert_biases(chunk)
            settle_choices(chunk)
    for chunk in chunks:
        fuse_layers(chunk, elementwise_backend)
        if elementwise_backend == "invariant":
            importlib.import_module(INVARIANT).make_invariant(chunk)
    return chunks


class ValueHead(torch.nn.Module):
    """The output layer of a critic, whole on each rank; its values are 0 until it learns, or is loaded."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("the model multiplies by the weight itself")


def wrap(chunks: Sequence[MegatronModule], ddp_config: DistributedDataParallelConfig) -> list[DistributedDataParallel]:
    """Wrap each chunk in mixed precision, then in gradient buffers and their reduction."""
    config = chunks[0].config
    # A copy, because Megatron writes the size of buckets into it.
    ddp_config = copy.copy(ddp_config)
    settle_bucket_size(ddp_config, sum(parameter.nelement() for chunk in chunks for parameter in chunk.parameters()))
    return [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(wrap_in_precision(chunks))
    ]


def wrap_in_precision(chunks: Sequence[MegatronModule]) -> list[torch.nn.Module]:
    """Wrap each chunk in mixed precision, if the model is in half precision."""
    config = chunks[0].config
    return [Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk for chunk in chunks]


def settle_bucket_size(ddp_config: DistributedDataParallelConfig, num_parameters: int) -> None:
    """Turn the number of buckets into their size, as Megatron's training does: its core knows only the size."""
    # The field exists from 0.18 on.
    num_buckets = getattr(ddp_config, "num_buckets", None)
    if num_buckets is not None:
        ddp_config.bucket_size = num_parameters // num_buckets


def unwrap(module: torch.nn.Module) -> PackedGPTModel:
    """Return the model inside the wrappers."""
    inner = unwrap_module(module)
    assert isinstance(inner, PackedGPTModel)
    return inner


def unwrap_module(module: torch.nn.Module) -> torch.nn.Module:
    """Return what is inside the wrappers, a model or a head."""
    inner: Any = module
    while hasattr(inner, "module"):
        inner = inner.module
    return inner  # type: ignore[no-any-return]


def named_shards(chunks: list[PackedGPTModel]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's parameters, without adapters, under their names in the whole model."""
    for chunk, name, global_name in named_places(chunks):
        yield global_name, chunk.get_parameter(name)


def named_places(chunks: Sequence[PackedGPTModel]) -> Iterator[tuple[PackedGPTModel, str, str]]:
    """Yield each parameter's chunk, its name there, and that in the whole model: layers and experts counted globally.

    Adapters and the output layer of a critic are left out.
    """
    experts_before = 0
    config = chunks[0].config
    if config.num_moe_experts:
        per_rank = config.num_moe_experts // config.expert_model_parallel_size
        experts_before = parallel_state.get_expert_model_parallel_rank() * per_rank
    for chunk in chunks:
        layers = [str(layer.layer_number - 1) for layer in chunk.decoder.layers]
        for name, _ in chunk.named_parameters():
            if f".{ADAPTER}." not in name and not (chunk.architecture.is_critic and name == "output_layer.weight"):
                yield chunk, name, _global_name(name, layers, experts_before)


def _global_name(name: str, layers: list[str], experts_before: int) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = layers[int(parts[2])]
    if "local_experts" in parts:
        index = parts.index("local_experts") + 1
        parts[index] = str(int(parts[index]) + experts_before)
    elif "experts" in parts and (numbered := re.fullmatch(r"(weight|bias)(\d+)", parts[-1])):
        parts[-1] = f"{numbered[1]}{int(numbered[2]) + experts_before}"
    return ".".join(parts)


def mark_tensor_parallel(chunk: torch.nn.Module) -> None:
    """Set the marks by which the gradient norm counts a shard once; Megatron sets them only when it initializes."""
    for module in chunk.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, tensor_parallel.RowParallelLinear):
            dim = 1
        elif isinstance(module, tensor_parallel.ColumnParallelLinear | tensor_parallel.VocabParallelEmbedding):
            dim = 0
        else:
            continue
        if weight is not None and not getattr(weight, "tensor_model_parallel", False):
            # Megatron's own function asserts that a weight has no marks, and its scripts mark every weight as whole.
            for mark, value in (("tensor_model_parallel", True), ("partition_dim", dim), ("partition_stride", 1)):
                setattr(weight, mark, value)
    for parameter in chunk.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def build_model(settings: Settings) -> list[PackedGPTModel]:
    """Build this rank's chunks of the model. Their weights are not filled yet."""
    return build_chunks(
        # A copy, because Megatron stores the functions that its schedules call in it, and they differ between models.
        copy.copy(settings.transformer),
        settings.architecture,
        settings.model.make_vocab_size_divisible_by,
        attention_backend=settings.attention.backend,
        output_layer_backend=settings.model.output_layer_backend,
        elementwise_backend=settings.model.elementwise_backend,
        qkv_backend=settings.model.qkv_backend,
        linear_attention_backend=settings.model.linear_attention_backend,
        device=select(settings.platform).device(),
    )
