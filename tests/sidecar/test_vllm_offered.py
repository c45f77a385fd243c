"""Weights are copied from the memory that a trainer's ranks offer, and faults of an offer or a copy are found."""

import dataclasses

import msgspec
import pytest
import torch

from megatron_rl.errors import InputError
from megatron_rl.platforms.platform import CannotShare
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.shared.weights.offer import Offer
from megatron_rl.sidecar.vllm.held import NotHeld, Order
from megatron_rl.sidecar.vllm.in_place import OpenedMemory, Places, find_unheld
from tests.offers import HostSharing, Ranks
from tests.sidecar.test_vllm_held import SHAPES, drawn, specs_of
from tests.sidecar.test_vllm_in_place import NAMES, Plain, prove

pytestmark = pytest.mark.each_change

BY_COLUMNS = frozenset({"down"})


def copy(worker: Plain, order: Order, memory: OpenedMemory, offer: Offer) -> None:
    places = Places(worker.model, order)
    memory.copy(memory.open(offer), places)
    places.wait()


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize(("held", "given"), [(name, name) for name in NAMES] + [(torch.float32, torch.bfloat16)])
def test_pieces_of_any_layout_give_every_parameter_the_numbers_of_a_load(held, given, rank, size):
    worker, loaded = Plain(held, rank, size), Plain(held, rank, size)
    order, tensors = worker.learned(), drawn(given)
    ranks, memory = Ranks(tensors, BY_COLUMNS), OpenedMemory(HostSharing())
    for _ in range(2):
        copy(worker, order, memory, ranks.offer())
        loaded.load(tensors)
        wanted = loaded.parameters()
        assert all(torch.equal(parameter, wanted[name]) for name, parameter in worker.parameters().items())
        assert prove(worker, order, tensors).num_compared == len(wanted)
        tensors = drawn(given)
        ranks.put(tensors)


def test_each_byte_of_the_weights_is_copied_once(monkeypatch):
    worker = Plain(torch.bfloat16)
    order, tensors = worker.learned(), drawn(torch.bfloat16)
    copied, true = [], torch.Tensor.copy_

    def counted(to, values, *rest):
        copied.append(values.nbytes)
        return true(to, values, *rest)

    ranks = Ranks(tensors, BY_COLUMNS)
    memory = OpenedMemory(HostSharing())
    opened = memory.open(ranks.offer())
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", counted)
        copy(worker, order, memory, ranks.offer())
    assert sum(copied) == sum(tensor.nbytes for tensor in tensors.values())
    assert len(copied) <= sum(map(len, opened.pieces.values()))


def test_memory_is_opened_once_and_again_when_it_lies_elsewhere():
    tensors = drawn(torch.bfloat16)
    ranks, sharing = Ranks(tensors, BY_COLUMNS), HostSharing()
    memory = OpenedMemory(sharing)
    for _ in range(3):
        memory.open(ranks.offer())
    assert sharing.num_opened == 2
    ranks.share()
    memory.open(ranks.offer())
    assert sharing.num_opened == 4
    assert len(memory._kept) == 2


def test_memory_of_the_version_before_is_found(monkeypatch):
    """Plant a cache that takes the ranks' memory for what it was, though it lies elsewhere now."""
    worker = Plain(torch.bfloat16)
    order, old, new = worker.learned(), drawn(torch.bfloat16), drawn(torch.bfloat16)
    ranks, memory = Ranks(old, BY_COLUMNS), OpenedMemory(HostSharing())
    copy(worker, order, memory, ranks.offer())
    prove(worker, order, old)
    before = list(memory._kept.values())
    ranks.share()
    ranks.put(new)
    with monkeypatch.context() as patch:
        patch.setattr(OpenedMemory, "_open", lambda self, key: before[key[1]])
        copy(worker, order, memory, ranks.offer())
    with pytest.raises(NotHeld, match=f"^{len(SHAPES)} tensors do not hold the numbers that were given"):
        prove(worker, order, new)
    copy(worker, order, OpenedMemory(HostSharing()), ranks.offer())
    prove(worker, order, new)


def test_a_plan_of_copies_that_is_kept_though_the_memory_lies_elsewhere_is_found():
    """Plant a memory that never plans its copies again."""

    class Kept(OpenedMemory):
        def copy(self, opened, places):
            super().copy(opened if self._copied is None else self._copied, places)

    worker = Plain(torch.bfloat16)
    order, old, new = worker.learned(), drawn(torch.bfloat16), drawn(torch.bfloat16)
    ranks, memory = Ranks(old, BY_COLUMNS), Kept(HostSharing())
    copy(worker, order, memory, ranks.offer())
    prove(worker, order, old)
    ranks.share()
    ranks.put(new)
    copy(worker, order, memory, ranks.offer())
    with pytest.raises(NotHeld, match=f"^{len(SHAPES)} tensors do not hold the numbers that were given"):
        prove(worker, order, new)


