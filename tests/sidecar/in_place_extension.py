"""A worker extension for a vLLM on a CPU whose layers compute with their parameters as they are loaded, as on a GPU.

So weights are copied in place, also from memory that is offered. By a test's plan a copy leaves a tensor out, or a
layer keeps a copy of its parameter.
"""

from typing import Any
from unittest import mock

import torch
from vllm import _custom_ops

from megatron_rl.sidecar.vllm.held_model import HeldModel
from megatron_rl.sidecar.vllm.in_place import Places
from megatron_rl.sidecar.vllm.worker import WorkerExtension, answered
from tests.offers import HostSharing

# Without it vLLM packs every linear layer on a CPU.
_custom_ops._supports_onednn = False


class Model(HeldModel):
    in_place_on = ("cpu",)
    num_reloads = 0
    left_out = ""

    def find_sharing(self) -> HostSharing:
        return HostSharing()

    def copy(self, tensors: Any) -> Any:
        put, left_out = Places.put, self.left_out
        with mock.patch.object(
            Places, "put", lambda places, name, tensor: None if name == left_out else put(places, name, tensor)
        ):
            return super().copy(tensors)

    def reload(self, tensors: Any) -> None:
        self.num_reloads += 1
        super().reload(tensors)


class Extension(WorkerExtension):
    megatron_rl_model = Model

    @answered
    def megatron_rl_count_reloads(self) -> dict[str, int]:
        return {"reloads": self.megatron_rl_held.num_reloads}

    @answered
    def megatron_rl_leave_out(self, name: str) -> dict[str, str]:
        """Leave this tensor out of later copies; an empty name leaves out none."""
        self.megatron_rl_held.left_out = name
        return {}

    @answered
    def megatron_rl_keep_copies(self) -> dict[str, str]:
        """Have the output layer compute with a copy that it makes when vLLM loads it; forget the learned order."""
        head = self.model_runner.get_model().lm_head
        process = type(head.quant_method).process_weights_after_loading

        def keep(method: Any, layer: torch.nn.Module) -> None:
            process(method, layer)
            if layer is head:
                kept = layer.weight.detach().clone()
                layer.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, kept, bias)

        type(head.quant_method).process_weights_after_loading = keep
        self.megatron_rl_held.order = None
        return {}
