"""Values that hold tensors: every tensor is found in order and replaced, and the rest stays the same object."""

import dataclasses
from typing import NamedTuple

import torch

from megatron_rl.ops.shared_prompt.tables import list_tensors, map_tensors


class Functions(NamedTuple):
    one: object


@dataclasses.dataclass(frozen=True)
class Inner:
    tensor: torch.Tensor
    number: int = 3
    kept: dict = dataclasses.field(default_factory=dict, init=False)


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    plain: Inner | None
    several: tuple
    named: dict[str, torch.Tensor]
    functions: Functions = Functions(print)


def draw() -> Outer:
    one, two, three, four = (torch.full((2,), float(number)) for number in range(1, 5))
    return Outer(Inner(one), None, ([two], "text", (three,)), {"four": four})


def test_tensors_are_listed_in_the_order_of_fields() -> None:
    assert [int(tensor[0]) for tensor in list_tensors(draw())] == [1, 2, 3, 4]
    assert list_tensors(["text", 3, None]) == []


def test_each_tensor_is_replaced_and_the_containers_keep_their_types() -> None:
    value = draw()
    mapped = map_tensors(value, lambda tensor: tensor * 10)
    assert [int(tensor[0]) for tensor in list_tensors(mapped)] == [10, 20, 30, 40]
    assert [int(tensor[0]) for tensor in list_tensors(value)] == [1, 2, 3, 4]
    assert (type(mapped), type(mapped.several), type(mapped.several[0])) == (Outer, tuple, list)
    assert (mapped.inner.number, mapped.several[1]) == (3, "text")
    assert mapped.functions is value.functions


def test_a_value_whose_tensors_stay_is_the_same_object() -> None:
    value = draw()
    assert map_tensors(value, lambda tensor: tensor) is value
