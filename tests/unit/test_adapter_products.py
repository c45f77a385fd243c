"""The products of adapters on CPUs, against their definition in float64, and the steps that are left to vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.sidecar.vllm.patches import NOT_APPLIED, patch_wrapper

TOKENS, INPUTS, WIDTHS, RANK, SLOTS, SCALE = 5, 24, (16, 8, 8), 4, 3, 0.5


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def make_wrapper() -> Any:
    """Make a class as vLLM's, which counts the products that are left to it."""

    class Wrapper:
        num_left = 0

        def update_metadata(
            self, mapping: Any, lora_index_to_id: Any, max_loras: int, vocab_size: int, **kwargs: Any
        ) -> None:
            self.token_lora_indices = torch.tensor(mapping, dtype=torch.long)

        def add_lora_linear(
            self, y: Any, x: Any, lora_a_stacked: Any, lora_b_stacked: Any, scale: float, output_slices: Any, *,
            buffer: Any = None, **kwargs: Any,
        ) -> None:  # fmt: skip
            self.num_left += 1

    return Wrapper


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_the_only_slot_are_those_of_the_definition(dtype: torch.dtype) -> None:
    kind = make_wrapper()
    assert patch_wrapper(kind) == "applied"
    wrapper = kind()
    x, y = draw(TOKENS, INPUTS).to(dtype), draw(TOKENS, sum(WIDTHS)).to(dtype)
    a_stacks = [draw(SLOTS, 1, RANK, INPUTS).to(dtype) + number for number in range(len(WIDTHS))]
    b_stacks = [draw(SLOTS, 1, width, RANK).to(dtype) for width in WIDTHS]
    expected, first = y.double(), 0
    for a, b, width in zip(a_stacks, b_stacks, WIDTHS, strict=True):
        for token in range(TOKENS):
            inner = a[1, 0].double() @ x[token].double()
            expected[token, first : first + width] += SCALE * (b[1, 0].double() @ inner)
        first += width
    wrapper.update_metadata([1] * TOKENS, [], SLOTS, 9)
    wrapper.add_lora_linear(y, x, a_stacks, b_stacks, SCALE, WIDTHS)
    assert wrapper.num_left == 0
    # Two roundings of the largest number: that of the inner product, and that of the sum.
    assert (y.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("slots", [[1, 1, 0], [-1, -1, -1], [1, -1, 1], []], ids=str)
def test_tokens_with_several_slots_or_none_are_left_to_vllm(slots: list[int]) -> None:
    kind = make_wrapper()
    patch_wrapper(kind)
    wrapper, y = kind(), torch.zeros(3, 2)
    wrapper.update_metadata([1, 1, 1], [], SLOTS, 9)
    wrapper.update_metadata(slots, [], SLOTS, 9)
    wrapper.add_lora_linear(y, torch.ones(3, 4), [torch.ones(2, 1, 1, 4)], [torch.ones(2, 1, 2, 1)], 1.0, (2,))
    assert wrapper.num_left == 1
    assert not y.any()


def test_a_vllm_of_another_form_is_left_as_it_is() -> None:
    other = SimpleNamespace(add_lora_linear=lambda self, y, x: None, update_metadata=lambda self, mapping: None)
    kept = vars(other).copy()
    assert patch_wrapper(other).startswith(NOT_APPLIED)
    assert vars(other) == kept
    kind = make_wrapper()
    assert [patch_wrapper(kind), patch_wrapper(kind)] == ["applied", "applied before"]
