"""The patches of vLLM on CPUs: what they change, and the forms of vLLM that they leave alone."""

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.sidecar.vllm.patches import NOT_APPLIED, patch_method, patch_wrapper, take_names_off

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


class Experts:
    """vLLM's method for experts, with the parts that the patch reads."""

    def __init__(self) -> None:
        self.moe_kernel = None
        self.packed = []

    def process_weights_after_loading(self, layer):
        self._setup_kernel(layer)

    def _setup_kernel(self, layer):
        is_weight_update = self.moe_kernel is not None
        if not is_weight_update:
            self.moe_kernel = SimpleNamespace(
                fused_experts=SimpleNamespace(process_weights_after_loading=self.packed.append)
            )
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)


def test_weights_of_experts_are_packed_once_each_time_they_are_loaded():
    method = type("Method", (Experts,), {})
    assert patch_method(method) == "applied"
    assert patch_method(method) == "applied before"
    experts = method()
    for load in range(3):
        experts.process_weights_after_loading(load)
    assert experts.packed == [0, 1, 2]


def test_a_method_that_packs_updates_itself_is_left_alone():
    class Mended(Experts):
        def _setup_kernel(self, layer):
            self.packed.append(layer)

    process = Mended.process_weights_after_loading
    assert patch_method(Mended).startswith(NOT_APPLIED)
    assert Mended.process_weights_after_loading is process


def test_the_method_of_the_vllm_that_is_installed_is_known():
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    copy = type("Copy", (UnquantizedFusedMoEMethod,), {})
    assert patch_method(copy) == "applied"


def test_memory_that_is_mapped_here_keeps_its_content_and_loses_its_name(tmp_path: Path) -> None:
    names = ("vllm_dist_mine", "psm_other", "vllm_dist_of_others")
    for name in names:
        (tmp_path / name).write_bytes(b"x" * mmap.PAGESIZE)
    opened = [(tmp_path / name).open("r+b") for name in names[:2]]
    mapped = [mmap.mmap(file.fileno(), mmap.PAGESIZE) for file in opened]
    assert take_names_off(folder=tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"psm_other", "vllm_dist_of_others"}
    assert mapped[0][0] == ord("x")
    # Another worker of the same engine comes second.
    assert take_names_off(folder=tmp_path) == 0
    for thing in (*mapped, *opened):
        thing.close()
