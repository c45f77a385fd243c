"""A worker extension for a vLLM that puts other adapters into its slot than it is given, by a test's plan."""

from collections.abc import Mapping

import torch

from megatron_rl.sidecar.vllm.adapters import AdapterSlot
from megatron_rl.sidecar.vllm.worker import WorkerExtension, answered


class Extension(WorkerExtension):
    @answered
    def megatron_rl_change_adapters(self, fault: str) -> dict[str, str]:
        """Keep the adapters of the next load, or change one number, in all loads from now on; empty ends this."""
        first: dict[str, torch.Tensor] = {}
        put = AdapterSlot.put

        def put_others(number: int, tensors: Mapping[str, torch.Tensor]) -> None:
            if fault == "stale" and not first:
                first.update({name: tensor.clone() for name, tensor in tensors.items()})
            given = first if fault == "stale" else dict(tensors)
            if fault == "one number":
                name = sorted(given)[-1]
                given[name] = given[name].clone()
                given[name][-1, -1] += 1e-6
            put(slot, number, given)

        slot = self.megatron_rl_slot
        assert slot is not None
        slot.__dict__.pop("put", None)
        if fault:
            slot.put = put_others  # type: ignore[method-assign]
        return {}
