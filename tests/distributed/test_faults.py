"""Faults planted in a conversion move the result by far more than any tolerance, so the parity tests would see them."""

import dataclasses
import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.shared.weights.families import read_architecture
from megatron_rl.trainer.data.packing import pack_sequences
from megatron_rl.types import Architecture, Rope
from tests import hf_models
from tests.distributed.layouts import CASES, build, start_session

LEAST_EFFECT = 1e-2
ROTARY_DIM = 8
SEQUENCES = hf_models.sequences([60, 9])


def swapped(first: str, second: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if first in name]:
            other = name.replace(first, second)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def neutral(part: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change with the effect that the model does not have these parameters."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if part in name]:
            tensors[name] = torch.full_like(tensors[name], value)

    return change


def without_rotated_keys(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "kv_a_proj_with_mqa" in name]:
        tensors[name][-ROTARY_DIM:] = 0


TENSOR_FAULTS = {
    "gate and up swapped": ("qwen3", swapped("gate_proj", "up_proj")),
    "an expert's gate and up swapped": ("mixtral", swapped(".w1.", ".w3.")),
    "keys and values swapped": ("llama", swapped("k_proj", "v_proj")),
    "norm of queries left out": ("qwen3", neutral("q_norm", 1.0)),
    "bias of values left out": ("qwen2", neutral("v_proj.bias", 0.0)),
    "bias of the output projection left out": ("llama_biased", neutral("o_proj.bias", 0.0)),
    "bias of the down projection left out": ("llama_biased", neutral("down_proj.bias", 0.0)),
    "norms left out": ("mistral", neutral("layernorm", 1.0)),
    "bias of the router left out": ("glm4_moe", neutral("e_score_correction_bias", 0.0)),
    "shared expert left out": ("glm4_moe", neutral("shared_experts.down_proj", 0.0)),
    "dense layer's gate and up swapped": ("glm4_moe", swapped("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")),
    "shared expert's gate and up swapped": ("qwen2_moe", swapped("shared_expert.gate_proj", "shared_expert.up_proj")),
    "gate of the shared expert left out": ("qwen2_moe", neutral("shared_expert_gate", 0.0)),
    "bias of decays left out": ("qwen3_5", neutral("dt_bias", 0.0)),
    "rates of decays left out": ("qwen3_next", neutral("A_log", 0.0)),
    "betas and decays swapped": ("qwen3_5", swapped("in_proj_a", "in_proj_b")),
    "norm of linear layers left out": ("qwen3_next", neutral("linear_attn.norm", 1.0)),
    "convolution left out": ("qwen3_5", neutral("conv1d", 1.0)),
    "sinks left out": ("gpt_oss", neutral("sinks", -100.0)),
    "biases of experts left out": ("gpt_oss", neutral("proj_bias", 0.0)),
    "biases of queries, keys and values left out": ("gpt_oss", neutral("_proj.bias", 0.0)),
    "bias of the router's scores left out": ("gpt_oss", neutral("router.bias", 0.0)),
    "norms around the addition swapped": (
        "gemma3_text",
        swapped("post_attention_layernorm", "pre_feedforward_layernorm"),
    ),
    "norm of keys' and values' narrow rows left out": ("deepseek_v3", neutral("kv_a_layernorm", 1.0)),
    "norm of queries' narrow rows left out": ("deepseek_v3", neutral("q_a_layernorm", 1.0)),
    "key part that rotates left out": ("deepseek_v3", without_rotated_keys),
    "norm of all heads of keys left out": ("minimax_m2", neutral("k_norm", 1.0)),
    "bias of the router left out, of MiniMax": ("minimax_m2", neutral("e_score_correction_bias", 0.0)),
    "gate of the shared expert left out, of Qwen3.5": ("qwen3_5_moe", neutral("shared_expert_gate", 0.0)),
    "biases of attention left out": ("seed_oss", neutral("_proj.bias", 0.0)),
}
ARCHITECTURE_FAULTS: dict[str, tuple[str, Callable[[Architecture], Architecture]]] = {
    "rope of another base": (
        "qwen3", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, base=a.rope.base * 2))
    ),
    "rope not scaled": (
        "llama", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, factor=1.0))
    ),
    "yarn without its factor": (
        "qwen2", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, attention_factor=1.0))
    ),
    "yarn's factor of scores left out": (
        "deepseek_v3", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, mscale_all_dim=None))
    ),
    "yarn's factor of the part that rotates left out": (
        "deepseek_v3", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, attention_factor=1.0))
    ),
    "no sliding window": ("mistral", lambda a: dataclasses.replace(a, sliding_window=None)),
    "a window one too long": ("gemma3_text", lambda a: dataclasses.replace(a, sliding_window=12)),
    "windows in all layers": ("gemma3_text", lambda a: dataclasses.replace(a, full_layers=())),
    "one rope in all layers": ("gemma3_text", lambda a: dataclasses.replace(a, local_rope=None)),
    "local rope of another base": ("gemma3_text", lambda a: dataclasses.replace(a, local_rope=Rope(base=1e4))),
    "scores scaled by the width of heads": ("gemma3_text", lambda a: dataclasses.replace(a, scale_width=None)),
    "norms of outputs left out": ("gemma3_text", lambda a: dataclasses.replace(a, has_output_norms=False)),
    "embedding not scaled": ("gemma3_text", lambda a: dataclasses.replace(a, scales_embedding=False)),
    "norms not centered at zero": ("gemma3_text", lambda a: dataclasses.replace(a, zero_centered_norms=False)),
    "another activation": ("gemma3_text", lambda a: dataclasses.replace(a, activation="silu")),
    "clamp left out": ("gpt_oss", lambda a: dataclasses.replace(a, activation_clamp=None)),
    "windows in the other layers": ("gpt_oss", lambda a: dataclasses.replace(a, full_layers=(0, 2))),
    "another epsilon": ("qwen3", lambda a: dataclasses.replace(a, norm_epsilon=1e-2)),
    "whole heads rotated": (
        "glm4_moe", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, rotary_fraction=1.0))
    ),
    "halves of heads rotated in place of neighbors": (
        "ernie4_5", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, interleaved=False))
    ),
    "whole heads rotated, of MiniMax": (
        "minimax_m2", lambda a: dataclasses.replace(a, rope=dataclasses.replace(a.rope, rotary_fraction=1.0))
    ),
    "weights of experts not normalized": ("qwen3_5_moe", lambda a: with_experts(a, normalize_weights=False)),
    "norms not centered": ("qwen3_5", lambda a: dataclasses.replace(a, zero_centered_norms=False)),
    "experts' weights not scaled": ("glm4_moe", lambda a: with_experts(a, scaling_factor=1.0)),
    "experts of all groups": ("glm4_moe", lambda a: with_experts(a, num_groups=1)),
    "experts of all groups, with softmax": ("deepseek_v2", lambda a: with_experts(a, num_groups=1)),
    "weights of experts normalized": ("qwen2_moe", lambda a: with_experts(a, normalize_weights=True)),
}  # fmt: skip


