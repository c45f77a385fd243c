"""The log-probs of one sequence, by every replica of a model in one pass of the schedule."""

from collections.abc import Sequence

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from megatron_rl.trainer.data.device_copier import DeviceCopier
from megatron_rl.trainer.data.packing import pack_sequences
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel
from megatron_rl.trainer.mcore.session import Session
from megatron_rl.trainer.mcore.step.forward_step import compute_log_probs, is_reporter


class SequencePass:
    """Computes log-probs of sequences on all ranks."""

    def __init__(self, chunks: Sequence[PackedGPTModel], session: Session, multiple_of: int = 1):
        """Compute with `chunks` that are not wrapped: parameters that are gathered late must have been gathered."""
        self._chunks = list(chunks)
        self._session = session
        self._multiple_of = multiple_of
        self._copier = DeviceCopier(session.platform)

    def compute(self, tokens: list[int]) -> list[list[float]]:
        """Compute the log-probs of every token but the first, by each replica; every rank takes part."""
        config = get_model_config(self._chunks[0])
        pack = pack_sequences([tokens], self._multiple_of)
        pack, pending = self._copier.copy(pack, pack.layout)
        pending.wait()
        # An interleaved schedule requires a micro-batch for each stage.
        is_interleaved = len(self._chunks) > 1
        count = parallel_state.get_pipeline_model_parallel_world_size() if is_interleaved else 1
        # The parameters are already gathered: the pass must not gather them again.
        sync, config.param_sync_func = config.param_sync_func, None
        try:
            results = compute_log_probs(self._chunks, [pack] * count)
        finally:
            config.param_sync_func = sync
        own = results[0].to(torch.float32).tolist() if is_reporter() else None
        return [log_probs for log_probs in self._session.gather(own) if log_probs is not None]
