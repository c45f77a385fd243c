"""The kernel that stands in for vLLM's where it scores sampled tokens: when it is used, and what it answers."""

import asyncio
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.ops.sampled import score_naively
from megatron_rl.ops.triton_support import without_compile_hook
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm import scoring
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.scoring import patch_sampler, use_own_scoring
from megatron_rl.sidecar.vllm.server import configure_server
from tests import hf_models
from tests.processes import run_python
from tests.sidecar.standin_vllm import FACTS

HOST, BF16 = torch.device("cpu"), torch.bfloat16
LOGITS = torch.randn(4, 37, generator=torch.Generator().manual_seed(0))
SAMPLED = torch.tensor([3, 36, 0, 7])


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Let the naive twin stand in for the kernel, and note the dtypes that it was tried with."""
    dtypes: list[torch.dtype] = []
    monkeypatch.setattr(scoring, "score", score_naively)
    monkeypatch.setattr(scoring, "try_kernel", lambda device, dtype: dtypes.append(dtype))
    return dtypes


@pytest.fixture
def sampler(tried: list[torch.dtype]) -> Iterator[Any]:
    """Make a patched module whose own function, with the form of the installed vLLM's, only notes that it is called."""
    calls: list[int] = []

    @functools.wraps(compute_topk_scores)
    def noting(*arguments: Any, **named: Any) -> str:
        calls.append(1)
        return "vLLM's"

    module = SimpleNamespace(compute_topk_scores=noting)
    assert patch_sampler(module, HOST, BF16) == "applied"
    return module


def test_a_sampled_token_alone_is_scored_by_the_kernel_in_vllms_form(sampler: Any, tried: list[torch.dtype]) -> None:
    assert tried == [BF16, torch.float32]
    for ends, on_host, on_device in (([0, 2, 4], [0, 2, 4], None), (None, None, None), (SAMPLED, None, SAMPLED)):
        # As vLLM's sampler calls it.
        found = sampler.compute_topk_scores(
            LOGITS, 0, SAMPLED, ends, logprob_token_ids_state=object(), expanded_idx_mapping=None,
            max_per_req_token_ids=0, logits_mode=False,
        )  # fmt: skip
        assert type(found) is LogprobsTensors
        truth = score_naively(LOGITS.double(), SAMPLED)
        assert torch.equal(found.logprob_token_ids, SAMPLED[:, None])
        assert torch.allclose(found.logprobs[:, 0].double(), truth.log_probs_R, rtol=1e-6)
        assert torch.equal(found.selected_token_ranks, truth.ranks_R)
        assert found.cu_num_generated_tokens == on_host
        assert found.cu_num_generated_tokens_tensor is on_device


@pytest.mark.parametrize(
    "asked", [{"num_logprobs": 2}, {"max_per_req_token_ids": 1}, {"logits_mode": True}, {"logits": LOGITS[:, ::2]}]
)
def test_vllm_answers_whatever_else_is_asked_for(sampler: Any, asked: dict[str, Any]) -> None:
    plain = {"logits": LOGITS, "num_logprobs": 0, "sampled_token_ids": SAMPLED}
    assert sampler.compute_topk_scores(**{**plain, **asked}) == "vLLM's"


def test_the_kernel_is_put_in_place_once(sampler: Any) -> None:
    patched = sampler.compute_topk_scores
    assert patch_sampler(sampler, HOST, BF16) == "applied before"
    assert sampler.compute_topk_scores is patched


def other_parameters(logits: torch.Tensor, num_logprobs: int) -> LogprobsTensors: ...


@functools.wraps(compute_topk_scores)
def other_results() -> None: ...


del other_results.__wrapped__


@pytest.mark.parametrize("function", [other_parameters, other_results, None])
def test_an_unknown_vllm_keeps_its_own_function(function: Any, tried: list[torch.dtype]) -> None:
    module = SimpleNamespace(compute_topk_scores=function)
    assert patch_sampler(module, HOST, BF16) == "not applied: this vLLM scores sampled tokens in another way"
    assert module.compute_topk_scores is function
    assert tried == []


