"""The backends between the product of queries, keys and values and attention: choice, fallback, and the kernels."""

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_rl.config.trainer import ModelConfig
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops.backends import Choice, Conditions, FunctionBackend
from megatron_rl.ops.qkv import BACKENDS, check_backend, naive
from megatron_rl.trainer.loop.settling import settle_backend
from megatron_rl.trainer.mcore.model import self_attention
from megatron_rl.trainer.mcore.model.fusions import RMSNorm
from megatron_rl.trainer.mcore.model.self_attention import FusedSelfAttention
from tests.kernels.processes import compile_kernels, run_module

FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_models_with_interpreted_kernels_are_those_of_transformers() -> None:
    # In a process of its own: Triton decides whether to interpret when it is first imported.
    run_module("pytest", "-q", "tests/kernels/interpreted_qkv_models.py", TRITON_INTERPRET="1")


@pytest.mark.each_change
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "targets", [("80", "90", "100", "gfx942"), pytest.param(("86", "89", "120"), marks=pytest.mark.slow)]
)
def test_compiled_kernels_spill_nothing_and_load_16_bytes_at_once(targets: tuple[str, ...]) -> None:
    found = compile_kernels("tests.kernels.compiled_qkv", *targets)
    assert len(found) == 10 * len(targets)
    for kernel in found:
        assert kernel["stack"] == 0, kernel
        assert kernel["num_atomics"] == 0, kernel
        assert kernel["num_wide_loads"] > 0, kernel


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "name", "reason"),
    [
        ("cuda", BF16, 128, "triton", ""),
        ("cuda", FP32, 80, "triton", ""),
        ("cuda", FP64, 128, "torch", "it supports fp32, fp16 and bf16 only"),
        (
            "cuda",
            BF16,
            576,
            "torch",
            "heads must have an even number of dimensions up to 256, and the model's have 576",
        ),
        ("npu", BF16, 128, "torch", ""),
        ("cpu", FP32, 128, "torch", ""),
    ],
)
def test_auto_takes_the_kernels_on_cuda_and_says_why_where_it_cannot(
    device: str, dtype: torch.dtype, head_dim: int, name: str, reason: str
) -> None:
    because = f"; not triton: {reason}" if reason else ""
    assert BACKENDS.choose("auto", Conditions(device, dtype, head_dim=head_dim)) == Choice(
        name, (f"--qkv-backend auto takes {name}{because}",)
    )


def test_a_backend_that_was_asked_for_is_taken_or_is_an_error_that_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert BACKENDS.choose("torch", Conditions("cuda", BF16, head_dim=128)) == Choice("torch")
    with pytest.raises(UsageError, match="it has no multi-latent attention"):
        BACKENDS.choose("triton", Conditions("cuda", BF16, head_dim=192, has_latents=True))
    with pytest.raises(UsageError, match=r"triton cannot run here \(it is not known to work on npu\): write torch"):
        BACKENDS.choose("triton", Conditions("npu", BF16, head_dim=128))
    with pytest.raises(UsageError, match="on the CPU it needs Triton's interpreter, TRITON_INTERPRET=1"):
        BACKENDS.choose("triton", Conditions("cpu", BF16, head_dim=128))


