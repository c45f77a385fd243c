"""The copies of micro-batches to the device: none where the device is the host; elsewhere one for all tensors."""

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.layout import Layout
from megatron_rl.ops.shared_prompt.tables import find_tables, list_tables, list_tensors
from megatron_rl.platforms.cpu import CpuPlatform
from megatron_rl.trainer.data.device_copier import ALIGNMENT, DeviceCopier
from megatron_rl.trainer.data.packing import Pack, pack_groups

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Every:
    """Tensors of each dtype that a micro-batch may have, of odd lengths, empty and without a dimension."""

    tensors: tuple[torch.Tensor, ...]
    layout: Layout


class OtherDevice(CpuPlatform):
    """The host, said to be a device whose memory is its own."""

    is_host = False

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self.queue = mock.Mock()

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        self.buffers.append(torch.full((num_bytes,), 255, dtype=torch.uint8))
        return self.buffers[-1]

    def current_stream(self) -> Any:
        return self.queue

    def on(self, stream: Any) -> Any:
        return nullcontext()


@pytest.fixture
def platform() -> Iterator[OtherDevice]:
    with mock.patch.object(torch.Tensor, "record_stream"):
        yield OtherDevice()


def have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    # A tensor of no elements may have strides that a view refuses.
    found = [tensor.flatten().view(torch.uint8) for tensor in (one, other) if tensor.numel()]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*(found or (one, other)))


def draw_pack() -> Pack:
    return pack_groups([([1, 2, 3], [[4, 5], [6]]), ([7], [[8, 9, 10]])], multiple_of=8).divided(2)


def test_nothing_is_copied_if_the_device_is_the_host() -> None:
    pack = draw_pack()
    copied, arrival = DeviceCopier(CpuPlatform()).copy(pack, pack.layout)
    arrival.wait()
    assert copied is pack


def test_one_copy_carries_every_tensor_with_its_bits(platform: OtherDevice) -> None:
    tensors = (
        torch.arange(5),
        torch.tensor([True, False, True]),
        torch.tensor(float("nan")),
        torch.zeros(0, 3),
        torch.arange(7, dtype=torch.int32).view(7, 1),
        torch.randn(3, 5, dtype=torch.bfloat16).T,
        torch.randn(2, dtype=torch.float64),
    )
    every = Every(tensors, Layout((1,), (-1,)))
    copied, arrival = DeviceCopier(platform).copy(every, every.layout)
    assert len(platform.buffers) == 1
    for found, true in zip(copied.tensors, tensors, strict=True):
        assert have_same_bits(found, true)
        assert found.data_ptr() % 16 == ALIGNMENT % 16 == 0 or not found.numel()
    assert len({tensor.untyped_storage().data_ptr() for tensor in copied.tensors}) == 1
    platform.queue.wait_event.assert_not_called()
    arrival.wait()
    platform.queue.wait_event.assert_called_once()


@pytest.mark.parametrize("name", BACKENDS)
def test_the_tables_of_every_attention_travel_with_the_pack(name: str, platform: OtherDevice) -> None:
    pack = draw_pack()
    BACKENDS[name].prepare(pack.layout, torch.device("cuda"))
    tables = list_tables(pack.layout)
    num_tensors = len(list_tensors(pack)) + len(list_tensors(tables))
    assert len(list_tensors(tables)) > 0
    copied, _ = DeviceCopier(platform).copy(pack, pack.layout)
    assert len(platform.buffers) == 1
    place = copied.tokens_T.untyped_storage().data_ptr()
    with mock.patch.object(torch.Tensor, "to", side_effect=AssertionError("a copy of its own")):
        found = [find_tables(pack.layout, CPU, *key) for key in tables]
    there = [*list_tensors(copied), *list_tensors(found)]
    assert len(there) == num_tensors
    assert {tensor.untyped_storage().data_ptr() for tensor in there} == {place}
    for one, true in zip(list_tensors(found), list_tensors(tables), strict=True):
        assert have_same_bits(one, true)
