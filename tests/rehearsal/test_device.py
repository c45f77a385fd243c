"""The emulated device itself: its refusals, its counts, and that each check turns red on a fault."""

import pickle

import pytest
import torch

from tests.rehearsal.device import DEVICE, generator, pin
from tests.rehearsal.rehearsed import rehearsed
from tests.rehearsal.streams import DEFAULT, DeviceFault, Event, Stream, state
from tests.rehearsal.syncs import log

NPU = "npu:0"


@rehearsed
def test_tensors_of_every_factory_say_that_they_lie_on_the_device() -> None:
    ones = torch.ones(3)
    made = [
        torch.empty(2, device=NPU),
        torch.zeros(2, 2, device=NPU),
        torch.full((2,), 1.5, device=NPU),
        torch.arange(4, device=NPU),
        torch.linspace(0, 1, 3, device=NPU),
        torch.eye(2, device=NPU),
        torch.randn(3, device=NPU),
        torch.tensor([1.0, 2.0], device=NPU),
        torch.tensor(3.0, device=NPU),
        torch.zeros_like(ones, device=NPU),
        ones.new_zeros(2, device=NPU),
        ones.to(NPU),
        ones.to(NPU).to(torch.bfloat16),
        torch.empty_strided((2, 2), (1, 2), device=NPU),
    ]
    assert all(str(tensor.device) == NPU and not tensor.is_cuda for tensor in made)
    assert made[7].tolist() == [1.0, 2.0]
    assert made[3].cpu().tolist() == [0, 1, 2, 3]


@rehearsed
def test_operands_of_two_devices_are_refused_and_numbers_are_not() -> None:
    there, here = torch.ones(2, 2, device=NPU), torch.ones(2, 2)
    for mix in (
        lambda: there + here,
        lambda: there @ here,
        lambda: torch.nn.functional.linear(there, here),
        lambda: torch.cat([there, here]),
        lambda: there.index_select(0, torch.zeros(1, dtype=torch.int64)),
        lambda: torch.stack([torch.ones((), device=NPU), torch.ones(())]),
    ):
        with pytest.raises(RuntimeError, match="two devices"):
            mix()
    assert (there + torch.tensor(1.0)).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


@rehearsed
def test_a_forgotten_move_of_an_input_to_the_device_is_refused_by_a_module() -> None:
    layer = torch.nn.Linear(2, 2).to(NPU)
    layer(torch.ones(1, 2).to(NPU)).sum().backward()
    assert str(layer.weight.grad.device) == NPU
    with pytest.raises(RuntimeError, match=r"two devices.*test_device"):
        layer(torch.ones(1, 2))


@rehearsed
def test_a_parameter_may_be_pointed_at_other_memory_there_and_here() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, device=NPU))
    buffer = torch.zeros(5, device=NPU)
    parameter.data = buffer[1:4]
    parameter.data.fill_(7)
    assert buffer.tolist() == [0, 7, 7, 7, 0]
    parameter.data = torch.ones(3)
    assert parameter.device.type == "cpu"
    assert (parameter + torch.ones(3)).tolist() == [2, 2, 2]
    parameter.data = torch.ones(1, device=NPU)
    assert parameter.shape == (1,)
    assert str(parameter.device) == NPU


@rehearsed
def test_the_device_draws_its_own_random_numbers() -> None:
    before = torch.get_rng_state()
    generator.manual_seed(3)
    first = torch.randn(4, device=NPU)
    second = torch.nn.functional.dropout(torch.ones(4, device=NPU))
    generator.manual_seed(3)
    assert torch.equal(torch.randn(4, device=NPU).cpu(), first.cpu())
    assert torch.equal(torch.nn.functional.dropout(torch.ones(4, device=NPU)).cpu(), second.cpu())
    assert torch.equal(torch.get_rng_state(), before)


@rehearsed
def test_memory_is_counted_with_its_peak_and_views_count_nothing() -> None:
    before = state.allocated
    tensor = torch.zeros(256, device=NPU)
    views = [tensor[3:], tensor.view(2, -1).t()]
    assert state.allocated - before == 1024
    del tensor
    assert state.allocated - before == 1024
    del views
    assert state.allocated == before
    state.reset_peak()
    for _ in range(3):
        torch.zeros(256, device=NPU)
    assert state.peak - before == 1024


