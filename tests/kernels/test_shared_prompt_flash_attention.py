"""Calls of flash-attn's kernels, tried with stand-ins, because the kernels run on CUDA only."""

import pytest
import torch

from megatron_rl.ops.shared_prompt import BACKENDS
from megatron_rl.ops.shared_prompt.backends import flash_attention
from megatron_rl.ops.shared_prompt.layout import Layout
from tests.kernels.shared_prompt_cases import BRANCHED, RAGGED, Case, errors
from tests.kernels.varlen_flash import VarlenFlashOperators


class Interface:
    """flash_attn.flash_attn_interface of flash-attn 2.8, with its signatures."""

    _operators = VarlenFlashOperators()

    def _flash_attn_varlen_forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
    ) -> tuple[torch.Tensor, ...]:
        assert (window_size_left, window_size_right) == (-1, -1)
        return self._operators._flash_attention_forward(
            *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            *(dropout_p, causal, False),
            scale=softmax_scale,
        )

    def _flash_attn_varlen_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_lse: torch.Tensor,
        dq: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int,
        window_size_right: int,
        softcap: float,
        alibi_slopes: torch.Tensor | None,
        deterministic: bool,
        rng_state: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert (window_size_left, window_size_right, softcap) == (-1, -1, 0.0)
        assert alibi_slopes is None
        assert rng_state is None
        assert deterministic
        assert all(tensor.is_contiguous() for tensor in (dq, dk, dv))
        found = self._operators._flash_attention_backward(
            *(dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
            *(dropout_p, causal, torch.zeros(2, dtype=torch.uint64), torch.empty(0)),
            scale=softmax_scale,
        )
        for gradient, of_call in zip((dq, dk, dv), found, strict=True):
            gradient.copy_(of_call)
        return torch.empty(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [RAGGED, BRANCHED, Layout((0,), (-1,))], ids=["ragged", "branched", "empty"])
def test_merging_calls_of_flash_attention_is_as_near_to_the_truth_as_the_definition(
    monkeypatch: pytest.MonkeyPatch, layout: Layout, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(flash_attention, "_import_interface", Interface)
    case = Case.draw(layout, (4, 2), 64, dtype)
    exact = case.exact()
    naive = errors(case.run(BACKENDS["naive"].attention), exact)
    for tensor, error in errors(case.run(flash_attention.attention), exact).items():
        assert error <= 2 * naive[tensor], tensor
