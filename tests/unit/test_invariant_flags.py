"""The flag --batch-invariant: what it sets, and what it excludes."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.command_line import mode_checks
from megatron_rl.config.rollout import RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.shared.protocol.wire import EngineKind
from megatron_rl.shared.weights import families
from megatron_rl.sidecar.settings import parse
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.checks import find_invariance_problems
from megatron_rl.sidecar.vllm.server import ServerConfig, make_process_spec
from megatron_rl.trainer.loop.mismatch import build_mismatch_bounds
from megatron_rl.types import ParallelSizes
from tests.command_lines import CPU, QWEN3, RUN, folder, keep_one_parser, parse_run, run_problems

FLAG = "--batch-invariant"
MODE = "--batch-invariant-mode"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return (*CPU, "--hf-model", folder(tmp_path_factory.mktemp("model"), QWEN3), *RUN)


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def test_all_of_a_model_is_computed_by_invariant_operations_and_a_token_that_differs_ends_the_run(
    run: tuple[str, ...],
) -> None:
    kind = EngineKind()
    plain, given, loose = (
        parse_run(*run, *words, world_size=1) for words in ((), (FLAG,), (FLAG, "--rollout-mismatch-error", "0.5"))
    )
    for settings, backend, bound in ((plain, None, 5e-3), (given, "invariant", 0.0), (loose, "invariant", 0.5)):
        model = settings.model
        found = {model.output_layer_backend, model.elementwise_backend, model.qkv_backend, settings.attention.backend}
        assert (found == {"invariant"}) == (backend is not None)
        assert build_mismatch_bounds(settings, "float32").error(kind) == bound


@pytest.mark.parametrize(
    ("words", "stored", "published"),
    [
        ((FLAG,), "bfloat16", "float32"),
        ((FLAG, "--bf16"), "float32", "bfloat16"),
        ((FLAG, "--bf16"), "bfloat16", "bfloat16"),
        ((), "bfloat16", "bfloat16"),
    ],
)
def test_the_trained_weights_are_published_as_they_are(
    words: tuple[str, ...], stored: str, published: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**families.derive_config(QWEN3), "dtype": stored}))
    settings = parse_run(*CPU, "--hf-model", str(tmp_path), *RUN, *words, world_size=1)
    assert settings.publish.dtype == published


@pytest.mark.parametrize(
    ("platform", "changes", "refusal", "problem"),
    [
        ("cuda", {}, None, None),
        ("npu", {}, None, "not for the platform npu: drop it"),
        (
            "cuda",
            {},
            "TransformerEngine is not installed",
            "TransformerEngine is not installed: install it",
        ),
        ("cuda", {"zero_centered_norms": True}, None, "computes other norms than this model has"),
        ("cuda", {"context": 2}, None, "--context-parallel-size above 1"),
        ("cuda", {"rank": 8}, None, "--lora-rank cannot be given together"),
    ],
)
def test_megatrons_mode_is_refused_where_it_does_not_compute_the_model(
    platform: str, changes: dict[str, Any], refusal: str | None, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mode_checks, "find_engine_refusal", lambda: refusal)
    settings: Any = SimpleNamespace(
        platform=platform,
        transformer=SimpleNamespace(batch_invariant_mode=True, params_dtype=torch.bfloat16),
        parallel_sizes=ParallelSizes(context=changes.pop("context", 1)),
        lora=SimpleNamespace(rank=changes.pop("rank", 0)),
        architecture=dataclasses.replace(QWEN3, **changes),
    )
    found = list(mode_checks.check_megatron_mode(settings))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]
    settings.transformer.batch_invariant_mode = False
    assert not list(mode_checks.check_megatron_mode(settings))


def test_engines_refuse_what_was_not_compared() -> None:
    cases: list[tuple[dict[str, Any], str, list[str]]] = [
        ({}, "cpu", []),
        ({}, "npu", ["on a CPU or on CUDA"]),
        ({"tensor_parallel_size": 2}, "cpu", ["--rollout-tensor-parallel-size"]),
        ({"tensor_parallel_size": 2}, "cuda", []),
        ({"vllm_args": "--worker-cls mine"}, "cpu", ["--rollout-vllm-args with --worker-cls"]),
        ({"vllm_args": "-pp 2"}, "cpu", ["--rollout-vllm-args with -pp"]),
    ]
    for values, device, expected in cases:
        found = list(find_invariance_problems(RolloutConfig(is_batch_invariant=True, **values), device))
        assert len(found) == len(expected), (values, found)
        assert all(text in problem for text, problem in zip(expected, found, strict=True)), found
    assert not list(find_invariance_problems(RolloutConfig(), "npu"))
    words = "--rollout-engine scripted --rollout-folder /nowhere/run --reward exact --batch-invariant"
    with pytest.raises(UsageError, match="--batch-invariant is for --rollout-engine vllm, not scripted"):
        parse(words.split())


def test_an_engine_gets_our_worker_on_a_cpu_and_vllms_own_mode_on_cuda(tmp_path: Path) -> None:
    for device, words, variable in (("cpu", True, None), ("cuda", False, "1")):
        config = ServerConfig(model="model", max_model_len=64, device=device, is_batch_invariant=True)  # type: ignore[arg-type]
        spec = make_process_spec(config, "engine", make_socket_folder(), tmp_path / "log")
        assert ("megatron_rl.sidecar.vllm.invariant.InvariantWorker" in spec.command) == words
        assert spec.environment.get("VLLM_BATCH_INVARIANT") == variable
        assert spec.environment.get("MKL_CBWR") == ("AUTO,STRICT" if words else None)


def test_another_mode_of_mkl_than_engines_have_is_refused(
    run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert not parse_run(*run, world_size=1).rollout.is_batch_invariant
    (problem,) = run_problems(*run, FLAG, world_size=1)
    assert "MKL_CBWR=COMPATIBLE must be AUTO,STRICT" in problem
