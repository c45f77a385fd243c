"""The doctor of differences on real engines, as they are and with a rotation and an epsilon of another model."""

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from megatron_rl.drift.command import FLAGS, record
from megatron_rl.drift.definition import Definition
from megatron_rl.drift.diagnosis import Diagnosis, Examiner
from megatron_rl.shared.protocol.wire import Response, encode_tokens
from megatron_rl.shared.records.audit_samples import Sample
from megatron_rl.shared.records.model_parts import ModelPart
from tests import hf_models
from tests.ranks import ROOT
from tests.sidecar import async_on_cpu, vllm_models

pytestmark = pytest.mark.slow


def examine(model: Path, dtype: str = "float32", num_workers: int = 1, flags: tuple[str, ...] = ()) -> Diagnosis:
    """Diagnose an engine whose prompts are read in several steps."""
    config = dataclasses.replace(
        vllm_models.CONFIG, model=str(model), dtype=dtype, tensor_parallel_size=num_workers,
        flags=(*vllm_models.CONFIG.flags, *FLAGS, *flags),
    )  # fmt: skip
    samples = [
        Sample(0, number, 0, 0.9, encode_tokens(prompt), make_response(12), line=1)
        for number, prompt in enumerate(hf_models.sequences([150, 31]))
    ]
    computed = getattr(torch, dtype)
    definitions = Definition(model, torch.float64, weights_dtype=computed), Definition(model, computed)
    return Examiner(*definitions, num_workers).diagnose(asyncio.run(record(config, samples)))


def make_response(num_tokens: int) -> Response:
    return Response(
        tokens=bytes(4 * num_tokens), log_probs=bytes(4 * num_tokens), finish_reason="length", seed=7, engine="0",
        spans=[], fingerprint="",
    )  # fmt: skip


def test_an_engine_of_two_workers_in_bfloat16_is_healthy(tmp_path: Path) -> None:
    found = examine(vllm_models.draw("qwen3", tmp_path).first, "bfloat16", num_workers=2)
    print(found)
    assert not found.causes
    assert found.num_tokens == 24


def test_an_engine_with_experts_is_healthy(tmp_path: Path) -> None:
    found = examine(vllm_models.draw("qwen3_moe", tmp_path).first)
    print(found)
    assert not found.causes
    assert ModelPart.EXPERTS in {finding.name for finding in found.findings}


def test_responses_that_stop_early_are_healthy_where_steps_are_scheduled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async_on_cpu.install(tmp_path / "plugin")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "plugin"), str(ROOT))))
    model = vllm_models.draw("qwen3", tmp_path).first
    # Half of all tokens end a response.
    ends = {"eos_token_id": list(range(0, vllm_models.VOCAB_SIZE, 2))}
    (model / "generation_config.json").write_text(json.dumps(ends))
    found = examine(model, flags=("--async-scheduling",))
    print(found)
    assert not found.causes
    assert found.num_tokens < 24


def test_a_rotation_and_an_epsilon_of_another_model_are_named(tmp_path: Path) -> None:
    model = vllm_models.draw("qwen3", tmp_path).first
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 9e5}, "rms_norm_eps": 1e-4}
    found = examine(model, flags=("--hf-overrides", json.dumps(other)))
    print(found)
    # An engine's norms are parts of their own.
    norms = {part for part in ModelPart if "norm" in part and not part.name.startswith("NORMED_")}
    assert {cause.name for cause in found.causes} == {ModelPart.ROTATION, *norms}


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ("--quantization", "fp8_per_channel"),
            {ModelPart.QKV, ModelPart.ATTENTION_OUTPUT, ModelPart.GATE_UP, ModelPart.DOWN},
        ),
        pytest.param(
            ("--kv-cache-dtype", "fp8"),
            {ModelPart.ATTENTION},
            marks=pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="this host has no AVX-512"),
        ),
    ],
)
def test_an_engine_that_quantizes_has_its_products_or_its_attention_named_and_nothing_else(
    tmp_path: Path, flags: tuple[str, ...], parts: set[ModelPart]
) -> None:
    model = vllm_models.draw("qwen3", tmp_path).first
    vllm_models.round_to_bfloat16(model)
    found = examine(model, "bfloat16", flags=flags)
    print(found)
    assert {cause.name for cause in found.causes} == parts
    assert {cause.reason for cause in found.causes} == {"it computes in float8_e4m3fn"}
    assert not found.is_of_other_weights
