"""The contract of every operation's backends: their table, the choice among them, their trial, and what a run does."""

import dataclasses
from collections.abc import Callable, Collection, Iterator
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch

from megatron_rl.config.settings import AttentionConfig, ModelConfig
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.ops import elementwise, gated_delta, log_probs, qkv, shared_prompt, trials
from megatron_rl.ops.backends import Backends, Choice, Conditions, Example
from megatron_rl.ops.elementwise import plain as plain_elementwise
from megatron_rl.ops.gated_delta import chunks, flash_linear
from megatron_rl.ops.log_probs import plain as plain_log_probs
from megatron_rl.ops.operations import OPERATIONS
from megatron_rl.ops.qkv import naive as naive_qkv
from megatron_rl.trainer.loop.settling import settle_backend
from megatron_rl.types import Architecture, LinearAttention
from tests.processes import run_python

CPU, FP32, BF16, FP16, FP64 = torch.device("cpu"), torch.float32, torch.bfloat16, torch.float16, torch.float64
DEVICES = ("cpu", "cuda", "npu", "another")
LINEAR = LinearAttention(1, 2, 8, 12)
ON_CPU, ON_CUDA, ON_NPU = (Conditions(device, BF16, head_dim=64) for device in ("cpu", "cuda", "npu"))
"""Conditions that rows of tests change."""
ATTENTION, LINEAR_ATTENTION = shared_prompt.BACKENDS, gated_delta.BACKENDS
OUTPUT_LAYER, ELEMENTWISE, HEADS = log_probs.BACKENDS, elementwise.BACKENDS, qkv.BACKENDS


@pytest.fixture(params=OPERATIONS)
def target(request: pytest.FixtureRequest) -> str:
    """Return the setting of an operation."""
    return request.param


@pytest.fixture
def backends(target: str) -> Backends[Any]:
    return OPERATIONS[target]


def refuse(
    monkeypatch: pytest.MonkeyPatch, backends: Backends[Any], name: str, reason: str | None = "it is not here"
) -> None:
    """Have a backend refuse with the reason, or run without one."""
    monkeypatch.setattr(backends[name], "refusal", lambda conditions: reason)


def test_the_flag_offers_auto_and_every_backend(target: str, backends: Backends[Any]) -> None:
    subject, field = target.split(".")
    config = {"attention": AttentionConfig, "model": ModelConfig}[subject]
    assert get_args(get_type_hints(config)[field]) == ("auto", *backends)


@pytest.mark.parametrize("device", DEVICES)
def test_auto_tries_backends_of_the_table_and_the_last_one_refuses_nothing(
    backends: Backends[Any], device: str
) -> None:
    order = backends.list_order(device)
    assert set(order) <= set(backends)
    strange = Conditions(device, FP64, 1, 577, 31, True, 1 << 20, True)
    assert backends[order[-1]].refusal(strange) is None
    assert backends.choose("auto", strange).name in order


