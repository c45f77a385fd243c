"""The parts of a model whose parameters lie in the host's memory: the times when they come and go."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_rl.platforms.cpu_torch import Event, Stream
from megatron_rl.trainer.mcore.model import frozen

NUM_LAYERS, WIDTH, VOCAB = 5, 4, 11


class Chunk(torch.nn.Module):
    """The part of a model that offloading needs, with its embedding tied to its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_process = self.post_process = True
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))
        self.decoder = torch.nn.Module()
        self.decoder.layers = layers
        self.decoder.final_layernorm = torch.nn.LayerNorm(WIDTH)
        self.requires_grad_(False)

    def output_weight(self) -> torch.Tensor:
        return self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.decoder.layers:
            hidden = layer(hidden)
        return self.decoder.final_layernorm(hidden) @ self.output_weight().T


class Device:
    """A platform that records its calls; its host's memory is another than its own."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.hosts: list[torch.Tensor] = []

    def host_copy(self, values: torch.Tensor) -> torch.Tensor:
        self.hosts.append(values.clone())
        return self.hosts[-1]

    def device(self) -> torch.device:
        return torch.device("cpu")

    def stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda stream: self.asked.append("copying waits for computing"))

    def current_stream(self) -> Stream:
        stream = Stream()
        stream.wait_event = lambda event: self.asked.append("computing waits for copying")  # type: ignore[method-assign]
        return stream

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.asked.append("copy")
        yield

    def event(self) -> Event:
        return Event()


def test_a_layer_is_on_the_device_only_while_it_computes() -> None:
    ids = torch.arange(7)
    chunk: Any = Chunk()
    expected = chunk(ids)
    device: Any = Device()
    frozen.offload([chunk], device)
    hosts = {values.data_ptr() for values in device.hosts}
    seen: list[list[int]] = []

    def present(*_: Any) -> None:
        layers = enumerate(chunk.decoder.layers)
        seen.append([number for number, layer in layers if layer.weight.data_ptr() not in hosts])

    for layer in chunk.decoder.layers:
        layer.register_forward_pre_hook(present)
    for _ in range(2):
        seen.clear()
        assert torch.equal(chunk(ids), expected)
        assert {parameter.data_ptr() for parameter in chunk.parameters()} == hosts
        assert seen == [[number] for number in range(NUM_LAYERS)]


def test_the_next_layer_is_copied_while_one_computes_and_at_most_two_are_on_the_device() -> None:
    device: Any = Device()
    chunk: Any = Chunk()
    frozen.offload([chunk], device)
    chunk(torch.arange(3))
    num_parts = NUM_LAYERS + 2
    assert device.asked.count("copy") == device.asked.count("computing waits for copying") == num_parts
    first_two = ["copying waits for computing", "copy"] * 2 + ["computing waits for copying"]
    later = ["copying waits for computing", "copy", "computing waits for copying"]
    assert device.asked == [*first_two, *later * (num_parts - 2), "computing waits for copying"]


def test_weights_written_between_passes_are_used_by_the_next_one() -> None:
    chunk: Any = Chunk()
    device: Any = Device()
    frozen.offload([chunk], device)
    for parameter in chunk.parameters():
        parameter.fill_(0.0)
    assert torch.equal(chunk(torch.arange(3)), torch.zeros(3, VOCAB))
