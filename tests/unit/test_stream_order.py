"""Tensors that vLLM's own sender packs on several streams in turn, checked in the manner of torch's CUDA sanitizer.

A tensor that is read on another stream than it was written on, without an event between, is an error; so is one whose
memory may be given out again while that stream reads it. No device is needed: streams are counters.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.trainer.mcore.publish.stream import WholeModel

packed_tensor = pytest.importorskip("vllm.distributed.weight_transfer.packed_tensor")

BUCKETS = [[f"bucket{bucket}.tensor{index}" for index in range(7)] for bucket in range(13)]
NUM_ELEMENTS = 16
# A pack of the sender's ends in the middle of a bucket.
BUFFER_BYTES = 4 * NUM_ELEMENTS * 9


@dataclasses.dataclass(eq=False)
class Stream:
    """The operations that were queued on a stream, and those of other streams that come before."""

    length: int = 0
    waited: dict["Stream", int] = dataclasses.field(default_factory=dict)

    def record_event(self) -> tuple["Stream", int]:
        return self, self.length

    def wait_event(self, event: "Event") -> None:
        stream, length = event.place
        self.waited[stream] = max(length, self.waited.get(stream, 0))

    def comes_after(self, stream: "Stream", length: int) -> bool:
        return stream is self or self.waited.get(stream, 0) >= length

    def synchronize(self) -> None: ...


class Event:
    """A place in a stream."""

    def record(self, stream: Stream) -> None:
        self.place = stream.record_event()


class Device:
    """Streams, the current one, and the reads and writes on them."""

    def __init__(self) -> None:
        self.current = Stream()
        self.written: dict[str, tuple[Stream, int]] = {}
        self.kept: set[tuple[int, Stream]] = set()
        self.errors: list[str] = []
        self.num_read_elsewhere = 0

    def current_stream(self) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def write(self, name: str) -> None:
        self.current.length += 1
        self.written[name] = self.current, self.current.length

    def read(self, item: tuple[str, torch.Tensor]) -> torch.Tensor:
        name, tensor = item
        self.current.length += 1
        writer, length = self.written[name]
        if writer is not self.current:
            self.num_read_elsewhere += 1
            if not self.current.comes_after(writer, length):
                self.errors.append(f"{name} is read before it is written")
            if (tensor.data_ptr(), self.current) not in self.kept:
                self.errors.append(f"the memory of {name} may be given out while it is read")
        return tensor


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    streams = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda *_: streams)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: device.kept.add((tensor.data_ptr(), stream))
    )
    return device


def build_model(device: Device) -> WholeModel:
    tensors = {name: torch.full((NUM_ELEMENTS,), float(index)) for index, name in enumerate(itertools.chain(*BUCKETS))}

    def stream(*_: Any) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for bucket in BUCKETS:
            for name in bucket:
                device.write(name)
            yield [(name, tensors[name]) for name in bucket]

    specs = [[TensorSpec(name, (NUM_ELEMENTS,), "float32") for name in bucket] for bucket in BUCKETS]
    weights: Any = SimpleNamespace(stream=stream, stream_specs=lambda *_: specs)
    session: Any = SimpleNamespace(
        platform=SimpleNamespace(device_type="cuda", current_stream=device.current_stream, event=Event),
    )
    return WholeModel(weights, session, None)


def send(tensors: Iterator[tuple[str, torch.Tensor]], device: Device) -> torch.Tensor:
    sent: list[torch.Tensor] = []
    group = SimpleNamespace(broadcast=lambda packed, src: sent.append(packed.clone()))
    packed_tensor.packed_nccl_broadcast_producer(tensors, group, 0, device.read, BUFFER_BYTES)
    return torch.cat(sent).view(torch.float32)


def test_each_tensor_is_written_before_the_senders_stream_reads_it_and_kept_until_then(device: Device) -> None:
    sent = send(iter(build_model(device)), device)
    assert sent.tolist() == [float(index) for index in range(13 * 7) for _ in range(NUM_ELEMENTS)]
    assert device.num_read_elsewhere > 10
    assert device.errors == []


def test_the_checker_finds_tensors_that_are_handed_over_without_an_event(device: Device) -> None:
    model = build_model(device)
    plain = (item for bucket in model._weights.stream() for item in bucket)
    send(plain, device)
    errors = [error for error in device.errors if "before it is written" in error]
    assert len(errors) == device.num_read_elsewhere > 10
