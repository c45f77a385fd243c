"""A worker extension for a vLLM that holds other adapters than it is given, or scales them, by a test's plan."""

from collections.abc import Mapping
from typing import Any

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

        slot = self.megatron_rl_held.slot
        assert slot is not None
        slot.__dict__.pop("put", None)
        if fault:
            slot.put = put_others  # type: ignore[method-assign]
        return {}

    @answered
    def megatron_rl_scale_adapters(self, factor: str) -> dict[str, str]:
        """Compute with all adapters times a factor from now on, with the numbers in the slot as they are."""
        slot = self.megatron_rl_held.slot
        assert slot is not None
        wrappers = {id(layer.punica_wrapper): layer.punica_wrapper for layer in slot._manager.modules.values()}
        for wrapper in wrappers.values():

            def add_scaled(y: Any, x: Any, a: Any, b: Any, scale: float, *rest: Any, own: Any = wrapper) -> Any:
                return type(own).add_lora_linear(own, y, x, a, b, scale * float(factor), *rest)

            wrapper.add_lora_linear = add_scaled
        return {}
