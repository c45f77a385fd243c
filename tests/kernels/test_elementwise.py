"""The backends of a layer's element-wise work: their choice, their trial, and the kernels, interpreted and compiled."""

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

from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops.backends import Choice, Conditions
from megatron_rl.ops.elementwise import BACKENDS, check_backend, plain, triton_fused
from megatron_rl.trainer.mcore.model.fusions import SwigluExperts, SwigluMLP, SwigluSharedExperts, fuse_layers
from tests.kernels.processes import compile_kernels, run_module

BF16 = torch.bfloat16
CPU = torch.device("cpu")


@pytest.mark.each_change
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["few", pytest.param("more", marks=pytest.mark.slow)])
def test_models_with_interpreted_kernels_are_those_of_transformers(which: str) -> None:
    # In a process of its own: Triton decides whether to interpret when it is first imported.
    run_module("pytest", "-q", "-k", which, "tests/kernels/interpreted_elementwise_models.py", TRITON_INTERPRET="1")


@pytest.mark.each_change
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("which", "targets", "num_kernels"),
    [
        ("few", ("80", "90", "100", "gfx942"), 16),
        pytest.param("all", ("80", "86", "89", "90", "100", "120", "gfx942"), 48, marks=pytest.mark.slow),
    ],
)
def test_compiled_kernels_spill_nothing_and_load_16_bytes_at_once(
    which: str, targets: tuple[str, ...], num_kernels: int
) -> None:
    found = compile_kernels("tests.kernels.compiled_elementwise", which, *targets)
    assert len(found) == num_kernels * len(targets)
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        assert kernel["num_atomics"] == 0, kernel
        assert kernel["num_wide_loads"] > 0, kernel


def test_auto_takes_the_kernels_on_cuda_and_says_why_where_it_cannot() -> None:
    def choose(device: str, dtype: torch.dtype, hidden_size: int = 4096) -> str:
        choice = BACKENDS.choose("auto", Conditions(device, dtype, hidden_size=hidden_size))
        (note,) = choice.notes
        return note.removeprefix("--elementwise-backend auto takes ")

    assert choose("cuda", BF16) == choose("cuda", torch.float32, 8192) == "triton"
    assert choose("npu", BF16) == choose("cpu", torch.float32) == "torch"
    assert choose("cuda", torch.float64) == "torch; not triton: it supports fp32, fp16 and bf16 only"
    wide = "its rows have at most 8,192 columns, and the hidden size is 16,384"
    assert choose("cuda", BF16, 16_384) == f"torch; not triton: {wide}"


def test_a_backend_that_was_asked_for_is_taken_or_is_an_error_that_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert BACKENDS.choose("torch", Conditions("cuda", BF16, hidden_size=4096)) == Choice("torch")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="on the CPU it needs Triton's interpreter, TRITON_INTERPRET=1"):
        BACKENDS.choose("triton", Conditions("cpu", BF16, hidden_size=4096))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert BACKENDS.choose("triton", Conditions("cpu", BF16, hidden_size=4096)) == Choice("triton")
    assert BACKENDS.choose("auto", Conditions("cpu", BF16, hidden_size=4096)).name == "torch"


@given(st.integers(1, 1 << 20), st.integers(1, triton_fused.MOST_HIDDEN_SIZE))
def test_programs_have_all_rows_and_whole_rows_and_at_most_16_columns_a_thread(num_rows: int, width: int) -> None:
    num_programs, rows = triton_fused.divide_rows(num_rows)
    assert (num_programs - 1) * rows < num_rows <= num_programs * rows
    assert num_programs <= 512
    sizes = triton_fused.choose_sizes(width)
    assert width <= sizes["COLUMNS"] <= 16 * 32 * sizes["num_warps"]
    assert sizes["num_warps"] <= 16


def halve_gradient(out: torch.Tensor) -> torch.Tensor:
    return out.detach() + 0.5 * (out - out.detach())


@pytest.mark.parametrize(
    ("operation", "spoil", "what"),
    [
        ("swiglu", lambda out: out * 1.1, "SwiGLU"),
        ("swiglu", halve_gradient, "SwiGLU"),
        ("weighted_swiglu", lambda out: out * 1.1, "SwiGLU of experts"),
        ("weighted_swiglu", halve_gradient, "SwiGLU of experts"),
        ("add_and_normalize", lambda out: (out[0], out[1] * 1.1), "a residual with its norm"),
        (
            "add_and_normalize",
            lambda out: (out[0].detach() + 0.5 * (out[0] - out[0].detach()), out[1]),
            "a residual with its norm",
        ),
        ("add_and_normalize", lambda out: (out[0], out[1] + torch.nan), "a residual with its norm"),
    ],
)
def test_a_backend_that_computes_something_else_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, operation: str, spoil, what: str
) -> None:
    for name in ("swiglu", "weighted_swiglu", "add_and_normalize"):
        monkeypatch.setattr(triton_fused, name, getattr(plain, name))
    check_backend("triton", CPU, BF16)
    right = getattr(plain, operation)
    monkeypatch.setattr(triton_fused, operation, lambda *operands: spoil(right(*operands)))
    with pytest.raises(PlatformError, match=f"--elementwise-backend triton does not compute {what} on cpu"):
        check_backend("triton", CPU, BF16)


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
