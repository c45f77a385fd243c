"""The adoption of a recipe's model, which then takes packs; the recipe's own provider and specs are kept.

Exactly three things are replaced:

- the core attention of each layer, which does not know packs;
- rotary angles, which would follow rows;
- the steps after the last layer, which would compute logits of all rows.

Where kernels of ours compute what an MLP of megatron-core does, they take the place of its activation (`fusions`).
With `--qkv-backend triton` megatron-core's own self-attention also gets the kernel; a recipe's subclass of it does not.

A model with its own version of one of the three is refused with an error: that version would be lost without an error.
"""

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.attention import SelfAttention

from megatron_rl.errors import UsageError
from megatron_rl.trainer.mcore.model import rope
from megatron_rl.trainer.mcore.model.attention import SharedPromptAttention
from megatron_rl.trainer.mcore.model.fusions import fuse_layers
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, mark_tensor_parallel
from megatron_rl.trainer.mcore.model.router import freeze_router_biases
from megatron_rl.trainer.mcore.model.self_attention import FusedSelfAttention
from megatron_rl.types import Architecture, RopeKind

# The relative difference that rounding causes between two ways to compute the same frequencies.
_ROUNDING = 1e-5


def adopt(
    chunk: torch.nn.Module,
    architecture: Architecture,
    attention_backend: str,
    output_layer_backend: str,
    elementwise_backend: str = "torch",
    qkv_backend: str = "torch",
) -> PackedGPTModel:
    """Make this model one that takes packs and answers with log-probs; keep its parameters and layers."""
    if problems := list(_check(chunk, architecture)):
        raise UsageError(*problems)
    if elementwise_backend == "invariant":
        raise UsageError(
            "--batch-invariant is for models that are built here: use pretrain_grpo.py and --hf-model, or drop it"
        )
    assert isinstance(chunk, GPTModel)
    for layer in chunk.decoder.layers:
        attention: Any = layer.self_attention
        attention.core_attention = SharedPromptAttention(
            config=attention.core_attention.config,
            layer_number=layer.layer_number,
            architecture=architecture,
            backend=attention_backend,
            pg_collection=chunk.pg_collection,
            softmax_scale=getattr(chunk.config, "softmax_scale", None),
        )
        if qkv_backend == "triton" and type(attention) is SelfAttention:
            attention.__class__ = FusedSelfAttention
    kind = type(chunk)
    # Our class comes before the recipe's, so that the recipe's changes apply between our class and Megatron's.
    packed: Any = chunk
    packed.__class__ = type(f"Packed{kind.__name__}", (PackedGPTModel, kind), {"__module__": kind.__module__})
    packed.take_packs(architecture, output_layer_backend, qkv_backend)
    fuse_layers(packed, elementwise_backend)
    freeze_router_biases(packed)
    mark_tensor_parallel(packed)
    return packed


def _check(chunk: torch.nn.Module, architecture: Architecture) -> Iterator[str]:
    """Yield each reason why the model cannot take packs."""
    kind = type(chunk).__name__
    if architecture.latents is not None:
        yield (
            "a recipe's model with multi-latent attention cannot take packs: build the model here, with "
            "pretrain_grpo.py and --hf-model"
        )
        return
    if not isinstance(chunk, GPTModel):
        yield f"the recipe builds a {kind}, and only megatron-core's GPTModel and its subclasses can be trained here"
        return
    if type(chunk)._postprocess is not GPTModel._postprocess:
        yield (
            f"{kind}._postprocess is the recipe's own and would not be called, because log-probs take its place: move "
            "its work into a layer"
        )
    if chunk.vocab_size < architecture.vocab_size:
        yield (
            f"the recipe's vocabulary of {chunk.vocab_size} must have the {architecture.vocab_size} tokens of "
            "config.json: build the model with --padded-vocab-size"
        )
    output_layer = chunk.output_layer if chunk.post_process else None
    if output_layer is not None and (type(output_layer) is not ColumnParallelLinear or output_layer.bias is not None):
        is_plain = type(output_layer) is ColumnParallelLinear
        what = "an output layer with a bias" if is_plain else type(output_layer).__name__
        yield f"the recipe's output layer must be megatron-core's ColumnParallelLinear without a bias, not {what}"
    yield from _check_rotary(chunk, architecture)
    has_special_parts = architecture.local_rope is not None or architecture.has_sinks or architecture.norms_join_heads
    if has_special_parts or architecture.has_output_norms or architecture.scales_embedding:
        yield (
            f"{architecture.family} models have parts that megatron-core's GPTModel lacks: start pretrain_grpo.py, "
            "which builds them"
        )
    if architecture.linear is not None:
        yield (
            "the recipe's linear layers do not take packs of groups, and this package's do: train the model with "
            "pretrain_grpo.py, without a provider of the recipe's own"
        )
        return
    for layer in chunk.decoder.layers:
        yield from _check_attention(layer)


def _check_rotary(chunk: GPTModel, architecture: Architecture) -> Iterator[str]:
    if chunk.position_embedding_type not in ("rope", "yarn"):
        yield (
            f"the recipe's position embeddings must be rotary, not of type {chunk.position_embedding_type!r}: "
            "write --position-embedding-type rope"
        )
        return
    if chunk.config.rotary_interleaved is not architecture.rope.interleaved:
        pairs = "neighbors" if architecture.rope.interleaved else "the two halves of a head"
        yield f"the recipe must rotate pairs of {pairs}, as config.json's model does: compare its rotary_interleaved"
    theirs: Any = chunk.rotary_pos_emb
    if type(theirs) is YarnRotaryEmbedding and architecture.rope.kind is RopeKind.YARN:
        return
    if type(theirs) is not RotaryEmbedding:
        yield (
            f"the recipe's rotary embedding {type(theirs).__name__} would not be called: angles are computed from "
            "config.json"
        )
        return
    ours_F = rope.inverse_frequencies(architecture.rope, architecture.kv_channels)
    theirs_F = theirs.inv_freq.to(ours_F) / (theirs.seq_len_interpolation_factor or 1)
    if ours_F.shape != theirs_F.shape or not torch.allclose(ours_F, theirs_F, rtol=_ROUNDING, atol=0):
        yield (
            "the recipe's rotary frequencies differ from config.json's: compare --rotary-base, --rotary-percent, "
            "--use-rope-scaling and --rotary-seq-len-interpolation-factor with its rope_theta and rope_scaling"
        )


def _check_attention(layer: torch.nn.Module) -> Iterator[str]:
    attention: Any = getattr(layer, "self_attention", None)
    core = getattr(attention, "core_attention", None)
    number = getattr(layer, "layer_number", "?")
    if core is None:
        yield f"layer {number}, a {type(layer).__name__}, must have a self_attention.core_attention to replace"
        return
    if not type(core).__module__.startswith("megatron.core."):
        yield (
            f"the core attention of layer {number}, {type(core).__name__}, is the recipe's own and would not be "
            "called: shared-prompt attention takes its place"
        )
    names = [name for name, _ in core.named_parameters()]
    if names:
        yield (
            f"the core attention of layer {number} must not have parameters ({', '.join(names)}), because "
            "shared-prompt attention takes its place and has none: build the model without them"
        )
