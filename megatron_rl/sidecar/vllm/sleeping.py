"""The sleep of a worker, in which it gives its device to a rank.

On devices it is vLLM's own sleep of level 2: weights and cache lose their memory, and what vLLM's model derives from
weights is lost with them; vLLM keeps buffers. Level 1, which copies weights to the host, would keep what the next
publish replaces. A worker on a CPU, where vLLM has no sleep, overwrites weights and cache, so that a rehearsal there
shows what a publish does not bring back.

The worker is called and not vLLM's engine, which would resume the scheduler by itself: an engine takes steps again when
its weights are proved.
"""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch

Part = Literal["weights", "kv_cache"]
"""Parts that a worker gets back, by vLLM's names: weights come first, and are loaded before there is a cache."""


def sleep(worker: Any) -> None:
    """Give back the memory of weights and cache; what was in it is lost."""
    if _is_on_cpu(worker):
        lost = [*worker.model_runner.get_model().parameters(), *_list_caches(worker)]
        _fill(lost, math.nan)
    else:
        worker.sleep(level=2)


def wake(worker: Any, part: Part) -> None:
    """Get back the memory of a part. Weights have no values then, and the cache is zero, as at the start."""
    if not _is_on_cpu(worker):
        worker.wake_up(tags=[part])
    if part == "kv_cache":
        # Whatever is in new memory, such as infinities, could reach a sum in which its factor is zero.
        _fill(_list_caches(worker), 0)


def _is_on_cpu(worker: Any) -> bool:
    return bool(worker.device.type == "cpu")


def _list_caches(worker: Any) -> Iterator[torch.Tensor]:
    """List the tensors of the cache; a linear layer has several."""
    for cache in worker.model_runner.kv_caches:
        yield from cache if isinstance(cache, list | tuple) else (cache,)


@torch.no_grad()
def _fill(tensors: Any, value: float) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or not value:
            tensor.fill_(value)
