"""The model that a command line describes: by its flags, by a folder, or by both."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.errors import InputError
from megatron_rl.types import Architecture, LinearAttention, Rope, RopeKind
from tests.command_lines import CPU, DENSE, GPT_OSS, LINEAR, QWEN3, error, folder, parse, without


def test_flags_describe_a_model_as_megatrons_scripts_do() -> None:
    model = parse(*DENSE).architecture
    assert model == Architecture(
        family="llama",
        num_layers=8,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=8,
        vocab_size=100,
        max_position_embeddings=128,
        norm_epsilon=1e-5,
        tied_embeddings=True,
    )


def test_rope_scaling_comes_from_flags() -> None:
    llama = parse(*DENSE, "--use-rope-scaling --rope-scaling-factor 32").architecture.rope
    assert llama == Rope(
        kind=RopeKind.LLAMA3, factor=32.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )
    linear = parse(*DENSE, "--rotary-seq-len-interpolation-factor 4").architecture.rope
    assert (linear.kind, linear.factor) == (RopeKind.LINEAR, 4.0)
    words = "--position-embedding-type yarn --rotary-scaling-factor 4 --yarn-original-max-position-embeddings 64"
    yarn = parse(*without(DENSE, "--position-embedding-type"), words).architecture.rope
    assert (yarn.kind, yarn.factor, yarn.original_max_positions) == (RopeKind.YARN, 4.0, 64)


def test_a_window_counts_the_token_itself() -> None:
    model = parse(*DENSE, "--window-size 31,0").architecture
    assert (model.family, model.sliding_window) == ("mistral", 32)


@pytest.mark.parametrize(
    ("dropped", "said"),
    [
        ("--swiglu", "--swiglu is missing"),
        ("--normalization", "--normalization RMSNorm is missing"),
        ("--position-embedding-type", "--position-embedding-type rope is missing"),
        ("--num-layers", "of which --num-layers is missing"),
        ("--vocab-size", "of which --vocab-size is missing"),
        ("--group-query-attention", "--num-query-groups 4 has no effect without --group-query-attention"),
    ],
)
def test_a_model_described_by_flags_needs_all_of_its_flags(dropped: str, said: str) -> None:
    assert said in error(*without(DENSE, dropped))


def test_a_folder_gives_the_architecture(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="config.json does not exist"):
        parse(*CPU, "--hf-model", str(tmp_path))
    settings = parse(*CPU, "--hf-model", folder(tmp_path, QWEN3))
    assert settings.architecture == QWEN3
    assert settings.model.hf_model == tmp_path


def test_windows_in_some_layers_and_two_ropes_come_from_the_folder(tmp_path: Path) -> None:
    model = dataclasses.replace(
        QWEN3, family="gemma3_text", sliding_window=32, full_layers=(1, 3), local_rope=Rope(base=1e4), scale_width=24,
        activation="gelu_tanh", has_output_norms=True, zero_centered_norms=True, scales_embedding=True,
    )  # fmt: skip
    settings = parse(*CPU, "--hf-model", folder(tmp_path, model))
    transformer = settings.transformer
    assert settings.architecture == model
    assert (transformer.window_size, transformer.window_attn_skip_freq) == ((31, 0), [1, 0, 1, 0])
    assert transformer.layernorm_zero_centered_gamma
    assert not transformer.bias_activation_fusion
    text = error(*CPU, "--hf-model", str(tmp_path), "--swiglu")
    assert "--swiglu contradicts the activation of gemma3_text models, GEGLU: drop the flag" in text


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"norm_epsilon": 1e-6}, "with norm_epsilon = 1e-05, and this one has norm_epsilon = 1e-06"),
        ({"activation_clamp": 3.0}, "with activation_clamp = 7.0"),
        ({"full_layers": (0, 2)}, r"with full_layers = (1, 3), and this one has full_layers = (0, 2)"),
        ({"tied_embeddings": True}, "with tied_embeddings = False"),
        ({"rope": Rope()}, "RopeKind.YARN"),
    ],
)
def test_a_model_that_vllm_would_compute_otherwise_is_trained_by_demonstrations_only(
    tmp_path: Path, changes: dict[str, Any], wanted: str
) -> None:
    words = (*CPU, "--hf-model", folder(tmp_path, dataclasses.replace(GPT_OSS, **changes)))
    text = error(*words)
    assert "--stage grpo needs a gpt_oss model as vLLM computes it" in text
    assert wanted in text
    parse(*words, "--stage sft")


def test_a_clamp_sinks_and_windows_come_from_the_folder(tmp_path: Path) -> None:
    settings = parse(*CPU, "--hf-model", folder(tmp_path, GPT_OSS))
    transformer = settings.transformer
    assert settings.architecture == GPT_OSS
    assert (transformer.activation_func_clamp_value, transformer.glu_linear_offset) == (7.0, 1.0)
    assert transformer.window_attn_skip_freq == [1, 0, 1, 0]
    assert transformer.add_bias_linear


def test_flags_describe_linear_layers_as_a_family_has_them() -> None:
    settings = parse(*LINEAR, "--spec slime_plugins.models.qwen3_next get_qwen3_next_spec")
    assert settings.architecture.family == "qwen3_5_text"
    assert settings.architecture.linear == LinearAttention(4, 8, 128, 128, 4, 4)
    assert settings.transformer.attention_output_gate is True
    assert settings.transformer.layernorm_zero_centered_gamma is True
    assert settings.transformer.linear_attention_freq == 4
    assert settings.model.linear_attention_backend == "torch"
    pattern = [word if word != "4" or LINEAR[at - 1] != "--linear-attention-freq" else "([1]*3+[0])*2"
               for at, word in enumerate(LINEAR)]  # fmt: skip
    assert parse(*pattern).architecture == settings.architecture


def test_a_rotary_factor_must_agree_with_the_folder(tmp_path: Path) -> None:
    rope = Rope(base=1e6, kind=RopeKind.YARN, factor=4.0, original_max_positions=64)
    words = [*CPU, "--hf-model", folder(tmp_path, dataclasses.replace(QWEN3, rope=rope))]
    assert parse(*words, "--rotary-scaling-factor 4").architecture.rope.factor == 4
    assert "--rotary-scaling-factor 8 contradicts factor = 4" in error(*words, "--rotary-scaling-factor 8")