@pytest.mark.parametrize("device", DEVICES)
def test_auto_skips_backends_that_refuse_and_says_why(
    backends: Backends[Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *earlier, last = backends.list_order(device)
    for name in earlier:
        refuse(monkeypatch, backends, name, f"{name} is not here")
    reasons = "".join(f"; not {name}: {name} is not here" for name in earlier)
    note = f"{backends.flag} auto takes {last}{reasons}"
    assert backends.choose("auto", Conditions(device, BF16)) == Choice(last, (note,))


def test_a_named_backend_is_chosen_or_refused_with_the_reason_and_the_first_that_can_run(
    backends: Backends[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = backends.choose("auto", ON_CUDA).name
    for name in list(backends):
        with monkeypatch.context() as patch:
            refuse(patch, backends, name, None)
            assert backends.choose(name, ON_CUDA) == Choice(name)
            if name != first:
                refuse(patch, backends, name)
                expected = rf"{backends.flag} {name} cannot run here \(it is not here\): write {first}, or auto"
                with pytest.raises(UsageError, match=expected):
                    backends.choose(name, ON_CUDA)


def test_an_unknown_backend_is_an_error_that_names_the_others(backends: Backends[Any]) -> None:
    others = ", ".join(("auto", *backends))
    with pytest.raises(UsageError, match=f"{backends.flag} fast does not exist: write one of {others}$"):
        backends.choose("fast", ON_CPU)


change = dataclasses.replace
NO_DTYPE = "it supports fp32, fp16 and bf16 only"


@pytest.mark.parametrize(
    ("backends", "conditions", "name"),
    [
        (ATTENTION, ON_CPU, "merge"),
        (ATTENTION, change(ON_CPU, window=4), "gather"),
        (ATTENTION, change(ON_CPU, window=4, has_sinks=True), "gather"),
        (ATTENTION, change(ON_CPU, dtype=FP32, has_sinks=True), "merge"),
        (ATTENTION, ON_CUDA, "triton"),
        (ATTENTION, change(ON_CUDA, dtype=FP32, window=4, has_sinks=True), "triton"),
        (ATTENTION, change(ON_CUDA, head_dim=256), "triton"),
        (ATTENTION, change(ON_CUDA, head_dim=512), "gather"),
        (ATTENTION, ON_NPU, "merge"),
        (ATTENTION, change(ON_NPU, window=4), "naive"),
        (ATTENTION, change(ON_NPU, dtype=FP32), "naive"),
        (LINEAR_ATTENTION, ON_CPU, "torch"),
        (LINEAR_ATTENTION, ON_CUDA, "torch"),
        *((one, ON_CUDA, "triton") for one in (OUTPUT_LAYER, ELEMENTWISE, HEADS)),
        *((one, change(ON_CUDA, dtype=FP16), "triton") for one in (OUTPUT_LAYER, ELEMENTWISE, HEADS)),
        *((one, change(ON_CUDA, dtype=FP64), "torch") for one in (OUTPUT_LAYER, ELEMENTWISE, HEADS)),
        *((one, conditions, "torch") for one in (OUTPUT_LAYER, ELEMENTWISE, HEADS) for conditions in (ON_NPU, ON_CPU)),
        (ELEMENTWISE, change(ON_CUDA, hidden_size=8192), "triton"),
        (ELEMENTWISE, change(ON_CUDA, hidden_size=16_384), "torch"),
        (HEADS, change(ON_CUDA, head_dim=80), "triton"),
        (HEADS, change(ON_CUDA, head_dim=576), "torch"),
    ],
)
def test_auto_chooses_the_fastest_that_can_run(backends: Backends[Any], conditions: Conditions, name: str) -> None:
    choice = backends.choose("auto", conditions)
    assert choice.name == name
    (note,) = choice.notes
    assert note.startswith(f"{backends.flag} auto takes {name}")
    order = backends.list_order(conditions.device)
    for other in order[: order.index(name)]:
        assert f"; not {other}: {backends[other].refusal(conditions)}" in note


def test_cudnn_alone_is_in_no_order_since_it_has_not_run_on_a_gpu() -> None:
    assert sorted((*ATTENTION.list_order("cuda"), "cudnn")) == sorted(ATTENTION)


@pytest.mark.parametrize(
    ("backends", "name", "conditions", "reason"),
    [
        (ATTENTION, "merge", change(ON_CPU, window=4), "it has no sliding window"),
        (ATTENTION, "merge", change(ON_CUDA, dtype=FP32), "on cuda it needs --bf16 or --fp16"),
        (ATTENTION, "flash", ON_CUDA, "flash-attn is not installed"),
        (ATTENTION, "flash", ON_CPU, "flash-attn has no kernels for cpu"),
        (ATTENTION, "gather", ON_CUDA, None),
        (ATTENTION, "gather", change(ON_CUDA, has_sinks=True), "in half precision it has no sinks"),
        (ATTENTION, "triton", change(ON_CUDA, window=4, has_sinks=True), None),
        (ATTENTION, "triton", change(ON_CUDA, head_dim=192, value_dim=128), None),
        (ATTENTION, "triton", change(ON_CUDA, head_dim=512), "at most 256 wide, and the model's are 512 wide"),
        (ATTENTION, "triton", change(ON_CUDA, value_dim=512), "at most 256 wide, and the model's are 512 wide"),
        (LINEAR_ATTENTION, "flash-linear", ON_CPU, "flash-linear-attention has no kernels for cpu"),
        (LINEAR_ATTENTION, "flash-linear", ON_CUDA, "flash-linear-attention is not installed"),
        (ELEMENTWISE, "triton", change(ON_CUDA, hidden_size=8192), None),
        (
            ELEMENTWISE,
            "triton",
            change(ON_CUDA, hidden_size=16_384),
            "at most 8,192 columns, and the hidden size is",
        ),
        (HEADS, "triton", change(ON_CUDA, has_latents=True), "it has no multi-latent attention"),
        (
            HEADS,
            "triton",
            change(ON_CUDA, head_dim=576),
            "an even number of dimensions up to 256, and the model's",
        ),
        *((one, "triton", change(ON_CUDA, dtype=FP64), NO_DTYPE) for one in OPERATIONS.values() if "triton" in one),
        *((one, "triton", ON_NPU, "not known to work on npu") for one in OPERATIONS.values() if "triton" in one),
        *((one, "triton", ON_CPU, "interpreter, TRITON_INTERPRET=1") for one in OPERATIONS.values() if "triton" in one),
    ],
)
def test_a_backend_says_why_it_cannot_run(
    backends: Backends[Any],
    name: str,
    conditions: Conditions,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused = backends[name].refusal(conditions)
    if reason is None:
        assert refused is None
        return
    assert reason in refused
    with pytest.raises(PlatformError, match=f"{name} cannot run here: .*{reason}"):
        backends.check(name, change(conditions, linear=LINEAR))


def test_the_package_for_linear_layers_runs_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_linear.importlib.util, "find_spec", lambda name: name)
    assert LINEAR_ATTENTION.choose("auto", ON_CUDA).name == "flash-linear"
    assert LINEAR_ATTENTION["flash-linear"].refusal(change(ON_CUDA, dtype=FP32)) == "it needs --bf16 or --fp16"


def test_where_triton_interprets_kernels_run_on_a_cpu_if_they_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for backends in (OUTPUT_LAYER, ELEMENTWISE, HEADS):
        assert backends.choose("triton", ON_CPU) == Choice("triton")
        assert backends.choose("auto", ON_CPU).name == "torch"


def test_without_the_package_triton_the_other_backends_remain() -> None:
    code = """
        import sys
        sys.modules["triton"] = None
        import torch
        from megatron_rl.ops.backends import Conditions
        from megatron_rl.ops.operations import OPERATIONS
        for backends in OPERATIONS.values():
            if "triton" in backends:
                print(backends.choose("auto", Conditions("cuda", torch.bfloat16)).notes[0].split("auto takes ")[1])
    """
    because = "; not triton: the package triton is not installed"
    assert run_python(code).splitlines()[-4:] == [f"{name}{because}" for name in ("gather", "torch", "torch", "torch")]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_every_backend_that_runs_here_passes_its_trial(backends: Backends[Any], dtype: torch.dtype) -> None:
    sizes = Conditions("cpu", dtype, head_dim=32, hidden_size=64, queries=2, linear=LINEAR)
    for changed in (sizes, change(sizes, value_dim=16), change(sizes, has_sinks=True), change(sizes, window=100)):
        names = [name for name, one in backends.items() if one.refusal(changed) is None]
        assert names
        for name in names:
            backends.check(name, changed)


def test_linear_layers_are_tried_if_a_model_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, LINEAR_ATTENTION, "torch")
    LINEAR_ATTENTION.check("torch", ON_CPU)
    with pytest.raises(PlatformError, match="torch cannot run here: it is not here"):
        LINEAR_ATTENTION.check("torch", change(ON_CPU, linear=LINEAR))


def halve_gradient(out: torch.Tensor) -> torch.Tensor:
    return out.detach() + 0.5 * (out - out.detach())


def replace(backend: Any, **functions: Callable[..., Any]) -> Any:
    """Return a backend with other functions."""
    return SimpleNamespace(**{**vars(backend), **functions})


def spoil_attention(spoil: Callable[..., torch.Tensor], of_sinks: bool = False) -> Any:
    right = ATTENTION["gather"]

    def attention(*given: Any) -> torch.Tensor:
        return right.attention(*given[:-1], spoil(given[-1])) if of_sinks else spoil(right.attention(*given))

    return replace(right, attention=attention)


def spoil_block(function: str, spoil: Callable[[dict[str, Any]], Any]) -> Any:
    """Change what a function of the output layer's blocks was given, or its result."""
    right = getattr(plain_log_probs, function)

    def wrong(*given: torch.Tensor) -> torch.Tensor:
        result = right(*given)
        names = right.__code__.co_varnames[: right.__code__.co_argcount]
        spoil({**dict(zip(names, given, strict=True)), "result": result})
        return result

    return replace(plain_log_probs, **{function: wrong})


def spoil_elementwise(function: str, spoil: Callable[[Any], Any]) -> Any:
    right = getattr(plain_elementwise, function)
    return replace(plain_elementwise, **{function: lambda *operands, **named: spoil(right(*operands, **named))})


def spoil_heads(place: int, with_norms: bool) -> Any:
    """Make a kernel that computes one of its heads, or one of its gradients, wrong."""

    def split_heads(mixed_TC: torch.Tensor, groups: int, dim: int, rotation: Any, norms: Any) -> Any:
        is_spoiled = with_norms is (norms is not None)
        if is_spoiled and place >= 3:
            tensors = [mixed_TC, *((norms.q_weight_D, norms.k_weight_D) if norms else ())]
            tensors[place - 3].register_hook(lambda gradient: gradient * 1.1)
        heads = list(naive_qkv.split_heads(mixed_TC, groups, dim, rotation, norms))
        if is_spoiled and place < 3:
            heads[place] = heads[place] * 1.1
        return tuple(heads)

    return replace(naive_qkv, split_heads=split_heads)


def list_spoilt() -> Iterator[tuple[Backends[Any], str, Any, str]]:
    """Yield an operation, a name, a backend that computes something else, and what the trial says of it."""

    def attention(backend: Any, what: str) -> tuple[Backends[Any], str, Any, str]:
        return ATTENTION, "gather", backend, f"attention on cpu: {what}"

    yield attention(spoil_attention(lambda out: out * 1.05), "its output is off by")
    yield attention(spoil_attention(lambda out: out.roll(1, 0)), "its output is off by")
    yield attention(spoil_attention(lambda out: torch.cat([out[:-1], out[-1:] * torch.nan])), "its output is off")
    yield attention(spoil_attention(halve_gradient), "the gradient of queries is off by")
    yield attention(spoil_attention(halve_gradient, of_sinks=True), "the gradient of sinks is off by")
    rule = replace(LINEAR_ATTENTION["torch"], rule=lambda *given: halve_gradient(chunks.rule(*given)))
    yield LINEAR_ATTENTION, "torch", rule, "linear layers on cpu: the gradient of queries is off by"
    for function, spoil, what in (
        ("add_block", lambda given: given["statistics"].sum_N.mul_(1.2), "log-probs"),
        ("add_block", lambda given: given["statistics"].moment_N.mul_(1.5), "entropies"),
        ("add_block", lambda given: given["statistics"].sum_N[3:4].fill_(torch.nan), "log-probs"),
        ("add_product", lambda given: given["sum_NE"].mul_(1.1), "the gradient of hidden states"),
        ("differentiate_block", lambda given: given["result"].mul_(1.1), "the gradient of hidden states"),
        ("differentiate_block", lambda given: given["result"][:, 7:9].zero_(), "the gradient of the weight"),
    ):
        yield OUTPUT_LAYER, "triton", spoil_block(function, spoil), f"log-probs on cpu: {what} is off by"
    for function, spoil, what in (
        ("swiglu", lambda out: out * 1.1, "SwiGLU on cpu: its output"),
        ("swiglu", halve_gradient, "SwiGLU on cpu: the gradient of gates"),
        ("weighted_swiglu", lambda out: out * 1.1, "SwiGLU of experts on cpu: its output"),
        ("weighted_swiglu", halve_gradient, "SwiGLU of experts on cpu: the gradient of gates"),
        ("add_and_normalize", lambda out: (out[0], out[1] * 1.1), "a residual with its norm on cpu: its norm"),
        (
            "add_and_normalize",
            lambda out: (halve_gradient(out[0]), out[1]),
            "a residual with its norm on cpu: the g",
        ),
        ("add_and_normalize", lambda out: (out[0], out[1] + torch.nan), "a residual with its norm on cpu: its norm"),
    ):
        yield ELEMENTWISE, "triton", spoil_elementwise(function, spoil), what
    heads = ("queries", "keys", "values", "the gradient of their product")
    norms = ("the gradient of the norm of queries", "the gradient of the norm of keys")
    for with_norms in (True, False):
        for place, what in enumerate((*heads, *norms) if with_norms else heads):
            yield HEADS, "triton", spoil_heads(place, with_norms), f"heads on cpu: {what} is off by"


@pytest.mark.parametrize(("backends", "name", "wrong", "what"), list(list_spoilt()))
def test_a_backend_that_computes_something_else_is_refused_by_name(
    backends: Backends[Any], name: str, wrong: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conditions = Conditions("cpu", BF16, head_dim=16, has_sinks="sinks" in what, queries=2, linear=LINEAR)
    monkeypatch.setitem(backends, name, wrong)
    with pytest.raises(PlatformError, match=f"{backends.flag} {name} does not compute {what}.*[Pp]lease report"):
        backends.check(name, conditions)


@dataclasses.dataclass(frozen=True)
class StandIn:
    """The settings that a trial reads."""

    attention: AttentionConfig
    model: ModelConfig
    sources: dict[str, str]
    architecture: Architecture
    transformer: Any


@pytest.fixture
def settle(target: str, backends: Backends[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what settles on a backend, and what that says; all backends run, and some compute another sum."""
    faulty: set[str] = set()

    def add(name: str, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
        return [torch.ones(3, dtype=dtype) * (2 if name in faulty else 1)]

    for name in backends:
        refuse(monkeypatch, backends, name, None)
    monkeypatch.setattr(backends, "_list_examples", lambda conditions: [Example("sums", ("the sum",), add)])
    monkeypatch.setattr(backends, "_definition", "the definition")
    first = backends.list_order("cuda")[0]
    subject, field = target.split(".")

    def settle(source: str, wrong: Collection[str] = (), fault_of_another: str = "") -> tuple[str, list[str]]:
        faulty.clear()
        faulty.update(wrong)
        # Another rank has its fault at the first trial.
        of_others, said = [fault_of_another], []
        session: Any = SimpleNamespace(
            device=torch.device("cuda"),
            gather_or_raise_everywhere=lambda find: [of_others.pop() if of_others else "", find()],
        )
        architecture = Architecture("qwen3", 2, 64, 96, 4, 2, 16, 128, 64, linear=LINEAR)
        settings: Any = StandIn(
            AttentionConfig(), ModelConfig(), {target: source}, architecture, SimpleNamespace(params_dtype=BF16)
        )
        config = dataclasses.replace(getattr(settings, subject), **{field: first})
        settings = dataclasses.replace(settings, **{subject: config})
        return getattr(getattr(settle_backend(target, settings, session, said.append), subject), field), said

    return settle


def test_a_run_leaves_a_backend_that_fails_on_any_rank_for_the_next_one_and_a_named_one_is_an_error(
    backends: Backends[Any], settle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, (first, second, *others) = backends.flag, backends.list_order("cuda")
    auto, named = f"{flag} auto takes {first}", f"{flag} {first}"
    assert settle(auto) == settle(named) == (first, [])
    line = f"{flag} auto takes {second} after a trial: "
    assert settle(auto, fault_of_another="no plan") == (second, [f"{line}no plan"])
    found, (said,) = settle(auto, wrong=[first])
    assert found == second
    assert said.startswith(f"{line}{flag} {first} does not compute sums on cuda: the sum is off by 1 of the largest")
    with pytest.raises(PlatformError, match=f"{flag} {first} does not compute sums"):
        settle(named, wrong=[first])
    if others:
        refuse(monkeypatch, backends, second)
        found, (said,) = settle(auto, wrong=[first])
        assert found == others[0]
        assert said.endswith(f"; {second} cannot run here: it is not here")


def test_if_every_choice_fails_the_run_ends_unless_megatrons_own_operations_are_left(
    backends: Backends[Any], settle: Callable[..., Any]
) -> None:
    *_, last = order = backends.list_order("cuda")
    auto = f"{backends.flag} auto takes {order[0]}"
    if backends in (ELEMENTWISE, HEADS):
        assert settle(auto, wrong=order)[0] == last == "torch"
    else:
        with pytest.raises(PlatformError, match=f"every choice fails its trial: .*; {backends.flag} {last} does not"):
            settle(auto, wrong=order)


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
        (halve_gradient, False, "its gradient is off by"),
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
            lambda device, dtype: differentiate(device, dtype, spoil), differentiate, CPU, dtype, lambda: "less",
            "9 by 9, ", by_row,
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
