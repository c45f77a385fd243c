"""How slots become micro-batches in a run."""

import torch

from megatron_rl.algorithm.advantages import ADVANTAGES
from megatron_rl.config import Settings
from megatron_rl.data.batch import Batcher
from megatron_rl.mcore.backend import backend_of
from megatron_rl.ops.shared_prompt import backend


def batcher_of(settings: Settings, device: torch.device) -> Batcher:
    """What the settings say of packs."""
    tensor = settings.transformer.get("tensor_model_parallel_size", 1)
    attention = backend(backend_of(settings).name)
    return Batcher(
        ADVANTAGES[settings.algorithm.advantage],
        multiple_of=tensor if settings.transformer.get("sequence_parallel") else 1,
        vocab_size=settings.architecture.vocab_size,
        is_shared=settings.attention.is_shared,
        prepare=lambda layout: attention.prepare(layout, device),
    )
