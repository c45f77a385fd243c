"""Launch scripts of Megatron-LM, slime, Pai-Megatron-Patch and MindSpeed-LLM start as they are, or give a reason."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_rl.errors import UsageError
from tests.command_lines import CPU, keep_one_parser, parse_run
from tests.launch_scripts import Block, read_blocks, read_models

BLOCKS = read_blocks()


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


def problems_of(block: Block, folder: Path, words: Sequence[str] = CPU) -> tuple[str, ...]:
    try:
        parse_run(*words, *block.complete(folder), world_size=block.ranks)
    except UsageError as error:
        return error.problems
    return ()


def test_a_block_parses_as_it_is_or_is_refused_for_the_reasons_that_it_lists(tmp_path: Path) -> None:
    wrong = {}
    for block in BLOCKS:
        problems = problems_of(block, tmp_path / block.model)
        unlisted = [problem for problem in problems if not problem.startswith(block.refused or ("\0",))]
        idle = [text for text in block.refused if not any(problem.startswith(text) for problem in problems)]
        if unlisted or idle:
            wrong[block.name] = unlisted + [f"no longer refused: {text}" for text in idle]
    assert wrong == {}


@pytest.mark.parametrize(("platform", "repositories"), [("npu", ["Ascend/MindSpeed-LLM"]), ("cuda", ["THUDM/slime"])])
def test_a_block_is_shown_for_the_platform_it_was_written_for_where_that_is_not_there(
    platform: str, repositories: Sequence[str], tmp_path: Path
) -> None:
    words = ("--platform", platform, "--print-config")
    wrong = {
        block.name: problems
        for block in BLOCKS
        if block.repository in repositories and not block.refused
        and (problems := problems_of(block, tmp_path / block.model, words))
    }  # fmt: skip
    assert wrong == {}


def test_each_project_and_family_has_blocks_and_most_parse() -> None:
    assert len(BLOCKS) >= 60
    assert len({block.repository for block in BLOCKS}) == 4
    families = {read_models()[block.model]["model_type"] for block in BLOCKS}
    assert families == {
        "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "kimi_k2",
        "glm4_moe_lite", "minimax_m2", "gpt_oss", "qwen3_next",
    }  # fmt: skip
    assert sum(not block.refused for block in BLOCKS) >= 55


def test_every_flag_that_a_block_does_not_get_is_named(tmp_path: Path) -> None:
    """Check that every flag of a block is honoured, or named in a note."""
    block = next(block for block in BLOCKS if block.path == "scripts/run-qwen3-4B.sh")
    settings = parse_run(*CPU, *block.complete(tmp_path), world_size=block.ranks)
    said = "\n".join(settings.notes)
    for words in ("--rollout-batch-size 32 is taken as --grpo-prompts-per-step 32", "--colocate", "--balance-data"):
        assert words in said
    assert "--hf-checkpoint /root/Qwen3-4B is overruled by --hf-model" in said
    assert (settings.algorithm.prompts_per_step, settings.algorithm.group_size) == (32, 8)
    assert (settings.sampling.max_tokens, settings.training.train_iters) == (8192, 3000)
    assert (settings.algorithm.clamp_eps_lower, settings.algorithm.clamp_eps_upper) == (0.2, 0.28)
    assert settings.transformer.bf16
    assert settings.optimizer.use_distributed_optimizer
