"""A worker's sleep, over a model whose modules hold tensors in all ways that vLLM's do."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.sidecar.vllm.sleeping import Sleep


class Norm(torch.nn.Module):
    """A module with a parameter, a buffer, a tensor that is neither, a view of the parameter, and a cache."""

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__()
        self.learned = torch.nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))
        self.weight = torch.full((4,), 2.0)
        self.ids = torch.arange(3)
        self.tail = self.learned.data[2:]
        self.kv_cache = cache


class Worker:
    """A worker of a device whose memory is lost: `sleep` and `wake_up` are vLLM's."""

    def __init__(self, device: str) -> None:
        self.caches = [torch.ones(8), [torch.ones(2, dtype=torch.float16), torch.ones(3)]]
        self.model = torch.nn.Sequential(Norm(self.caches[0]))
        self.model_runner = SimpleNamespace(get_model=lambda: self.model, kv_caches=self.caches)
        self.device = SimpleNamespace(type=device)
        self.calls: list[object] = []

    def sleep(self, level: int) -> None:
        self.calls.append(level)
        norm = self.model[0]
        for tensor in (norm.learned.data, norm.weight, norm.ids):
            tensor.fill_(7)

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(tags)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_and_cache_are_zero_after_a_sleep_and_what_vllm_does_not_keep_is_as_before(device: str) -> None:
    worker = Worker(device)
    sleep, norm = Sleep(worker), worker.model[0]
    for _ in range(2):
        sleep.begin()
        sleep.begin()
        assert not (norm.weight == 2).any()
        assert not (norm.learned == 1).any()
        sleep.end("weights")
        assert norm.learned.tolist() == [0.0] * 4
        assert norm.tail.tolist() == [0.0] * 2
        assert norm.weight.tolist() == [2.0] * 4
        assert norm.ids.tolist() == [0, 1, 2]
        assert norm.table.tolist() == [0.0, 1.0, 2.0, 3.0]
        sleep.end("kv_cache")
        first, (second, third) = worker.caches
        assert not any(cache.any() for cache in (first, second, third))
        norm.learned.data.fill_(1)
    assert worker.calls == ([] if device == "cpu" else [2, ["weights"], ["kv_cache"]] * 2)
