"""A worker extension whose loads a test can make fail without a word."""

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.sidecar.vllm_extension import Record, WorkerExtension, _mapped, _specs


class Extension(WorkerExtension):
    megatron_rl_mode = ""

    def megatron_rl_load_otherwise(self, mode: str) -> dict[str, str]:
        """What later loads do: nothing, or load what is in a folder; empty ends it."""
        self.megatron_rl_mode = mode
        return {}

    def megatron_rl_load_in_place(self, tensors: Mapping[str, torch.Tensor]) -> Record:
        if self.megatron_rl_mode == "nothing":
            record = Record(set())
        else:
            other = _mapped(Path(self.megatron_rl_mode)) if self.megatron_rl_mode else tensors
            record = super().megatron_rl_load_in_place(other)
        record.specs = _specs(tensors)
        return record