def with_experts(architecture: Architecture, **changes: Any) -> Architecture:
    assert architecture.experts is not None
    return dataclasses.replace(architecture, experts=dataclasses.replace(architecture.experts, **changes))


@pytest.fixture(scope="module")
def draw(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.Tensor]]:
    """Return a function that draws a model once, with the log-probs that transformers gives it."""

    @functools.cache
    def of(name: str) -> tuple[Path, torch.Tensor]:
        folder = hf_models.draw(name, tmp_path_factory.mktemp(name))
        return folder, torch.cat(hf_models.log_probs(folder, SEQUENCES))

    return of


def check_effect(folder: Path, architecture: Architecture, expected: torch.Tensor) -> None:
    with start_session(CASES["TP1"]) as session:
        model = build(session, CASES["TP1"], folder, architecture)
        effect = (torch.cat(model.forward([pack_sequences(SEQUENCES)])) - expected).abs().max().item()
    print(f"effect: {effect:.3f}")
    assert effect >= LEAST_EFFECT


def list_faults(faults: dict[str, Any]) -> list[Any]:
    slow = [fault for fault, (name, _) in faults.items() if name in hf_models.COMPARED_LESS_OFTEN]
    return [pytest.param(fault, marks=pytest.mark.slow) if fault in slow else fault for fault in faults]


@pytest.mark.parametrize("fault", list_faults(TENSOR_FAULTS))
def test_a_fault_planted_in_the_tensors_changes_the_log_probs(fault: str, draw, tmp_path: Path) -> None:
    name, change = TENSOR_FAULTS[fault]
    drawn, expected = draw(name)
    folder = shutil.copytree(drawn, tmp_path / name)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check_effect(folder, read_architecture(folder), expected)


@pytest.mark.parametrize("fault", list_faults(ARCHITECTURE_FAULTS))
def test_a_fault_planted_in_the_architecture_changes_the_log_probs(fault: str, draw) -> None:
    name, change = ARCHITECTURE_FAULTS[fault]
    folder, expected = draw(name)
    check_effect(folder, change(read_architecture(folder)), expected)
