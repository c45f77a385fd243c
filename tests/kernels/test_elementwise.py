"""Element-wise work in models and in layers of Megatron, and what programs divide."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_rl.ops.elementwise import plain, triton_fused
from megatron_rl.trainer.mcore.model.fusions import SwigluExperts, SwigluMLP, SwigluSharedExperts, fuse_layers


@given(st.integers(1, 1 << 20), st.integers(1, triton_fused.MOST_HIDDEN_SIZE))
def test_programs_have_all_rows_and_whole_rows_and_at_most_16_columns_a_thread(num_rows: int, width: int) -> None:
    num_programs, rows = triton_fused.divide_rows(num_rows)
    assert (num_programs - 1) * rows < num_rows <= num_programs * rows
    assert num_programs <= 512
    sizes = triton_fused.choose_sizes(width)
    assert width <= sizes["COLUMNS"] <= 16 * 32 * sizes["num_warps"]
    assert sizes["num_warps"] <= 16


def test_experts_share_one_swiglu_and_each_row_goes_through_its_own_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [(torch.randn(12, 5, generator=generator), torch.randn(5, 6, generator=generator)) for _ in range(3)]
    experts: Any = object.__new__(SwigluExperts)
    torch.nn.Module.__init__(experts)
    experts.local_experts = torch.nn.ModuleList(map(make_expert, weights))
    experts.config = SimpleNamespace(fp8=None, moe_apply_probs_on_input=False)
    rows, probs = torch.randn(7, 5, generator=generator), torch.rand(7, generator=generator)
    # One expert has no rows.
    counts = [3, 0, 4]
    expected = [
        plain.weighted_swiglu(of_rows @ into.t(), of_probs) @ out.t()
        for (into, out), of_rows, of_probs in zip(weights, rows.split(counts), probs.split(counts), strict=True)
    ]
    kernel = mock.Mock(side_effect=plain.weighted_swiglu)
    monkeypatch.setattr(triton_fused, "weighted_swiglu", kernel)
    found, bias = experts(rows, torch.tensor(counts), probs)
    assert torch.allclose(found, torch.cat(expected), rtol=1e-6, atol=1e-6)
    assert bias is None
    assert kernel.call_count == 1
    for changes in ({"fp8": "e4m3"}, {"moe_apply_probs_on_input": True}, {"fp4": "e2m1"}):
        experts.config = SimpleNamespace(**{"fp8": None, "moe_apply_probs_on_input": False, **changes})
        with mock.patch.object(SequentialMLP, "forward", return_value="megatron's"):
            assert experts(rows, torch.tensor(counts), probs) == "megatron's"


def make_expert(weights: tuple[torch.Tensor, torch.Tensor]) -> torch.nn.Module:
    """Make an expert whose linear layers return an output and no bias, as Megatron's do."""
    expert = torch.nn.Module()
    for name, weight in zip(("linear_fc1", "linear_fc2"), weights, strict=True):
        layer = torch.nn.Module()
        layer.forward = lambda rows, weight=weight: (rows @ weight.t(), None)  # type: ignore[method-assign,misc]
        setattr(expert, name, layer)
    return expert


def test_experts_and_shared_experts_of_megatron_take_the_kernel_and_other_activations_do_not() -> None:
    def fuse(**changes: Any) -> list[type]:
        config = SimpleNamespace(
            gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
            recompute_granularity="full", **changes,
        )  # fmt: skip
        kinds = (MLP, SequentialMLP, SharedExpertMLP)
        modules: list[Any] = [object.__new__(kind) for kind in kinds]
        for module in modules:
            torch.nn.Module.__init__(module)
            module.config = config
        layer: Any = object.__new__(TransformerLayer)
        torch.nn.Module.__init__(layer)
        layer.mlp = torch.nn.Sequential(*modules)
        layer.cross_attention = None
        fuse_layers(SimpleNamespace(config=config, decoder=SimpleNamespace(layers=[layer])), "triton")
        return [type(module) for module in modules]

    assert fuse() == [SwigluMLP, SwigluExperts, SwigluSharedExperts]
    assert fuse(activation_func_clamp_value=7.0) == [MLP, SequentialMLP, SharedExpertMLP]
    # Megatron's shared experts call the method of the class after them.
    assert SwigluSharedExperts.__mro__.index(SharedExpertMLP) + 1 == SwigluSharedExperts.__mro__.index(SwigluMLP)
