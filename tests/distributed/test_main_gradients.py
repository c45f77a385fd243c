"""Weight gradients that are added to main gradients in their products: they are those of float64.

Megatron's linear layers add them, and those with our operation.
"""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_rl.errors import PlatformError
from megatron_rl.ops import main_gradients
from megatron_rl.trainer.mcore.model import fusions, gpt
from tests import hf_models
from tests.distributed.layouts import CASES, build, divisor, start_session
from tests.distributed.parity import Computed, expected, shared_loss, shared_packs
from tests.ranks import run_ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CPU = torch.device("cpu")
# Of each model: an untied output layer, one that is tied to the embedding, and experts.
LAYOUTS = {
    "qwen3": ("TP2+SP", "DP2+distopt"),
    "qwen2": ("TP2", "PP2", "DP2+distopt"),
    "qwen3_moe": ("EP2",),
}
# The parameters whose gradients no linear layer has.
_OTHERS = ("norm", "bias", "router", "embedding")


def run_fused(folders: dict[str, Path]) -> dict[tuple[str, str, str], Computed]:
    """Compute two steps of each model on two ranks, and return the results of the second, by linear layers too."""
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, layouts in LAYOUTS.items():
        for layout in layouts:
            case = dataclasses.replace(
                CASES[layout], fuses_accumulation=True, overlap_grad_reduce=layout.startswith("DP")
            )
            with start_session(case) as session:
                for whose in ("megatron's", "ours"):
                    model = build(session, case, folders[name])
                    if whose == "ours":
                        for chunk in model.chunks:
                            fusions.replace_linear_layers(chunk.decoder)
                    packs = shared_packs(divisor(case.sizes))
                    with mock.patch.object(fusions, "linear", wraps=fusions.linear) as operation:
                        model.forward_backward(packs, shared_loss)
                        log_probs = model.forward_backward(packs, shared_loss)
                    assert operation.called is (whose == "ours")
                    results[layout, name, whose] = Computed(log_probs, model.gradients())
                    _check_marks(model.chunks)
    return results


def _check_marks(chunks: list[gpt.PackedGPTModel]) -> None:
    """Check that the gradients of all linear layers, and no others, were added in their products."""
    for name, parameter in gpt.named_shards(chunks):
        is_output = parameter is chunks[-1].output_weight() if chunks[-1].post_process else False
        is_added = is_output or not any(other in name for other in _OTHERS)
        assert parameter.grad_added_to_main_grad == is_added, name
        assert parameter.grad is None


@pytest.mark.each_change
def test_gradients_that_products_add_are_those_of_transformers_in_every_layout(tmp_path: Path) -> None:
    folders = {name: hf_models.draw(name, tmp_path / name) for name in LAYOUTS}
    everywhere = {name: expected(folder) for name, folder in folders.items()}
    for (layout, name, whose), ours in run_ranks(run_fused, 2, folders)[0].items():
        worst = everywhere[name].worst(ours)
        print(f"{layout:>14} {name:<10} {whose:<10} error / bound: {worst}")
        assert all(error <= 1 for error, _ in worst.values())


def test_a_bf16_layers_gradient_is_added_in_the_product_and_never_exists_in_bf16() -> None:
    generator = torch.Generator().manual_seed(0)
    input_SBI, grad_SBO = (torch.randn(9, 2, n, generator=generator).to(BF16) for n in (5, 7))
    before_OI = torch.randn(7, 5, generator=generator)
    truth_OI = before_OI.double() + torch.einsum("sbo,sbi->oi", grad_SBO.double(), input_SBI.double())

    def add(sum_OI: torch.Tensor, a_ON: torch.Tensor, b_NI: torch.Tensor, out_dtype, out) -> torch.Tensor:
        return out.copy_(sum_OI + a_ON.to(out_dtype) @ b_NI.to(out_dtype))

    main_gradients._find_addition.cache_clear()
    with mock.patch.object(torch, "addmm", add):
        found_OI = before_OI.clone()
        main_gradients.add_weight_gradient(input_SBI, grad_SBO, found_OI)
    main_gradients._find_addition.cache_clear()
    assert torch.allclose(found_OI.double(), truth_OI, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "main_dtype"), [(FP32, FP32), (BF16, FP32), (FP16, FP32), (BF16, BF16)])
def test_products_pass_their_trial_and_what_computes_something_else_is_refused(
    dtype: torch.dtype, main_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_gradients.check_device(CPU, dtype, main_dtype)
    right = main_gradients.add_product
    spoilt = [
        lambda sum_NM, a_NK, b_KM: sum_NM.add_(a_NK @ b_KM, alpha=-1),
        lambda sum_NM, a_NK, b_KM: sum_NM.copy_(a_NK @ b_KM),
        lambda sum_NM, a_NK, b_KM: right(sum_NM, a_NK[:, 1:], b_KM[1:]),
        lambda sum_NM, a_NK, b_KM: sum_NM.fill_(torch.nan),
    ]
    for wrong in spoilt:
        monkeypatch.setattr(main_gradients, "add_product", wrong)
        with pytest.raises(PlatformError, match="Write --no-gradient-accumulation-fusion"):
            main_gradients.check_device(CPU, dtype, main_dtype)
