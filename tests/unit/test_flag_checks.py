"""Flags that are wrong by themselves or contradict each other, and their errors: a row each in flag_checks.toml."""

import json
import tomllib
from pathlib import Path

import pytest

from megatron_rl.command_line import flags
from megatron_rl.types import Architecture
from tests.command_lines import (
    CPU,
    DENSE,
    ERNIE,
    GPT_OSS,
    LINEAR,
    QWEN3,
    QWEN3_MOE,
    RUN,
    SPARSE,
    error,
    folder,
    keep_one_parser,
    parse,
    run_problems,
)
from tests.launch_scripts import read_models

ROWS = tomllib.loads(Path(__file__).with_name("flag_checks.toml").read_text(encoding="utf-8"))
MODELS = {"none": CPU, "dense": DENSE, "linear": LINEAR, "sparse": SPARSE}
FOLDERS = {model.family: model for model in (QWEN3, QWEN3_MOE, GPT_OSS)}
UNSCALED = " without scales"
OF_GPT_OSS = (
    "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable "
    "--window-size 31,0 --position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 64 --no-yarn-correction-range-round-to-int --mscale 1.0"
)
OF_LATENTS = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --mscale 1.0 --mscale-all-dim 1.0 --kv-channels 128 --rotary-scaling-factor 40"
)


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def write_model(path: Path, model: Architecture | str) -> str:
    """Write the config.json of an architecture, or of a released model, whose rope may be without its scales."""
    if isinstance(model, Architecture):
        return folder(path, model)
    config = dict(read_models()[model.removesuffix(UNSCALED)])
    if model.endswith(UNSCALED):
        rope = config["rope_scaling"]
        config["rope_scaling"] = {key: value for key, value in rope.items() if not key.startswith("mscale")}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("section", ROWS)
def test_a_contradiction_is_an_error_that_says_what_to_write(section: str, tmp_path: Path) -> None:
    model, _, ranks = section.removesuffix(" ranks").partition(" on ")
    world_size = int(ranks) if ranks else None
    place = model.removeprefix("folder ")
    of_folder = QWEN3 if model == "run" else FOLDERS.get(place, place)
    where = () if model in MODELS else ("--hf-model", write_model(tmp_path, of_folder))
    wrong = {}
    for words, expected in ROWS[section].items():
        if model == "run":
            text = "\n".join(run_problems(*CPU, *where, *RUN, words, world_size=world_size))
        else:
            text = error(*MODELS.get(model, CPU), *where, words, world_size=world_size)
        parts = [expected] if isinstance(expected, str) else expected
        if model.startswith("folder "):
            parts = [*parts, f"{words} contradicts", "config.json", ": drop the flag"]
        if not all(part in text for part in parts):
            wrong[words] = text
    assert wrong == {}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (QWEN3, "--rotary-scaling-factor 1"),
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
        (
            QWEN3_MOE,
            "--num-layers 4 --swiglu --normalization RMSNorm --untie-embeddings-and-output-weights --qk-layernorm "
            "--rotary-base 1000000 --norm-epsilon 1e-6 --group-query-attention --num-query-groups 4 --num-experts 8",
        ),
    ],
)
def test_flags_that_agree_with_the_folder_change_nothing(model: Architecture | str, words: str, tmp_path: Path) -> None:
    where = ("--hf-model", write_model(tmp_path, model))
    assert parse(*CPU, *where, words).architecture == parse(*CPU, *where).architecture


def test_a_model_that_flags_describe_has_no_part_that_only_a_folder_describes() -> None:
    text = error(*DENSE, OF_GPT_OSS, OF_LATENTS, "--window-attn-skip-freq 2 --rotary-interleaved")
    for flag in ("--quick-geglu", "--softmax-type learnable", "--v-head-dim 128", "--rotary-interleaved"):
        assert f"{flag}: it is read from the config.json of the families that have it; write --hf-model" in text
    neutral = "--softmax-type vanilla --glu-linear-offset 0 --mscale 1.0 --mscale-all-dim 0.0"
    assert parse(*DENSE, neutral).architecture == parse(*DENSE).architecture


@pytest.mark.parametrize("endpoint", ["http://localhost:8000", "http://[::1]:8000", "https://rollout.example/run"])
def test_an_address_of_a_sidecar_is_taken_as_it_is(endpoint: str) -> None:
    assert parse(*DENSE, f"--rollout-endpoint {endpoint}").service.endpoint == endpoint


def test_without_a_launcher_the_number_of_ranks_is_not_checked() -> None:
    assert parse(*DENSE, "--tensor-model-parallel-size 4 --global-batch-size 7").training.global_batch_size == 7


def test_flags_that_megatron_core_itself_refuses_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise ValueError("a wing too many")

    monkeypatch.setattr(flags.import_configs()["transformer"], "__post_init__", refuse)
    version = flags.find_megatron_version()
    assert error(*DENSE) == f"megatron-core {version} refuses the transformer configuration: a wing too many"
