"""The backend of shared-prompt attention that a run gets, and the error if it cannot have the requested one."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.config.settings import AttentionConfig
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops.backends import Choice, Conditions
from megatron_rl.ops.shared_prompt import BACKENDS, check_backend, choose_backend
from megatron_rl.trainer.loop.settling import settle_attention
from megatron_rl.types import Architecture

CPU = Conditions("cpu", torch.float32)
CUDA = Conditions("cuda", torch.bfloat16)


# `cudnn` has not run on a GPU, so `auto` does not take it.
ON_CUDA = ("triton", "gather", "merge", "flash", "naive")


@pytest.mark.parametrize(
    ("conditions", "name"),
    [
        (CPU, "merge"),
        (dataclasses.replace(CPU, window=4), "gather"),
        (dataclasses.replace(CPU, window=4, has_sinks=True), "gather"),
        (dataclasses.replace(CPU, has_sinks=True), "merge"),
        (dataclasses.replace(CPU, dtype=torch.bfloat16), "merge"),
        (CUDA, "triton"),
        (dataclasses.replace(CUDA, dtype=torch.float32), "triton"),
        (dataclasses.replace(CUDA, window=4), "triton"),
        (dataclasses.replace(CUDA, window=4, has_sinks=True), "triton"),
        (dataclasses.replace(CUDA, head_dim=256), "triton"),
        (dataclasses.replace(CUDA, head_dim=512), "gather"),
        (Conditions("npu", torch.bfloat16), "merge"),
        (Conditions("npu", torch.bfloat16, window=4), "naive"),
        (Conditions("npu", torch.float32), "naive"),
    ],
)
def test_auto_takes_the_fastest_that_can_run_and_says_why(conditions: Conditions, name: str) -> None:
    choice = choose_backend("auto", conditions)
    assert choice.name == name
    (note,) = choice.notes
    assert note.startswith(f"--shared-prompt-backend auto takes {name}")
    order = ON_CUDA if conditions.device == "cuda" else tuple(BACKENDS)
    for other in order[: order.index(name)]:
        assert f"not {other}: {BACKENDS[other].refusal(conditions)}" in note


def test_every_backend_has_a_place_among_those_that_auto_takes_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sorted((*ON_CUDA, "cudnn")) == sorted(BACKENDS)
    for number, name in enumerate(ON_CUDA[:-1]):
        assert choose_backend("auto", CUDA).name == name or BACKENDS[name].refusal(CUDA)
        refusing = dataclasses.replace(BACKENDS[name], refusal=lambda conditions: "it is not here")
        monkeypatch.setitem(BACKENDS, name, refusing)
        assert choose_backend("auto", CUDA).name in ON_CUDA[number + 1 :]
    assert choose_backend("auto", CUDA).name == "naive"


@pytest.mark.parametrize("name", ["merge", "gather", "naive"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_backend_that_computes_attention_passes_its_trial(name, dtype) -> None:
    check_backend(name, torch.device("cpu"), dtype, 4, 2, 32)
    check_backend(name, torch.device("cpu"), dtype, 2, 2, 24, value_dim=16)
    check_backend(name, torch.device("cpu"), dtype, 4, 2, 32, has_sinks=True)
    if name != "merge":
        check_backend(name, torch.device("cpu"), dtype, 4, 2, 32, 100)


def test_a_backend_with_wrong_gradients_of_sinks_is_refused(monkeypatch) -> None:
    right = BACKENDS["gather"]

    def attention(*given: Any) -> torch.Tensor:
        *others, sinks_H = given
        return right.attention(*others, sinks_H.detach() + 0.9 * (sinks_H - sinks_H.detach()))

    monkeypatch.setitem(BACKENDS, "gather", dataclasses.replace(right, attention=attention))
    with pytest.raises(PlatformError, match="the gradient of sinks is off by"):
        check_backend("gather", torch.device("cpu"), torch.float32, 4, 2, 32, has_sinks=True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out * 1.05,
        lambda out: out.detach() + 0.9 * (out - out.detach()),
        lambda out: torch.cat([out[:-1], out[-1:] * torch.nan]),
        lambda out: out.roll(1, 0),
    ],
)
def test_a_backend_that_computes_something_else_is_refused_by_name(monkeypatch, spoil) -> None:
    right = BACKENDS["gather"]
    wrong = dataclasses.replace(right, attention=lambda *given: spoil(right.attention(*given)))
    monkeypatch.setitem(BACKENDS, "gather", wrong)
    with pytest.raises(PlatformError, match="backend gather does not compute attention on cpu"):
        check_backend("gather", torch.device("cpu"), torch.bfloat16, 4, 2, 32)


def test_a_backend_that_was_asked_for_is_taken() -> None:
    for name, one in BACKENDS.items():
        if one.refusal(CPU) is None:
            assert choose_backend(name, CPU) == Choice(name)
    assert choose_backend("gather", CUDA) == Choice("gather")


def test_a_backend_that_cannot_run_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(UsageError, match=r"merge cannot run here \(it has no sliding window\): write gather, or auto"):
        choose_backend("merge", dataclasses.replace(CPU, window=4))
    with pytest.raises(UsageError, match="on cuda it needs --bf16 or --fp16"):
        choose_backend("merge", Conditions("cuda", torch.float32))
    with pytest.raises(
        UsageError, match="triton cannot run here .heads must be at most 256 wide, and the model's are 512"
    ):
        choose_backend("triton", dataclasses.replace(CUDA, head_dim=512))
    with pytest.raises(UsageError, match="flash-attn is not installed"):
        choose_backend("flash", CUDA)


def test_a_run_leaves_a_backend_that_fails_on_the_device_for_the_next_one_and_skips_those_that_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session: Any = SimpleNamespace(
        device=torch.device("cpu"), gather_or_raise_everywhere=lambda find_fault: [find_fault()]
    )
    shape = Architecture("qwen3", 2, 64, 96, 4, 2, 16, 128, 64)

    def settle(source: str) -> tuple[str, list[str]]:
        config, sources = AttentionConfig(backend="merge", blocks="chip"), {"attention.backend": source}
        settings: Any = StandIn(config, sources, shape, SimpleNamespace(params_dtype=torch.bfloat16))
        said: list[str] = []
        return settle_attention(settings, session, said.append).attention.backend, said

    auto = "--shared-prompt-backend auto takes merge"
    assert settle(auto) == ("merge", [])
    right = BACKENDS["merge"]
    wrong = dataclasses.replace(right, attention=lambda *given: 1.1 * right.attention(*given))
    monkeypatch.setitem(BACKENDS, "merge", wrong)
    gather = dataclasses.replace(BACKENDS["gather"], refusal=lambda conditions: "it is not here")
    monkeypatch.setitem(BACKENDS, "gather", gather)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backend, (line,) = settle(auto)
    assert backend == "naive"
    assert line.startswith("--shared-prompt-backend auto takes naive after a trial: --shared-prompt-backend merge does")
    assert "gather cannot run here: it is not here; triton cannot run here: on the CPU" in line
    with pytest.raises(PlatformError, match="merge does not compute attention on cpu"):
        settle("--shared-prompt-backend merge")


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The settings that a trial reads."""

    attention: AttentionConfig
    sources: dict[str, str]
    architecture: Any
    transformer: Any
