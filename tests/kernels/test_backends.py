"""The contract of every operation's backends: its table, the choice among its members, and their trial."""

import dataclasses
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch

from megatron_rl.config.settings import AttentionConfig, ModelConfig
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops import elementwise, gated_delta, log_probs, qkv, shared_prompt, trials
from megatron_rl.ops.backends import Backends, Choice, Conditions

CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16
DEVICES = ("cpu", "cuda", "npu", "another")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation with backends."""

    backends: Backends[Any]
    config: type
    field: str
    try_backend: Callable[[str, torch.dtype], None]


OPERATIONS = {
    one.backends.flag: one
    for one in (
        Operation(
            shared_prompt.BACKENDS, AttentionConfig, "backend",
            lambda name, dtype: shared_prompt.check_backend(name, CPU, dtype, 4, 2, 32),
        ),
        Operation(
            log_probs.BACKENDS, ModelConfig, "output_layer_backend",
            lambda name, dtype: log_probs.check_backend(name, CPU, dtype),
        ),
        Operation(
            elementwise.BACKENDS, ModelConfig, "elementwise_backend",
            lambda name, dtype: elementwise.check_backend(name, CPU, dtype),
        ),
        Operation(
            qkv.BACKENDS, ModelConfig, "qkv_backend",
            lambda name, dtype: qkv.check_backend(name, CPU, dtype, 2, 16),
        ),
        Operation(
            gated_delta.BACKENDS, ModelConfig, "linear_attention_backend",
            lambda name, dtype: gated_delta.check_backend(name, CPU, dtype, 2, 8, 12),
        ),
    )
}  # fmt: skip


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Operation:
    return OPERATIONS[request.param]


def test_the_flag_offers_auto_and_every_backend(operation: Operation) -> None:
    assert get_args(get_type_hints(operation.config)[operation.field]) == ("auto", *operation.backends)


@pytest.mark.parametrize("device", DEVICES)
def test_auto_tries_backends_of_the_table_and_the_last_one_refuses_nothing(operation: Operation, device: str) -> None:
    backends = operation.backends
    order = backends.list_order(device)
    assert set(order) <= set(backends)
    strange = Conditions(device, torch.float64, 1, 577, 31, True, 1 << 20, True)
    assert backends[order[-1]].refusal(strange) is None
    assert backends.choose("auto", strange).name in order


@pytest.mark.parametrize("device", DEVICES)
def test_auto_skips_backends_that_refuse_and_says_why(
    operation: Operation, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends, conditions = operation.backends, Conditions(device, BF16)
    *earlier, last = backends.list_order(device)
    for name in earlier:
        refusing = dataclasses.replace(backends[name], refusal=lambda conditions, name=name: f"{name} is not here")
        monkeypatch.setitem(backends, name, refusing)
    reasons = "".join(f"; not {name}: {name} is not here" for name in earlier)
    assert backends.choose("auto", conditions) == Choice(last, (f"{backends.flag} auto takes {last}{reasons}",))


def test_a_named_backend_is_chosen_or_refused_with_the_reason_and_the_first_that_can_run(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends, conditions = operation.backends, Conditions("cuda", BF16)
    first = backends.choose("auto", conditions).name
    for name in list(backends):
        monkeypatch.setitem(backends, name, dataclasses.replace(backends[name], refusal=lambda conditions: None))
        assert backends.choose(name, conditions) == Choice(name)
        monkeypatch.undo()
        if name != first:
            refusing = dataclasses.replace(backends[name], refusal=lambda conditions: "it is not here")
            monkeypatch.setitem(backends, name, refusing)
            expected = rf"{backends.flag} {name} cannot run here \(it is not here\): write {first}, or auto"
            with pytest.raises(UsageError, match=expected):
                backends.choose(name, conditions)
            monkeypatch.undo()


def test_an_unknown_backend_is_an_error_that_names_the_others(operation: Operation) -> None:
    others = ", ".join(("auto", *operation.backends))
    with pytest.raises(UsageError, match=f"{operation.backends.flag} fast does not exist: write one of {others}$"):
        operation.backends.choose("fast", Conditions("cpu", FP32))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_backend_that_runs_here_passes_its_trial(operation: Operation, dtype: torch.dtype) -> None:
    sizes = {"head_dim": 32, "hidden_size": 64}
    names = [name for name, one in operation.backends.items() if one.refusal(Conditions("cpu", dtype, **sizes)) is None]
    assert names
    for name in names:
        operation.try_backend(name, dtype)


def differentiate(
    device: torch.device, dtype: torch.dtype, spoil: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> list[torch.Tensor]:
    """Compute a product, whose second row is small, and its gradient."""
    generator = torch.Generator().manual_seed(0)
    a_NK, b_KM, grad_NM = (torch.randn(9, 9, generator=generator).to(BF16) for _ in range(3))
    a_NK[1] *= 2.0**-30
    leaf_NK = a_NK.to(device, dtype).requires_grad_()
    out_NM = spoil(leaf_NK @ b_KM.to(device, dtype))
    return [out_NM, *torch.autograd.grad(out_NM, [leaf_NK], grad_NM.to(device, dtype))]


def spoil_small_row(out_NM: torch.Tensor) -> torch.Tensor:
    return torch.cat((out_NM[:1], 2 * out_NM[1:2], out_NM[2:]))


@pytest.mark.parametrize(
    ("spoil", "by_row", "fault"),
    [
        (torch.clone, False, None),
        (torch.clone, True, None),
        (lambda out: out * 1.05, False, "the product is off by"),
        (lambda out: out.detach() + 0.9 * (out - out.detach()), False, "its gradient is off by"),
        (lambda out: out + torch.nan, False, "the product is off by nan"),
        (lambda out: out.roll(1, 0), False, "the product is off by"),
        (lambda out: out.no_such_operation, False, "it fails with AttributeError: 'Tensor' object"),
        (spoil_small_row, False, "its gradient is off by"),
        (spoil_small_row, True, "the product is off by"),
    ],
)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_trial_refuses_what_is_further_from_float64_than_rounding_explains(
    dtype: torch.dtype, spoil: Any, by_row: bool, fault: str | None
) -> None:
    def check() -> None:
        trials.check(
            "the host does not multiply", ("the product", "its gradient"),
            lambda device, dtype: differentiate(device, dtype, spoil), differentiate, CPU, dtype, "less", "9 by 9, ",
            by_row,
        )  # fmt: skip

    if fault is None:
        check()
        return
    end = r"\(9 by 9, torch\.\w+\)\. Write less, and please report this with the output of megatron-rl doctor$"
    with pytest.raises(PlatformError, match=f"the host does not multiply on cpu: {fault}.*{end}"):
        check()


def test_a_trial_runs_kernels_twice_and_judges_their_later_launches() -> None:
    calls: list[int] = []

    def compute(device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        calls.append(len(calls))
        return [torch.ones(2) * (1 + len(calls) // 2)]

    with pytest.raises(trials.TrialError, match="the sum is off by 1 of the largest"):
        trials.compare(("the sum",), compute, lambda device, dtype: [torch.ones(2, dtype=dtype)], CPU, FP32)
    assert len(calls) == 2
