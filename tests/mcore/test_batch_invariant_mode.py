"""Megatron's batch-invariant mode: what it demands, and what of it is wrong, which our checks and settings avoid."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels

from megatron_rl.command_line import resolve as config
from megatron_rl.command_line.resolve import build_transformer_config
from tests.mcore.test_config import EVERYTHING, MODEL


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA, which Megatron's functions ask for."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in torch what Triton's kernels would on CUDA."""
    monkeypatch.setattr(kernels, "matmul_persistent", lambda a, b, bias=None: a @ b)
    monkeypatch.setattr(kernels, "mean_dim", lambda x, dim, keepdim: x.mean(dim, keepdim=keepdim))
    monkeypatch.setattr(kernels, "_TE_GENERAL_GEMM_ORIG", lambda: None)


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_a_configuration_has_what_the_mode_demands(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_engine_refusal", lambda: None)
    dense = dataclasses.replace(MODEL, experts=None, sliding_window=None)
    asked = {"batch_invariant_mode": True, "gradient_accumulation_fusion": True, "transformer_impl": impl}
    made = build_transformer_config(dense, asked, EVERYTHING)
    assert (made.batch_invariant_mode, made.gradient_accumulation_fusion) == (True, False)
    without = build_transformer_config(dense, asked | {"batch_invariant_mode": False}, EVERYTHING)
    assert without.gradient_accumulation_fusion is True


def test_its_products_still_overwrite_a_sum_of_gradients() -> None:
    # If this fails, Megatron has fixed it, and gradients can be added in products with the mode.
    grad_NO, rows_NI = torch.randn(5, 3), torch.randn(5, 4)
    main_grad_OI = torch.ones(3, 4).as_subclass(OnCuda)
    operands: list[Any] = [one.as_subclass(OnCuda) for one in (rows_NI, grad_NO)]
    kernels._te_general_gemm_patched(*operands, layout="NT", out=main_grad_OI, accumulate=True, grad=True)
    torch.testing.assert_close(main_grad_OI.as_subclass(torch.Tensor), grad_NO.T @ rows_NI)


def test_its_norms_still_leave_out_the_1_that_is_added_to_weights() -> None:
    # If this fails, Megatron has fixed it, and models with such norms can have the mode.
    rows_NE, weight_E = torch.randn(5, 8), torch.rand(8)
    norm = SimpleNamespace(weight=weight_E, eps=1e-6, zero_centered_gamma=True)
    found_NE = kernels._te_rmsnorm_forward_patched(norm, rows_NE.as_subclass(OnCuda))
    expected_NE = torch.nn.functional.rms_norm(rows_NE, (8,), weight_E, eps=1e-6)
    torch.testing.assert_close(found_NE.as_subclass(torch.Tensor), expected_NE)
