"""Flags about parts that only config.json describes agree with it, or are refused with an error."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_rl.types import Architecture, Experts, Rope, RopeKind
from tests.command_lines import CPU, DENSE, QWEN3, error, folder, keep_one_parser, parse
from tests.launch_scripts import read_models

GPT_OSS = dataclasses.replace(
    QWEN3, family="gpt_oss", qk_layernorm=False, linear_bias=True, has_sinks=True, activation="clamped_swiglu",
    norm_epsilon=1e-5, activation_clamp=7.0, sliding_window=32, full_layers=(1, 3), experts=Experts(8, 2, 128),
    rope=Rope(kind=RopeKind.YARN, factor=4.0, original_max_positions=64, truncate=False),
)  # fmt: skip
ERNIE = dataclasses.replace(QWEN3, family="ernie4_5", qk_layernorm=False, rope=Rope(interleaved=True))
OF_GPT_OSS = (
    "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable "
    "--window-size 31,0 --position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 64 --no-yarn-correction-range-round-to-int --mscale 1.0"
)
UNSCALED = " without scales"
OF_LATENTS = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --mscale 1.0 --mscale-all-dim 1.0 --kv-channels 128 --rotary-scaling-factor 40"
)


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def described(path: Path, model: Architecture | str) -> str:
    """Write the config.json of an architecture, or of a released model, whose rope may be without its scales."""
    if isinstance(model, Architecture):
        return folder(path, model)
    config = dict(read_models()[model.removesuffix(UNSCALED)])
    if model.endswith(UNSCALED):
        rope = config["rope_scaling"]
        config["rope_scaling"] = {key: value for key, value in rope.items() if not key.startswith("mscale")}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (GPT_OSS, OF_GPT_OSS),
        (GPT_OSS, "--window-attn-skip-freq 2"),
        (GPT_OSS, "--rope-type yarn --enable-gpt-oss"),
        # Without latents, Megatron says so of any model.
        (GPT_OSS, "--rope-type rope"),
        (QWEN3, "--rope-type rope"),
        ("DeepSeek-V3", "--rope-type yarn"),
        ("Moonlight-16B-A3B", "--rope-type rope"),
        (GPT_OSS, "--window-attn-skip-freq [1,0]*2"),
        (QWEN3, "--softmax-type vanilla --glu-linear-offset 0 --kv-lora-rank 512 --mscale 2 --window-attn-skip-freq 3"),
        (ERNIE, "--rotary-interleaved"),
        ("DeepSeek-V3", OF_LATENTS),
        # The keys have Megatron's defaults.
        ("DeepSeek-V3 without scales", "--mscale 1.0 --mscale-all-dim 0.0"),
        # Without YaRN Megatron does not read its scales.
        ("Moonlight-16B-A3B", "--multi-latent-attention --mscale 0.7 --mscale-all-dim 0.7 --rotary-scaling-factor 1"),
    ],
)
def test_flags_that_agree_with_the_folder_change_nothing(model: Architecture | str, words: str, tmp_path: Path) -> None:
    where = ("--hf-model", described(tmp_path, model))
    assert parse(*CPU, *where, words).architecture == parse(*CPU, *where).architecture


@pytest.mark.parametrize(
    ("model", "words", "said"),
    [
        (GPT_OSS, "--softmax-type vanilla", "whose gpt_oss model has learnable"),
        (GPT_OSS, "--glu-linear-offset 0", "has 1"),
        (GPT_OSS, "--activation-func-clamp-value 3", "has 7"),
        # A window of one token more: Megatron does not count the token itself.
        (GPT_OSS, "--window-size 32,0", "sliding_window = 32"),
        (QWEN3, "--window-size 31,0", "sliding_window = null"),
        (QWEN3, "--rope-type yarn", "whose rope has the type default"),
        (QWEN3, "--enable-gpt-oss", "has no such part"),
        ("DeepSeek-V3", "--rope-type rope", "whose rope has the type yarn"),
        ("Moonlight-16B-A3B", "--rope-type yarn", "whose rope has the type default"),
        (GPT_OSS, "--window-attn-skip-freq 4", "none (0) as in [1,0,1,0]"),
        (GPT_OSS, "--window-attn-skip-freq [0,1]*2", "none (0) as in [1,0,1,0]"),
        (GPT_OSS, "--window-attn-skip-freq [1,0]", "none (0) as in [1,0,1,0]"),
        (QWEN3, "--softmax-type learnable", "has vanilla"),
        (QWEN3, "--quick-geglu", "whose qwen3 model has no such part"),
        (QWEN3, "--activation-func-clamp-value 7", "has no such part"),
        (QWEN3, "--multi-latent-attention", "has no such part"),
        (QWEN3, "--rotary-interleaved", "has no such part"),
        ("DeepSeek-V3", "--q-lora-rank 768", "whose deepseek_v3 model has 1536"),
        ("DeepSeek-V3", "--kv-lora-rank 256", "has 512"),
        ("DeepSeek-V3", "--qk-head-dim 64", "has 128"),
        ("DeepSeek-V3", "--qk-pos-emb-head-dim 32", "has 64"),
        ("DeepSeek-V3", "--v-head-dim 64", "has 128"),
        ("DeepSeek-V3", "--mscale 0.7", "has 1"),
        ("DeepSeek-V3", "--mscale-all-dim 0", "has 1"),
        ("DeepSeek-V3 without scales", "--mscale 0.7", "has 1"),
        ("DeepSeek-V3 without scales", "--mscale-all-dim 1.0", "has 0"),
        ("DeepSeek-V3", "--rotary-scaling-factor 8", "contradicts factor = 40"),
        ("Moonlight-16B-A3B", "--q-lora-rank 1536", "has no such part"),
        ("Moonlight-16B-A3B", "--rotary-scaling-factor 40", "contradicts"),
    ],
)
def test_a_flag_that_contradicts_the_folder_is_an_error_with_both(
    model: Architecture | str, words: str, said: str, tmp_path: Path
) -> None:
    text = error(*CPU, "--hf-model", described(tmp_path, model), words)
    assert f"{words} contradicts" in text
    assert "config.json" in text
    assert said in text


def test_a_model_that_flags_describe_has_none_of_these_parts() -> None:
    text = error(*DENSE, OF_GPT_OSS, OF_LATENTS, "--window-attn-skip-freq 2 --rotary-interleaved")
    assert "--rope-type yarn: it is read from the config.json" in error(*DENSE, "--rope-type yarn")
    for flag in ("--quick-geglu", "--softmax-type learnable", "--v-head-dim 128", "--rotary-interleaved"):
        assert f"{flag}: it is read from the config.json of the families that have it; write --hf-model" in text
    neutral = "--softmax-type vanilla --glu-linear-offset 0 --mscale 1.0 --mscale-all-dim 0.0"
    assert parse(*DENSE, neutral).architecture == parse(*DENSE).architecture