def test_copies_are_planned_once_and_again_when_memory_or_parameters_lie_elsewhere():
    worker = Plain(torch.bfloat16)
    order, tensors = worker.learned(), drawn(torch.bfloat16)
    ranks, memory, movers = Ranks(tensors, BY_COLUMNS), OpenedMemory(HostSharing()), []

    def move_parameters():
        for parameter in worker.model.parameters():
            parameter.data = torch.zeros_like(parameter)

    for change in (None, None, ranks.share, move_parameters, None):
        if change is not None:
            change()
        copy(worker, order, memory, ranks.offer())
        prove(worker, order, tensors)
        movers.append(memory._mover)
    assert [movers.index(mover) for mover in movers] == [0, 0, 2, 3, 3]


@pytest.mark.parametrize("name", ["embed", "q", "down", "norm", "up.2"])
def test_a_rectangle_that_is_stale_torn_or_of_other_rows_is_found(monkeypatch, name):
    worker = Plain(torch.bfloat16)
    order, old, new = worker.learned(), drawn(torch.bfloat16), drawn(torch.bfloat16)
    ranks, memory = Ranks(old, BY_COLUMNS), OpenedMemory(HostSharing())
    true = Places.list_moves

    def stale(places, tensor, place, values_RC):
        """Leave out the first piece of the tensor."""
        if tensor != name or place.first_row or place.first_column:
            yield from true(places, tensor, place, values_RC)

    def torn(places, tensor, place, values_RC):
        """Copy the tensor's pieces but for their last row."""
        yield from true(places, tensor, place, values_RC)
        if tensor == name:
            last = place._replace(first_row=place.first_row + place.num_rows - 1, num_rows=1)
            yield from true(places, tensor, last, values_RC[-1:].clone().fill_(1.5))

    def moved(places, tensor, place, values_RC):
        """Read each piece of the tensor one row too far."""
        yield from true(places, tensor, place, values_RC.roll(1, 0) if tensor == name else values_RC)

    for plant in (stale, torn, moved):
        ranks.put(old)
        copy(worker, order, memory, ranks.offer())
        prove(worker, order, old)
        ranks.put(new)
        with monkeypatch.context() as patch:
            patch.setattr(Places, "list_moves", plant)
            copy(worker, order, OpenedMemory(HostSharing()), ranks.offer())
        with pytest.raises(NotHeld, match=f"1 tensors do not hold the numbers that were given: {name}$"):
            prove(worker, order, new)


def test_pieces_outside_the_memory_or_too_few_are_refused_before_a_weight_is_touched():
    tensors = drawn(torch.bfloat16)
    ranks, memory = Ranks(tensors, BY_COLUMNS), OpenedMemory(HostSharing())
    offer = ranks.offer()
    (first, *others), (other,) = offer.ranks[0].pieces, offer.ranks[1:]
    beyond = msgspec.structs.replace(first, first_element=len(ranks.memories[0]))
    for pieces, message in (
        ([beyond, *others], "a piece of tensor 0 does not lie in the memory that is offered"),
        (others, "the pieces that are offered do not cover 1 tensors: embed"),
    ):
        wrong = msgspec.structs.replace(offer.ranks[0], pieces=pieces)
        with pytest.raises(InputError, match=message):
            memory.open(msgspec.structs.replace(offer, ranks=[wrong, other]))


def test_a_worker_names_why_it_cannot_take_an_offer():
    ranks = Ranks(drawn(torch.bfloat16), BY_COLUMNS)
    elsewhere = msgspec.structs.replace(ranks.offer(), host=("another boot", "pid", "ipc"))
    with pytest.raises(CannotShare, match="the trainer runs on another host, or in another namespace"):
        OpenedMemory(HostSharing()).open(elsewhere)
    older = msgspec.structs.replace(ranks.offer(), torch="2.11.0+cu130")
    with pytest.raises(CannotShare, match=r"the trainer's torch is 2\.11\.0\+cu130 and the engine's is 2\."):
        OpenedMemory(HostSharing()).open(older)
    other_build = msgspec.structs.replace(ranks.offer(), torch=torch.__version__.partition("+")[0] + "+cu130")
    OpenedMemory(HostSharing()).open(other_build)
    handle = dataclasses.replace(ranks.ranks[0].handles[0], memory=b"/no-such-memory")
    unknown = msgspec.structs.replace(ranks.ranks[0], handles=[handle])
    with pytest.raises(CannotShare, match="cannot be opened"):
        OpenedMemory(HostSharing()).open(msgspec.structs.replace(ranks.offer(), ranks=[unknown, ranks.ranks[1]]))
    order = Plain(torch.bfloat16).learned()
    tied = TensorSpec("lm_head.weight", (4, 4), "bfloat16")
    assert find_unheld(order, [*specs_of("bfloat16"), tied]) == set()
    rows = {name: rows for name, rows in order.rows.items() if name != "qkv.weight"}
    partial = type(order)(rows, order.packed, order.handed_over, order.unknown)
    assert find_unheld(partial, specs_of("bfloat16")) == {"k", "q", "v"}
