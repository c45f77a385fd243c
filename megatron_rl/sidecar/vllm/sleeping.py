"""The sleep of a worker, in which it gives its device to a rank.

On devices it is vLLM's own sleep of level 2: weights and cache lose their memory. Level 1, which copies weights to the
host, would keep what the next publish replaces. vLLM keeps the model's buffers. Tensors that modules have besides are
kept here, such as the weight of a norm that does not learn it. Parameters are zero after a sleep, as before vLLM's
first load, and so is the cache.

A worker on a CPU, where vLLM has no sleep, overwrites parameters, such tensors and the cache, so that a rehearsal there
shows what a publish does not bring back.

The worker is called and not vLLM's engine, which would resume the scheduler by itself: an engine takes steps again when
its weights are proved.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch

Part = Literal["weights", "kv_cache"]
"""Parts that a worker gets back, by vLLM's names: weights come first, and are loaded before there is a cache."""


class Sleep:
    """The sleeps of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Tensors that vLLM does not keep, each with its copy on the host; none while the worker is awake."""
        self._is_asleep = False

    def begin(self) -> None:
        """Give back the memory of weights and cache; a second call changes nothing."""
        if self._is_asleep:
            return
        self._is_asleep = True
        others = list(_list_others(self._model, [*_list_caches(self._worker)]))
        self._kept = [(tensor, tensor.to("cpu", copy=True)) for tensor in others]
        if self._is_on_cpu:
            _fill([*self._model.parameters(), *others, *_list_caches(self._worker)], math.nan)
        else:
            self._worker.sleep(level=2)

    def end(self, part: Part) -> None:
        """Get back the memory of a part, which is zero; a second call for a part changes nothing more."""
        if not self._is_on_cpu:
            self._worker.wake_up(tags=[part])
        if part == "kv_cache":
            # Whatever is in new memory, such as infinities, could reach a sum in which its factor is zero.
            _fill(_list_caches(self._worker), 0)
            return
        _fill(self._model.parameters(), 0)
        for tensor, copy in self._kept:
            tensor.copy_(copy)
        self._kept, self._is_asleep = [], False

    @property
    def _model(self) -> Any:
        return self._worker.model_runner.get_model()

    @property
    def _is_on_cpu(self) -> bool:
        return bool(self._worker.device.type == "cpu")


def _list_caches(worker: Any) -> Iterator[torch.Tensor]:
    """List the tensors of the cache; a linear layer has several."""
    for cache in worker.model_runner.kv_caches:
        yield from cache if isinstance(cache, list | tuple) else (cache,)


def _list_others(model: torch.nn.Module, caches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """List the tensors of the model's device that are attributes of modules, and no part of a parameter or a cache."""
    known = [*model.parameters(), *model.buffers(), *caches]
    places = {tensor.untyped_storage().data_ptr() for tensor in known}
    device = next(model.parameters()).device
    for module in model.modules():
        for value in vars(module).values():
            if not isinstance(value, torch.Tensor) or value.device != device:
                continue
            if (place := value.untyped_storage().data_ptr()) not in places:
                places.add(place)
                yield value.data


@torch.no_grad()
def _fill(tensors: Iterable[torch.Tensor], value: float) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or not value:
            tensor.data.fill_(value)
