"""A worker extension for a vLLM whose loads differ from what it reports, by a test's plan."""

from collections.abc import Iterable, Iterator

import torch

from megatron_rl.sidecar.vllm.worker import WorkerExtension, answered


class Extension(WorkerExtension):
    megatron_rl_stale = ""
    megatron_rl_before: dict[str, torch.Tensor] | None = None

    @answered
    def megatron_rl_load_otherwise(self, names: str) -> dict[str, str]:
        """Keep the tensors that a later load brings for names that hold this text; empty ends it."""
        model = type(self.model_runner.get_model())
        if self.megatron_rl_before is None:
            self.megatron_rl_before = {}
            load_weights = model.load_weights

            def load(model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
                return load_weights(model, self._kept(weights))

            model.load_weights = load
        self.megatron_rl_stale = names
        return {}

    def _kept(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            known = self.megatron_rl_before
            if not self.megatron_rl_stale or self.megatron_rl_stale not in name:
                known[name] = tensor.clone()
            yield name, known[name]
