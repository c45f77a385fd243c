"""How slots become micro-batches in a run."""

import torch

from megatron_rl.algorithm.advantages import ADVANTAGES
from megatron_rl.config import Settings
from megatron_rl.data.batch import Batcher
from megatron_rl.mcore.backend import backend_of
from megatron_rl.ops.shared_prompt import backend


def pack_multiple(settings: Settings) -> int:
    """What the length of a pack is padded to a multiple of: every rank that rows are divided over has as many."""
    fields = settings.transformer
    tensor = fields.get("tensor_model_parallel_size", 1) if fields.get("sequence_parallel") else 1
    return tensor * fields.get("context_parallel_size", 1)


def batcher_of(settings: Settings, device: torch.device) -> Batcher:
    """What the settings say of packs."""
    attention = backend(backend_of(settings).name)
    return Batcher(
        ADVANTAGES[settings.algorithm.advantage],
        multiple_of=pack_multiple(settings),
        vocab_size=settings.architecture.vocab_size,
        is_shared=settings.attention.is_shared,
        prepare=lambda layout: attention.prepare(layout, device),
    )
