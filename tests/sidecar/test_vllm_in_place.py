"""Weights are copied in place by the learned order as a load would put them, and faults of a copy are found."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.shared.weights.fingerprint import digest
from megatron_rl.shared.weights.mapping import TensorSpec
from megatron_rl.sidecar.vllm import in_place
from megatron_rl.sidecar.vllm.held import (
    InPlaceDigester,
    LoadProof,
    NotHeld,
    Order,
    as_matrix,
)
from megatron_rl.sidecar.vllm.held_model import HeldModel
from megatron_rl.sidecar.vllm.in_place import Places, find_misfits, find_obstacles
from megatron_rl.sidecar.vllm.learned_order import _digest_part, learn_order
from megatron_rl.sidecar.vllm.received import Record
from tests.sidecar.test_vllm_held import (
    EXPERTS,
    SHAPES,
    WIDTH,
    InTurnWorker,
    Keeps,
    Packs,
    Shuffles,
    Worker,
    drawn,
    specs_of,
)

Tensors = Mapping[str, torch.Tensor]
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Plain(Worker):
    """A worker whose layers use their parameters as they are loaded."""

    def __init__(self, dtype: torch.dtype, rank: int = 0, size: int = 1) -> None:
        super().__init__(dtype, rank, size)
        self.model["qkv"].quant_method = self.model["experts"].quant_method = Keeps()
        del self.model["embed"].scale

    def load(self, tensors: Tensors) -> None:
        super().load(tensors)
        for parameter in self.model.parameters():
            parameter.data = parameter.detach().clone(memory_format=torch.contiguous_format)

    def learned(self) -> Order:
        return learn_order(self.model, specs_of(NAMES[self.dtype]), self.dtype, self.load)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}


def copy(worker: Worker, order: Order, tensors: Tensors) -> None:
    places = Places(worker.model, order)
    for name, tensor in tensors.items():
        places.put(name, tensor)
    places.wait()


def prove(worker: Worker, order: Order, given: Tensors) -> LoadProof:
    """Prove a copy as a worker of vLLM does: no layer processes its weights after it."""
    held = HeldModel(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: worker.model)))
    record = Record({name for name, _ in worker.model.named_parameters()})
    held.order = order
    for name, tensor in given.items():
        record.note(TensorSpec(name, tuple(tensor.shape), NAMES[tensor.dtype]))
    assert order.handed_over
    held.digest_in_place(record)
    return held.compare(record, {name: digest(tensor).tolist() for name, tensor in given.items()})


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize(("held", "given"), [(name, name) for name in NAMES] + [(torch.float32, torch.bfloat16)])
def test_a_copy_in_place_gives_every_parameter_the_numbers_of_a_load_and_moves_none(held, given, rank, size):
    worker, loaded = Plain(held, rank, size), Plain(held, rank, size)
    order = worker.learned()
    assert find_obstacles(worker.model, order) == []
    places = {name: parameter.data_ptr() for name, parameter in worker.model.named_parameters()}
    tensors = drawn(given)
    copy(worker, order, tensors)
    loaded.load(tensors)
    assert {name: parameter.data_ptr() for name, parameter in worker.model.named_parameters()} == places
    wanted = loaded.parameters()
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in worker.parameters().items())
    proof = prove(worker, order, tensors)
    assert proof.num_compared == proof.num_parameters == len(wanted)
    # Parts of tensors are proved by all workers together, so each must have the digest of its own place.
    assert bool(proof.shares) == (size > 1)
    for name, parts in proof.shares.items():
        assert [lanes for _, lanes in parts] == [tuple(_digest_part(tensors[name], part).tolist()) for part, _ in parts]


def test_rows_that_lie_in_turn_and_biases_of_experts_are_copied_in_place(monkeypatch):
    for expert in range(EXPERTS):
        monkeypatch.setitem(SHAPES, f"bias.{expert}", (WIDTH,))
    worker, loaded = InTurnWorker(), InTurnWorker()
    for one in (worker, loaded):
        one.model["qkv"].quant_method = Keeps()
        del one.model["embed"].scale
        one.load(drawn(torch.bfloat16))
    order = learn_order(worker.model, specs_of("bfloat16"), torch.bfloat16, worker.load)
    assert find_obstacles(worker.model, order) == []
    tensors = drawn(torch.bfloat16)
    copy(worker, order, tensors)
    loaded.load(tensors)
    wanted = dict(loaded.model.named_parameters())
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in worker.model.named_parameters())
    assert prove(worker, order, tensors).num_compared == len(wanted)
    worker.model["experts"].w13_bias.data[1, 3] += 1
    with pytest.raises(NotHeld, match=": bias.1$"):
        prove(worker, order, tensors)


def test_any_stale_rectangle_of_any_parameter_is_found(monkeypatch):
    worker = Plain(torch.bfloat16)
    order, old, new = worker.learned(), drawn(torch.bfloat16), drawn(torch.bfloat16)
    copied, num_parts = in_place._copy, 0
    for name, rows in order.rows.items():
        held_RC = as_matrix(name, worker.model.get_parameter(name))
        for tensor, start in zip(rows.tensors, rows.starts, strict=True):
            copy(worker, order, old)
            stale = held_RC[start:].data_ptr()

            def skip(part: Any, given_RC: torch.Tensor, stale: int = stale) -> None:
                if part.held_RC.data_ptr() != stale:
                    copied(part, given_RC)

            with monkeypatch.context() as patch:
                patch.setattr(in_place, "_copy", skip)
                copy(worker, order, new)
            with pytest.raises(NotHeld, match=f"1 tensors do not hold the numbers that were given: {tensor}$"):
                prove(worker, order, new)
            num_parts += 1
    assert num_parts == len(SHAPES)
    copy(worker, order, new)
    prove(worker, order, new)


def test_a_torn_copy_of_a_tensor_is_found():
    worker = Plain(torch.bfloat16)
    order, old, new = worker.learned(), drawn(torch.bfloat16), drawn(torch.bfloat16)
    copy(worker, order, old)
    # The end of this tensor had not arrived when it was copied.
    torn = new["embed"].clone()
    torn[-1, -3:] = old["embed"][-1, -3:]
    copy(worker, order, new | {"embed": torn})
    with pytest.raises(NotHeld, match=": embed$"):
        prove(worker, order, new)


def test_a_model_whose_parameters_hold_other_than_given_numbers_is_left_to_vllm_by_name():
    worker = Worker(torch.float32)
    order = learn_order(worker.model, specs_of("float32"), torch.float32, worker.load)
    assert (order.packed, order.unknown) == ({"qkv.weight", "experts.weight"}, ("embed.scale",))
    for name in ("down", "norm"):
        worker.model[name].weight.data = worker.model[name].weight.detach().contiguous()
    assert find_obstacles(worker.model, order, ["extra"]) == [
        "2 parameters are packed by their layers: experts.weight, qkv.weight",
        "1 parameters do not hold a tensor's numbers as they are: embed.scale",
        "1 tensors are held by no parameter: extra",
    ]


@pytest.mark.parametrize(("layer", "method"), [("qkv", Packs), ("down", Shuffles)])
def test_each_layer_that_changes_its_weights_is_an_obstacle(layer, method):
    worker = Plain(torch.float32)
    worker.model[layer].quant_method = method()
    assert find_obstacles(worker.model, worker.learned()) == [
        f"1 parameters are packed by their layers: {layer}.weight"
    ]


def test_a_parameter_that_is_not_one_piece_or_in_too_many_is_an_obstacle(monkeypatch):
    worker = Plain(torch.float32)
    order = worker.learned()
    weight = worker.model["down"].weight
    weight.data = weight.data.T.contiguous().T
    monkeypatch.setattr(in_place, "_MAX_PIECES", 2)
    assert find_obstacles(worker.model, order) == [
        "1 parameters are not one piece of memory: down.weight",
        "2 parameters hold more than 2 parts of tensors: experts.weight, qkv.weight",
    ]


def test_tensors_that_would_be_rounded_or_did_not_come_are_left_to_vllm_by_name():
    worker = Plain(torch.bfloat16)
    order = worker.learned()
    assert find_misfits(worker.model, order, specs_of("bfloat16")) == []
    wide = [*specs_of("bfloat16")[1:], TensorSpec("embed", SHAPES["embed"], "float32")]
    assert find_misfits(worker.model, order, wide) == ["1 parameters are narrower than their tensors: embed.weight"]
    assert find_misfits(worker.model, order, specs_of("bfloat16")[1:]) == ["1 tensors did not come: embed"]


def test_a_digester_is_for_parameters_that_stay_where_they_are_and_tensors_of_their_dtypes():
    worker = Plain(torch.bfloat16)
    order, dtypes = worker.learned(), dict.fromkeys(SHAPES, "bfloat16")
    digester = InPlaceDigester(worker.model, order, dtypes)
    copy(worker, order, drawn(torch.bfloat16))
    assert digester.is_for(worker.model, order, dict(dtypes))
    assert not digester.is_for(worker.model, order, dtypes | {"norm": "float32"})
    assert not digester.is_for(worker.model, worker.learned(), dtypes)
    digester = InPlaceDigester(worker.model, order, dtypes)
    weight = worker.model["down"].weight
    weight.data = weight.detach().clone()
    assert not digester.is_for(worker.model, order, dtypes)


def test_a_wider_parameter_is_digested_by_itself_and_found_if_it_holds_other_than_given_numbers():
    worker = Plain(torch.bfloat16)
    order, given = worker.learned(), drawn(torch.bfloat16)
    assert worker.model["norm"].weight.dtype == torch.float32
    copy(worker, order, given)
    assert prove(worker, order, given).num_compared == 5
    worker.model["norm"].weight.data[3] *= 1 + 2**-20
    with pytest.raises(NotHeld, match=": norm$"):
        prove(worker, order, given)