@rehearsed
def test_a_tensor_in_a_message_comes_back_to_the_device() -> None:
    tensor = pickle.loads(pickle.dumps(torch.arange(3, device=NPU)))
    assert str(tensor.device) == NPU
    assert tensor.tolist() == [0, 1, 2]


@rehearsed
def test_every_wait_of_the_host_is_noted_with_its_line() -> None:
    tensor = torch.tensor([1.0, 0.0], device=NPU)
    for wait in (
        tensor[0].item,
        tensor.tolist,
        tensor.cpu,
        tensor.nonzero,
        lambda: bool(tensor[0] > 0),
        lambda: float(tensor.sum()),
        lambda: tensor[tensor > 0],
        lambda: tensor[torch.zeros(1, dtype=torch.int64)],
        lambda: torch.equal(tensor, tensor),
        lambda: torch.ones(2).to(NPU),
        lambda: torch.ones(2).to(NPU, non_blocking=True),
        lambda: torch.tensor(1.0, device=NPU),
    ):
        with log.during() as syncs:
            wait()
        assert len(syncs) == 1, syncs
        assert syncs[0].where.startswith("tests.rehearsal.test_device:")
    with log.during() as syncs:
        tensor[tensor < 0] = 0.0
        torch.where(tensor > 0, tensor, 0.0).index_select(0, torch.zeros(1, dtype=torch.int64, device=NPU)).sum()
        pin(torch.ones(2)).to(NPU, non_blocking=True)
    assert not syncs


@rehearsed
def test_a_tensor_written_on_one_stream_and_read_on_another_needs_an_event_between() -> None:
    tensor, other = torch.zeros(2, device=NPU), Stream()
    with state.on(other), pytest.raises(DeviceFault, match="no event between: aten::add on stream"):
        tensor + 1
    event = Event()
    event.record()
    event.wait(other)
    with state.on(other):
        tensor.add_(1)
    with pytest.raises(DeviceFault, match="aten::mul on stream 0"):
        tensor * 2
    DEFAULT.wait_stream(other)
    assert (tensor * 2).tolist() == [2, 2]
    with state.on(other):
        other.wait_stream(DEFAULT)
        tensor * 2
    with pytest.raises(DeviceFault, match="aten::zero_"):
        tensor.zero_()
    other.synchronize()
    tensor.zero_()
    assert len(state.faults) == 3


@rehearsed
def test_memory_must_not_be_used_again_while_another_stream_reads_it() -> None:
    other = Stream()

    def read_and_forget() -> torch.Tensor:
        tensor = torch.zeros(2, device=NPU)
        other.wait_stream(DEFAULT)
        with state.on(other):
            tensor * 2
        return tensor

    tensor = read_and_forget()
    del tensor
    with pytest.raises(DeviceFault, match="used again while a stream still uses it"):
        torch.zeros(2, device=NPU)
    tensor = read_and_forget()
    DEFAULT.wait_stream(other)
    del tensor
    tensor = read_and_forget()
    tensor.record_stream(other)
    del tensor
    torch.zeros(2, device=NPU)


@rehearsed
def test_a_copy_that_does_not_block_reads_the_hosts_memory_late() -> None:
    host = pin(torch.ones(2))
    tensor = host.to(NPU, non_blocking=True)
    host.add_(1)
    with pytest.raises(DeviceFault, match=r"changed while it was still being copied .*test_device"):
        tensor + 1
    host = pin(torch.ones(2))
    tensor = host.to(NPU, non_blocking=True)
    DEFAULT.synchronize()
    host.add_(1)
    assert tensor.tolist() == [1, 1]


@rehearsed
def test_a_copy_to_the_host_that_does_not_block_brings_nothing_before_a_wait() -> None:
    tensor = torch.ones(2, device=DEVICE)
    host = tensor.to("cpu", non_blocking=True)
    assert host.isnan().all()
    tensor.zero_()
    DEFAULT.synchronize()
    assert host.tolist() == [1, 1]
