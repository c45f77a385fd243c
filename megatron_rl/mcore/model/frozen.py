"""Models that are not trained: they hold parameters, in the precision they compute in, and nothing else."""

from collections.abc import Sequence

import torch
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from megatron_rl.mcore.model.gpt import PackedGPTModel, unwrap
from megatron_rl.mcore.model.offload import offload
from megatron_rl.platforms import Platform


def freeze(chunks: Sequence[PackedGPTModel], host: Platform | None = None) -> list[torch.nn.Module]:
    """Put the chunks into evaluation mode, without gradients and so without gradient buffers.

    With `host`, their parameters stay in the host's memory between passes.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    config = get_model_config(chunks[0])
    is_half = config.bf16 or config.fp16
    wrapped = [Float16Module(config, chunk) if is_half else chunk for chunk in chunks]
    if host is not None:
        offload(chunks, host)
    return wrapped


@torch.no_grad()
def copy_weights(source: Sequence[torch.nn.Module], target: Sequence[torch.nn.Module]) -> None:
    """Copy one model's parameters into those of another of the same layout, one after the other."""
    for from_chunk, to_chunk in zip(source, target, strict=True):
        pairs = zip(unwrap(from_chunk).named_parameters(), unwrap(to_chunk).named_parameters(), strict=True)
        for (name, value), (same_name, place) in pairs:
            assert name == same_name
            place.copy_(value)
