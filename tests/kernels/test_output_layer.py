"""The backends of the output layer: their choice, their blocks, and the kernels, compiled."""

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.config.trainer import ModelConfig
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops import products
from megatron_rl.ops.backends import Choice, Conditions
from megatron_rl.ops.log_probs import BACKENDS, VocabularyShard, check_backend, output_log_probs, plain, triton_fused
from megatron_rl.trainer.loop.settling import settle_backend
from tests.kernels.processes import compile_kernels
from tests.processes import run_python

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
CPU = torch.device("cpu")
numbers_of_rows = st.integers(1, 1 << 20)


@pytest.mark.each_change
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("80", "90", "100", "gfx942"), 4 * 12),
        pytest.param(
            ("80", "86", "89", "90", "100", "120", "gfx942", "--all"), 7 * 36, id="all", marks=pytest.mark.slow
        ),
    ],
)
def test_compiled_kernels_spill_nothing_divide_exactly_and_load_16_bytes_at_once(
    words: tuple[str, ...], number: int
) -> None:
    found = compile_kernels("tests.kernels.compiled_output_layer", *words)
    assert len(found) == number
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        assert kernel["num_atomics"] == 0, kernel
        assert (kernel["num_divisions"] > 0) == kernel["is_scaled"], kernel
        assert (kernel["num_wide_loads"] > 0) == (kernel["kernel"] != "join_kernel"), kernel


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The settings that a trial reads."""

    model: ModelConfig
    sources: dict[str, str]
    transformer: Any


@pytest.mark.parametrize(
    ("device", "dtype", "name"),
    [
        ("cuda", BF16, "triton"),
        ("cuda", torch.float16, "triton"),
        ("cuda", FP32, "triton"),
        ("cuda", FP64, "torch"),
        ("npu", BF16, "torch"),
        ("cpu", FP32, "torch"),
    ],
)
def test_auto_takes_the_kernels_on_cuda_and_says_why_where_it_cannot(
    device: str, dtype: torch.dtype, name: str
) -> None:
    choice = BACKENDS.choose("auto", Conditions(device, dtype))
    assert choice.name == name
    reason = "; not triton: it supports fp32, fp16 and bf16 only" if (device, dtype) == ("cuda", FP64) else ""
    assert choice.notes == (f"--output-layer-backend auto takes {name}{reason}",)


def test_a_backend_that_was_asked_for_is_taken_or_is_an_error_that_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert BACKENDS.choose("torch", Conditions("cuda", BF16)) == Choice("torch")
    with pytest.raises(UsageError, match=r"triton cannot run here \(it is not known to work on npu\): write torch"):
        BACKENDS.choose("triton", Conditions("npu", BF16))
    with pytest.raises(UsageError, match="on the CPU it needs Triton's interpreter, TRITON_INTERPRET=1"):
        BACKENDS.choose("triton", Conditions("cpu", BF16))


def test_without_the_package_triton_the_output_layer_runs_in_torch() -> None:
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from megatron_rl.ops.backends import Conditions
        from megatron_rl.ops.log_probs import BACKENDS
        print(BACKENDS.choose("auto", Conditions("cuda", torch.bfloat16)).notes[0])
    """
    expected = "--output-layer-backend auto takes torch; not triton: the package triton is not installed"
    assert run_python(code).splitlines()[-1] == expected


