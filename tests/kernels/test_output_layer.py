"""The output layer: the blocks of its backends, and where its gradients are added."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.ops import main_gradients
from megatron_rl.ops.log_probs import VocabularyShard, output_log_probs, plain, triton_fused

FP32, BF16 = torch.float32, torch.bfloat16
numbers_of_rows = st.integers(1, 1 << 20)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_weights_gradient_is_added_to_its_main_gradient_block_by_block(is_tied: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_NE, weight_VE, before_VE = (torch.randn(n, 8, generator=generator) for n in (9, 50, 50))
    arguments: Any = (torch.arange(9) * 5, VocabularyShard(0, 45), 0.7, 20)
    exact_VE = weight_VE.double().requires_grad_()
    output_log_probs(hidden_NE.double(), exact_VE, *arguments).sum().backward()
    weight = torch.nn.Parameter(weight_VE)
    weight.main_grad, weight.grad_added_to_main_grad = before_VE.clone(), False
    if is_tied:
        weight.zero_out_wgrad = True
    output_log_probs(hidden_NE, weight, *arguments, adds_to_main_grad=True).sum().backward()
    assert weight.grad_added_to_main_grad
    # The hook adds the gradient of a tied weight to its main gradient. Of another it only wants that there is one.
    assert (weight.grad is None) == is_tied
    assert torch.allclose(weight.main_grad.double(), before_VE + exact_VE.grad, rtol=0, atol=1e-5)
    assert torch.equal(weight.main_grad[45:], before_VE[45:])


@given(numbers_of_rows, st.sampled_from([BF16, torch.float16, FP32]))
def test_a_block_takes_at_most_half_a_gib_and_a_pass_at_most_a_gib_more_than_torchs(
    num_rows: int, dtype: torch.dtype
) -> None:
    columns = triton_fused.choose_block_columns(num_rows, dtype)
    assert columns % 128 == 0
    block_bytes = num_rows * columns * dtype.itemsize
    assert block_bytes <= 1 << 29 or columns == triton_fused.LEAST_BLOCK_COLUMNS
    # torch's operations have a block in the logits' dtype while they make one in float32.
    torch_bytes = num_rows * plain.choose_block_columns(num_rows, dtype) * (dtype.itemsize + 4)
    num_parts, _ = triton_fused.divide_row(num_rows, columns)
    part_bytes = 3 * 4 * num_parts * num_rows
    assert block_bytes + part_bytes <= torch_bytes + (1 << 30)


@given(numbers_of_rows, st.integers(1, 1 << 18))
def test_parts_cover_a_row_none_is_empty_and_few_rows_still_occupy_a_device(num_rows: int, num_columns: int) -> None:
    num_parts, part_columns = triton_fused.divide_row(num_rows, num_columns)
    assert (num_parts - 1) * part_columns < num_columns <= num_parts * part_columns
    assert part_columns % triton_fused.COLUMNS == 0
    if num_rows >= 1024:
        assert num_parts == 1
    else:
        # Whole steps are divided, so up to half of the programs are too many or too few.
        most = -(-num_columns // triton_fused.COLUMNS)
        assert num_rows * num_parts >= min(512, num_rows * most / 2)


def test_a_product_is_added_without_rounding_where_torch_can_and_the_log_says_where_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(sum_NE: torch.Tensor, a_NC: torch.Tensor, b_CE: torch.Tensor, out_dtype, out) -> torch.Tensor:
        return out.copy_(sum_NE + a_NC.to(out_dtype) @ b_CE.to(out_dtype))

    def multiply(a_NC: torch.Tensor, b_CE: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return a_NC.to(out_dtype) @ b_CE.to(out_dtype)

    generator = torch.Generator().manual_seed(0)
    sum_NE, a_NC, b_CE = (torch.randn(8, 8, generator=generator) for _ in range(3))
    a_NC, b_CE = a_NC.to(BF16), b_CE.to(BF16)
    exact_NE, rounded_NE = sum_NE + a_NC.float() @ b_CE.float(), sum_NE + a_NC @ b_CE
    assert not torch.equal(exact_NE, rounded_NE)

    def find(level: int) -> tuple[torch.Tensor, list[str]]:
        """Add with the operations that a torch has, and return the sum and what was logged."""
        caplog.clear()
        with monkeypatch.context() as patched, caplog.at_level(logging.INFO):
            if level > 1:
                patched.setattr(torch, "addmm", add)
            if level > 0:
                patched.setattr(torch, "mm", multiply)
            main_gradients._find_addition.cache_clear()
            found_NE = sum_NE.clone()
            for _ in range(2):
                found_NE.copy_(sum_NE)
                main_gradients.add_product(found_NE, a_NC, b_CE)
        main_gradients._find_addition.cache_clear()
        return found_NE, [record.getMessage().split(":")[0] for record in caplog.records]

    what = "does not sum products of torch.bfloat16 in torch.float32 on cpu"
    notes = [f"torch.addmm {what}", f"torch.mm {what}"]
    assert torch.equal(find(2)[0], exact_NE)
    assert find(2)[1] == []
    assert torch.equal(find(1)[0], exact_NE)
    assert find(1)[1] == notes[:1]
    assert torch.equal(find(0)[0], rounded_NE)
    assert find(0)[1] == notes