def test_a_kernel_that_fails_its_trial_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "try_kernel", lambda device, dtype: None if dtype == BF16 else "its ranks are [7]")
    module = SimpleNamespace(compute_topk_scores=compute_topk_scores)
    assert patch_sampler(module, HOST, BF16) == "not applied: for float32, its ranks are [7]"
    assert module.compute_topk_scores is compute_topk_scores


def test_only_a_gpu_with_vllms_second_runner_is_patched_and_only_if_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert use_own_scoring("ours", True, HOST, BF16) == "not needed: not a GPU"
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    monkeypatch.setattr(scoring, "patch_sampler", lambda module, device, dtype: module.__name__)
    assert use_own_scoring("vllm", True, HOST, BF16) == "not wanted"
    assert use_own_scoring("ours", False, HOST, BF16) == "not applied: vLLM uses its first model runner"
    assert use_own_scoring("ours", True, HOST, BF16) == "vllm.v1.worker.gpu.sample.sampler"
    monkeypatch.setattr(scoring, "_SAMPLER", "vllm.moved")
    assert "scores sampled tokens in another way" in use_own_scoring("ours", True, HOST, BF16)


@pytest.mark.parametrize("choice", ["ours", "vllm"])
def test_the_choice_of_a_run_reaches_every_engine_and_what_keeps_vllms_kernels_is_said(
    choice: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    rollout = RolloutConfig(scoring=choice, dtype="float32")
    config = configure_server(rollout, hf_models.draw("qwen3", tmp_path), 128, "cuda", num_threads=1)
    launcher = SimpleNamespace(start=lambda spec: SimpleNamespace(address=spec.address, need=lambda pid: None))
    factory = VllmFactory(config, make_socket_folder(), launcher)
    asked: list[tuple[str, ...]] = []
    kept = "not applied: this vLLM computes adapters in another way"

    async def call(step: str, method: str, *arguments: str) -> list[dict[str, Any]]:
        asked.append((method, *arguments))
        return [{**FACTS, "scoring_patch": "not applied: the trial failed", "products_patch": kept, "pid": 1}]

    for engine in (factory.create("engine-0"), factory.adopt("engine-1", "/no/socket")):
        engine._workers = call
        asyncio.run(engine._prepare())
    assert asked == [("megatron_rl_prepare", choice)] * 2
    said = [record.message for record in caplog.records if "log-probs" in record.message]
    assert said == [
        f"engine engine-{number}: vLLM computes the log-probs of sampled tokens: not applied: the trial failed"
        for number in range(2)
    ]
    assert f"engine engine-1: vLLM computes adapters: {kept}" in caplog.text


COMPILE_AFTER_WARM_UP = """
from types import SimpleNamespace
from triton import knobs
from vllm.utils import jit_monitor
from megatron_rl.sidecar.vllm.worker import answered

# Without a GPU vLLM finds no Triton that it can use.
jit_monitor.HAS_TRITON = True
jit_monitor.activate(mode="error")

def compile_kernel(*_):
    # As Triton does once a kernel is compiled.
    hook = knobs.runtime.jit_post_compile_hook
    return {} if hook is None else hook(fn=SimpleNamespace(name="a_kernel"))

print("ours:", answered(compile_kernel)(None))
try:
    compile_kernel()
except RuntimeError as error:
    print("vLLM's:", error)
"""


def test_our_kernels_may_compile_after_vllms_warm_up_and_no_others() -> None:
    ours, vllms = run_python(COMPILE_AFTER_WARM_UP).splitlines()[-2:]
    assert ours == "ours: {}"
    assert "kernel JIT compilation during inference: a_kernel" in vllms


def test_a_triton_without_the_hook_as_ascends_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    with without_compile_hook():
        pass
