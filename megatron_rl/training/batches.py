"""How slots become micro-batches in a run."""

import torch

from megatron_rl.algorithm.advantages import ADVANTAGES
from megatron_rl.config import Settings
from megatron_rl.data.batch import Batcher
from megatron_rl.ops.shared_prompt import backend


def pack_multiple(settings: Settings) -> int:
    """What the length of a pack is padded to a multiple of: every rank that rows are divided over has as many."""
    config = settings.transformer
    return (config.tensor_model_parallel_size if config.sequence_parallel else 1) * config.context_parallel_size


def batcher_of(settings: Settings, device: torch.device) -> Batcher:
    """What the settings say of packs."""
    attention = backend(settings.attention.backend)
    return Batcher(
        ADVANTAGES[settings.algorithm.advantage],
        multiple_of=pack_multiple(settings),
        vocab_size=settings.architecture.vocab_size,
        is_shared=settings.attention.is_shared,
        prepare=lambda layout: attention.prepare(layout, device),
    )