def spoil(place: int, with_norms: bool) -> Any:
    """Make a kernel that computes one of its heads, or one of its gradients, wrong."""

    def split_heads(mixed_TC: torch.Tensor, groups: int, dim: int, rotation: Any, norms: Any) -> Any:
        def scale(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 1.1

        is_spoiled = with_norms is (norms is not None)
        if is_spoiled and place >= 3:
            tensors = [mixed_TC, *((norms.q_weight_D, norms.k_weight_D) if norms else ())]
            tensors[place - 3].register_hook(scale)
        heads = list(naive.split_heads(mixed_TC, groups, dim, rotation, norms))
        if is_spoiled and place < 3:
            heads[place] = heads[place] * 1.1
        return tuple(heads)

    return split_heads


WHAT = ("queries", "keys", "values", "the gradient of their product", "the gradient of the norm of queries",
        "the gradient of the norm of keys")  # fmt: skip


@pytest.mark.parametrize("with_norms", [True, False])
def test_a_backend_that_computes_something_else_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, with_norms: bool
) -> None:
    check_backend("torch", CPU, BF16, 2, 16)
    for place, what in enumerate(WHAT if with_norms else WHAT[:4]):
        monkeypatch.setitem(BACKENDS, "triton", FunctionBackend(spoil(place, with_norms)))
        with pytest.raises(PlatformError, match=f"--qkv-backend triton does not compute heads on cpu: {what} is off"):
            check_backend("triton", CPU, BF16, 2, 16)


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The settings that the trial reads."""

    model: ModelConfig
    sources: dict[str, str]
    architecture: Any
    transformer: Any


def settle(source: str, *faults_of_others: str | None) -> tuple[str, list[str]]:
    """Return the backend after a trial on this rank and others, and what was said."""
    of_others = [list(faults_of_others)]
    session: Any = SimpleNamespace(
        device=CPU,
        # Other ranks' faults are those of the first trial.
        gather_or_raise_everywhere=lambda find_fault: [*(of_others.pop() if of_others else []), find_fault()],
    )
    settings: Any = StandIn(
        ModelConfig(qkv_backend="triton"),
        {"model.qkv_backend": source},
        SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=16),
        SimpleNamespace(params_dtype=BF16),
    )
    said: list[str] = []
    return settle_backend("model.qkv_backend", settings, session, said.append).model.qkv_backend, said


def test_auto_takes_megatrons_operations_if_the_trial_fails_on_any_rank_and_a_named_kernel_is_an_error() -> None:
    auto, named = "--qkv-backend auto takes triton", "--qkv-backend triton"
    with mock.patch.dict(BACKENDS, triton=FunctionBackend(naive.split_heads)):
        assert settle(auto, None) == ("triton", [])
        assert settle(named, None) == ("triton", [])
        assert settle(auto, "a fault") == ("torch", ["--qkv-backend auto takes torch after a trial: a fault"])
    with mock.patch.dict(BACKENDS, triton=FunctionBackend(spoil(0, True))):
        backend, (line,) = settle(auto, None)
        assert backend == "torch"
        assert "--qkv-backend triton does not compute heads on cpu: queries is off by" in line
        with pytest.raises(PlatformError, match="does not compute heads"):
            settle(named, None)


def test_kernels_of_element_wise_work_that_do_not_compile_are_left_by_auto_and_an_error_by_name() -> None:
    def settle(source: str) -> tuple[str, list[str]]:
        session: Any = SimpleNamespace(device=CPU, gather_or_raise_everywhere=lambda find_fault: [find_fault()])
        settings: Any = StandIn(
            ModelConfig(elementwise_backend="triton"),
            {"model.elementwise_backend": source},
            None,
            SimpleNamespace(params_dtype=BF16),
        )
        said: list[str] = []
        settings = settle_backend("model.elementwise_backend", settings, session, said.append)
        return settings.model.elementwise_backend, said

    check = "megatron_rl.ops.elementwise.check_backend"
    with mock.patch(check):
        assert settle("--elementwise-backend auto takes triton") == ("triton", [])
    with mock.patch(check, side_effect=RuntimeError("no ptxas")):
        line = "--elementwise-backend auto takes torch after a trial: no ptxas"
        assert settle("--elementwise-backend auto takes triton") == ("torch", [line])
        with pytest.raises(RuntimeError, match="no ptxas"):
            settle("--elementwise-backend triton")


def make_layer(q_norm: Any, k_norm: Any, num_ranks: int = 1, **fields: Any) -> FusedSelfAttention:
    """Make the parts of a layer that decide whether the kernel computes it."""
    layer = object.__new__(FusedSelfAttention)
    torch.nn.Module.__init__(layer)
    layer.config = SimpleNamespace(num_query_groups=2, **fields)
    layer.world_size, layer.q_layernorm, layer.k_layernorm = num_ranks, q_norm, k_norm
    return layer


def make_norm(**changes: Any) -> torch.nn.Module:
    config: Any = SimpleNamespace(
        normalization="RMSNorm", layernorm_zero_centered_gamma=False, params_dtype=FP32, sequence_parallel=False
    )
    return RMSNorm(config, 8, **changes)


def test_a_layer_with_what_the_kernel_lacks_takes_megatrons_way_and_the_log_names_the_reason_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    norm, other = make_norm(), make_norm(eps=1e-3)
    assert not make_layer(None, None)._takes_megatrons_way
    assert not make_layer(IdentityOp(), IdentityOp(), no_rope_freq=None)._takes_megatrons_way
    assert not make_layer(norm, norm)._takes_megatrons_way
    assert not make_layer(torch.nn.RMSNorm(8, eps=1e-6), torch.nn.RMSNorm(8, eps=1e-6))._takes_megatrons_way
    assert caplog.messages == []
    self_attention._say_once.cache_clear()
    for reason, layer in (
        ("it has no multi_latent_attention", make_layer(None, None, multi_latent_attention=True)),
        ("it has no attention_output_gate", make_layer(norm, norm, attention_output_gate=True)),
        ("it has no rotary_interleaved", make_layer(norm, norm, rotary_interleaved=True)),
        ("it has no no_rope_freq", make_layer(norm, norm, no_rope_freq=[0, 1])),
        ("ranks share a key head", make_layer(norm, norm, num_ranks=4)),
        ("it has no LayerNorm of torch.nn.modules.normalization", make_layer(norm, torch.nn.LayerNorm(8))),
        ("it has no RMSNorm of torch.nn.modules.normalization", make_layer(torch.nn.RMSNorm(8), norm)),
        ("queries and keys must have norms of one kind", make_layer(norm, other)),
        ("queries and keys must have norms of one kind", make_layer(norm, None)),
    ):
        for _ in range(2):
            assert layer._takes_megatrons_way
        assert caplog.messages[-1] == f"--qkv-backend triton leaves layers to Megatron's own operations: {reason}"
    assert len(caplog.messages) == 8


def test_norms_that_are_read_and_not_called_still_wait_for_their_gathered_weights() -> None:
    q_norm, k_norm = make_norm(), make_norm()
    waited: list[torch.nn.Module] = []
    for norm in (q_norm, k_norm):
        norm.register_forward_pre_hook(lambda module, _: waited.append(module))
    norms = make_layer(q_norm, k_norm)._read_norms()
    assert norms is not None
    assert waited == [q_norm, k_norm]
    assert (norms.q_weight_D, norms.k_weight_D) == (q_norm.weight, k_norm.weight)
    assert make_layer(IdentityOp(), IdentityOp())._read_norms() is None
