"""Command lines for tests, and helpers that parse them."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_rl.command_line import flags
from megatron_rl.command_line import parse as command_line
from megatron_rl.config import settings as config
from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.shared.weights import families
from megatron_rl.types import Architecture, Experts, Rope, RopeKind

CPU = ("--platform", "cpu")
DENSE = (
    *CPU,
    *["--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "8", "--ffn-hidden-size", "96"],
    *["--group-query-attention", "--num-query-groups", "4", "--max-position-embeddings", "128", "--vocab-size", "100"],
    *["--swiglu", "--normalization", "RMSNorm", "--position-embedding-type", "rope", "--disable-bias-linear"],
)
LINEAR = (
    *DENSE, "--qk-layernorm", "--attention-output-gate", "--apply-layernorm-1p",
    *["--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "4"],
    *["--linear-num-key-heads", "4", "--linear-num-value-heads", "8"],
)  # fmt: skip
SPARSE = (*DENSE, "--qk-layernorm", *["--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "48"])

PROMPTS = ("--prompts", str(Path(__file__).with_name("prompts.jsonl")))
# The flags that a run needs beyond its model.
RUN = (
    *PROMPTS,
    *["--lr", "1e-6", "--train-iters", "8", "--seq-length", "128", "--rollout-max-tokens", "64"],
    *["--grpo-prompts-per-step", "16", "--rollout-folder", "run", "--reward", "exact"],
)
# A whole command for a launch, up to the folder; its model is on the hosts of the run alone, and has a space.
LAUNCHED = (
    "pretrain_grpo.py", "--hf-model", "my model", "--prompts", "prompts.jsonl", "--reward", "exact",
    "--seq-length", "2048", "--rollout-max-tokens", "1536", "--grpo-prompts-per-step", "128", "--train-iters", "400",
    "--lr", "1e-6", "--rollout-tensor-parallel-size", "2", "--save",
)  # fmt: skip

QWEN3 = Architecture(
    family="qwen3",
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=32,
    vocab_size=200,
    max_position_embeddings=256,
    rope=Rope(base=1e6),
    qk_layernorm=True,
)
QWEN3_MOE = dataclasses.replace(
    QWEN3, family="qwen3_moe", experts=Experts(num_experts=8, num_active=2, ffn_hidden_size=32)
)
GPT_OSS = dataclasses.replace(
    QWEN3, family="gpt_oss", qk_layernorm=False, linear_bias=True, has_sinks=True, activation="clamped_swiglu",
    norm_epsilon=1e-5, activation_clamp=7.0, sliding_window=32, full_layers=(1, 3), experts=Experts(8, 2, 128),
    rope=Rope(kind=RopeKind.YARN, factor=4.0, original_max_positions=64, truncate=False),
)  # fmt: skip
ERNIE = dataclasses.replace(QWEN3, family="ernie4_5", qk_layernorm=False, rope=Rope(interleaved=True))


def folder(path: Path, architecture: Architecture) -> str:
    """Write the config.json of an architecture to a folder, and return the folder's name."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(families.derive_config(architecture)))
    return str(path)


def keep_one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every command line read by one parser: it is the same for all, and takes a while to make."""
    listed = flags.list_flags()
    parser = command_line._make_parser(listed)
    monkeypatch.setattr(flags, "list_flags", lambda: listed)
    monkeypatch.setattr(command_line, "_make_parser", lambda _: parser)


def without(words: Sequence[str], flag: str) -> list[str]:
    """Return the words without a flag and its values."""
    if flag not in words:
        return [*words]
    at = words.index(flag)
    end = next((i for i in range(at + 1, len(words)) if words[i].startswith("--")), len(words))
    return [*words[:at], *words[end:]]


def parse(*words: str, world_size: int | None = None) -> config.Settings:
    """Return the settings, parsed as one of `world_size` ranks, or without a launcher."""
    with _ranks(world_size):
        return command_line.parse([word for text in words for word in text.split()])


def parse_run(*words: str, world_size: int | None = None) -> command_line.RunSettings:
    """Return the settings of a run that trains, parsed likewise."""
    with _ranks(world_size):
        return command_line.parse_run([word for text in words for word in text.split()])


@contextlib.contextmanager
def _ranks(world_size: int | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        if world_size is not None:
            patch.setenv("WORLD_SIZE", str(world_size))
        yield


def error(*words: str, world_size: int | None = None) -> str:
    """Return the text of the usage error that these words raise."""
    return "\n".join(_problems(parse, words, world_size))


def run_problems(*words: str, world_size: int | None = None) -> tuple[str, ...]:
    """Return all problems of these words as those of a run."""
    return _problems(parse_run, words, world_size)


def _problems(parser: Callable[..., object], words: Sequence[str], world_size: int | None) -> tuple[str, ...]:
    with pytest.raises(UsageError) as raised:
        parser(*words, world_size=world_size)
    assert raised.value.exit_code == ExitCode.USAGE
    return raised.value.problems
