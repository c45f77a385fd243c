"""Models that are not trained: they hold parameters, in the precision that they compute in, and nothing else.

They may lie in the host's memory. Then their parts come to the device only while they compute. Parts are the embedding,
each layer, and the last norm with the output layer. Invariants of a pass with offloading:

- while a part computes, the next one is copied, on a queue of its own;
- at most two parts are on the device, and none after the pass;
- between passes every parameter is in the host's memory, where weights are read, copied, saved and loaded.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from megatron_rl.platforms import Platform
from megatron_rl.trainer.mcore.model.gpt import PackedGPTModel, unwrap_module, wrap_in_precision


def freeze(chunks: Sequence[MegatronModule], host: Platform | None = None) -> list[torch.nn.Module]:
    """Put the chunks into evaluation mode, without gradients and so without gradient buffers.

    With `host`, their parameters lie in the host's memory between passes.
    """
    for chunk in chunks:
        chunk.requires_grad_(False)
        chunk.eval()
    wrapped = wrap_in_precision(chunks)
    if host is not None:
        offload(chunks, host)
    return wrapped


@torch.no_grad()
def copy_weights(source: Sequence[torch.nn.Module], target: Sequence[torch.nn.Module]) -> None:
    """Copy a model's parameters into another model of the same layout, one at a time."""
    for from_chunk, to_chunk in zip(source, target, strict=True):
        pairs = zip(*(unwrap_module(one).named_parameters() for one in (from_chunk, to_chunk)), strict=True)
        for (name, value), (same_name, place) in pairs:
            assert name == same_name
            place.copy_(value)


def offload(chunks: Sequence[PackedGPTModel], platform: Platform) -> None:
    """Move the parameters to the host's memory, and bring them to the device whenever a chunk runs."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = platform.host_copy(parameter.data)
        _OffloadedChunk(chunk, platform)


class _OffloadedPart:
    """Parameters that come and go together."""

    def __init__(self, parameters: Sequence[torch.Tensor], platform: Platform):
        self.parameters = parameters
        self._platform = platform
        self._host = [parameter.data for parameter in parameters]
        self._copies: list[torch.Tensor] = []
        self._has_arrived: Any = None

    def fetch(self, queue: Any) -> None:
        """Begin the copy to the device, unless it has begun."""
        if self._copies:
            return
        platform = self._platform
        # The memory belongs to the current queue. The copy waits until that queue no longer computes with it.
        self._copies = [torch.empty_like(values, device=platform.device()) for values in self._host]
        queue.wait_stream(platform.current_stream())
        with platform.on(queue):
            for copy, values in zip(self._copies, self._host, strict=True):
                copy.copy_(values, non_blocking=True)
            self._has_arrived = platform.event()
            self._has_arrived.record(queue)

    def place(self) -> None:
        """Point the parameters at the copies, once the copies have arrived."""
        self._platform.current_stream().wait_event(self._has_arrived)
        for parameter, copy in zip(self.parameters, self._copies, strict=True):
            parameter.data = copy

    def release(self) -> None:
        """Point the parameters at the host's memory again."""
        for parameter, values in zip(self.parameters, self._host, strict=True):
            parameter.data = values
        self._copies = []


class _OffloadedChunk:
    """The parts of a chunk in the order in which they compute; hooks on its modules fetch them."""

    def __init__(self, chunk: PackedGPTModel, platform: Platform):
        self._queue = platform.stream()
        self._parts: list[_OffloadedPart] = []
        modules: list[torch.nn.Module] = [*chunk.decoder.layers]
        if chunk.pre_process:
            modules.insert(0, chunk.embedding)
        for module in modules:
            self._add(module, list(module.parameters()), platform, until=module)
        if chunk.post_process:
            # The output layer's module is never called: only its weight is used.
            norm = chunk.decoder.final_layernorm
            self._add(norm, [*norm.parameters(), chunk.output_weight()], platform, until=chunk)
        brought = {id(parameter) for part in self._parts for parameter in part.parameters}
        assert brought == {id(parameter) for parameter in chunk.parameters()}

    def _add(
        self,
        module: torch.nn.Module,
        parameters: Sequence[torch.Tensor],
        platform: Platform,
        until: torch.nn.Module,
    ) -> None:
        number = len(self._parts)
        self._parts.append(_OffloadedPart(parameters, platform))
        module.register_forward_pre_hook(lambda *_: self._begin(number))
        until.register_forward_hook(lambda *_: self._parts[number].release())

    def _begin(self, number: int) -> None:
        for part in self._parts[number : number + 2]:
            part.fetch(self._queue)
        self._parts[number].place()