def compute(backend: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_NE, weight_VE = (torch.randn(n, 8, generator=generator).to(BF16).requires_grad_() for n in (9, 50))
    out = output_log_probs(hidden_NE, weight_VE, torch.arange(9), VocabularyShard(0, 45), 0.7, 20, True, backend)
    return [out.detach(), *torch.autograd.grad(out.sum(), (hidden_NE, weight_VE))]


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


def test_auto_gives_the_bits_of_torch_on_a_cpu_even_where_triton_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert BACKENDS.choose("triton", Conditions("cpu", BF16)) == Choice("triton")
    assert all(torch.equal(one, other) for one, other in zip(compute("auto"), compute("torch"), strict=True))


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
            products._find_addition.cache_clear()
            found_NE = sum_NE.clone()
            for _ in range(2):
                found_NE.copy_(sum_NE)
                products.add_product(found_NE, a_NC, b_CE)
        products._find_addition.cache_clear()
        return found_NE, [record.getMessage().split(":")[0] for record in caplog.records]

    what = "does not sum products of torch.bfloat16 in torch.float32 on cpu"
    notes = [f"torch.addmm {what}", f"torch.mm {what}"]
    assert torch.equal(find(2)[0], exact_NE)
    assert find(2)[1] == []
    assert torch.equal(find(1)[0], exact_NE)
    assert find(1)[1] == notes[:1]
    assert torch.equal(find(0)[0], rounded_NE)
    assert find(0)[1] == notes


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_torchs_operations_pass_their_trial(dtype: torch.dtype) -> None:
    check_backend("torch", CPU, dtype)


@pytest.mark.parametrize(
    ("operation", "spoil", "what"),
    [
        ("add_block", lambda given: given["statistics"].sum_N.mul_(1.2), "log-probs"),
        ("add_block", lambda given: given["statistics"].moment_N.mul_(1.5), "entropies"),
        ("add_block", lambda given: given["statistics"].sum_N[3:4].fill_(torch.nan), "log-probs"),
        ("add_product", lambda given: given["sum_NE"].mul_(1.1), "the gradient of hidden states"),
        ("differentiate_block", lambda given: given["result"].mul_(1.1), "the gradient of hidden states"),
        ("differentiate_block", lambda given: given["result"][:, 7:9].zero_(), "the gradient of the weight"),
    ],
)
def test_a_backend_that_computes_something_else_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, operation: str, spoil, what: str
) -> None:
    right = getattr(plain, operation)

    def wrong(*given: torch.Tensor) -> torch.Tensor:
        result = right(*given)
        names = right.__code__.co_varnames[: right.__code__.co_argcount]
        spoil({**dict(zip(names, given, strict=True)), "result": result})
        return result

    monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(plain.BACKEND, **{operation: wrong}))
    with pytest.raises(PlatformError, match=f"backend triton does not compute log-probs on cpu: {what} is off by"):
        check_backend("triton", CPU, BF16)


def test_auto_takes_torch_if_the_kernels_fail_their_trial_and_named_kernels_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def settle(source: str) -> tuple[str, list[str]]:
        session: Any = SimpleNamespace(device=CPU, gather_or_raise_everywhere=lambda find_fault: [find_fault()])
        settings: Any = StandIn(
            ModelConfig(output_layer_backend="triton"),
            {"model.output_layer_backend": source},
            SimpleNamespace(params_dtype=BF16),
        )
        said: list[str] = []
        return settle_backend(
            "model.output_layer_backend", settings, session, said.append
        ).model.output_layer_backend, said

    auto, named = "--output-layer-backend auto takes triton", "--output-layer-backend triton"
    monkeypatch.setitem(BACKENDS, "triton", plain.BACKEND)
    assert settle(auto) == settle(named) == ("triton", [])
    monkeypatch.setitem(BACKENDS, "triton", dataclasses.replace(plain.BACKEND, add_product=lambda *given: None))
    backend, (line,) = settle(auto)
    assert backend == "torch"
    assert line.startswith("--output-layer-backend auto takes torch after a trial: --output-layer-backend triton does")
    assert "the gradient of hidden states is off by" in line
    with pytest.raises(PlatformError, match="triton does not compute log-probs on cpu"):
        settle(named)
    # Operations of torch that fail end the run.
    monkeypatch.setattr("megatron_rl.ops.log_probs.check_backend", mock.Mock(side_effect=PlatformError("no sums")))
    with pytest.raises(PlatformError, match="every choice fails its trial: no sums; no sums"):
        settle(auto)
