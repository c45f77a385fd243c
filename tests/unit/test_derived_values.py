"""Values that follow from given flags: sizes, counts, defaults that are relied on."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_rl.algorithm.library import PRESETS
from megatron_rl.command_line import derive, describe, flags
from megatron_rl.flag import Kind, index_by_name
from tests.command_lines import CPU, DENSE, QWEN3, RUN, error, folder, parse, parse_run, without


def test_a_padded_vocabulary_is_the_multiple_that_pads_to_it() -> None:
    settings = parse(*DENSE, "--padded-vocab-size 256 --tensor-model-parallel-size 2")
    assert settings.model.make_vocab_size_divisible_by == 128


def test_a_folder_knows_the_longest_sequence_better_than_a_script(tmp_path: Path) -> None:
    words = [*CPU, "--hf-model", folder(tmp_path, QWEN3)]
    for length in (64, 4096):
        settings = parse(*words, f"--max-position-embeddings {length}")
        assert settings.architecture.max_position_embeddings == 256
        assert any(f"--max-position-embeddings {length} has no effect" in note for note in settings.notes)
    assert parse(*words, "--max-position-embeddings 256").notes == parse(*words).notes
    assert "--seq-length 4096 is above" in error(*words, "--max-position-embeddings 4096 --seq-length 4096")


def test_counts_of_responses_are_counts_of_iterations_and_of_updates(tmp_path: Path) -> None:
    words = [*CPU, "--hf-model", folder(tmp_path, QWEN3), *without(RUN, "--train-iters"), "--global-batch-size 64"]
    # 16 prompts of 8 responses are 128 responses an iteration, and two updates.
    settings = parse_run(*words, "--train-samples 1300 --lr-decay-samples 640 --lr-warmup-samples 128")
    assert settings.training.train_iters == 10
    assert (settings.schedule.lr_decay_iters, settings.schedule.lr_warmup_iters) == (10, 2)
    assert any("--train-samples 1300 makes --train-iters 10" in note for note in settings.notes)
    assert parse_run(*words, "--train-samples 1300 --train-iters 3").training.train_iters == 3


def test_prompt_and_response_have_half_of_the_length_each_where_nothing_says_more(tmp_path: Path) -> None:
    words = [
        *CPU,
        "--hf-model",
        folder(tmp_path, QWEN3),
        *without(without(RUN, "--rollout-max-tokens"), "--seq-length"),
    ]
    assert parse_run(*words, "--seq-length 128").sampling.max_tokens == 64
    assert parse_run(*words, "--rollout-max-tokens 50").training.seq_length == 100
    assert parse_run(*words, "--rollout-max-tokens 50 --max-prompt-tokens 20").training.seq_length == 70
    # No longer than the model's longest sequence.
    assert parse_run(*words, "--rollout-max-tokens 200").training.seq_length == 256


def test_a_budget_of_tokens_makes_micro_batches_as_large_as_it_lets_them_be(tmp_path: Path) -> None:
    words = [*CPU, "--hf-model", folder(tmp_path, QWEN3), *RUN]
    # A prompt has 64 tokens at most, and each response 64.
    for budget, size in ((127, 1), (128, 1), (320, 4), (600, 8), (1152, 16)):
        settings = parse_run(*words, f"--max-tokens-per-gpu {budget}")
        assert settings.training.micro_batch_size == size, budget
        assert settings.sizes.largest_micro_batch <= max(budget, 128)
    assert parse_run(*words, "--max-tokens-per-gpu 1152 --micro-batch-size 2").training.micro_batch_size == 2


def test_an_engine_is_started_for_each_core_where_ranks_are_on_all_and_it_is_worth_its_start(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(derive, "count_cores", lambda: 2)
    monkeypatch.setattr(derive, "_LEAST_PARAMETERS", 1000)
    words = [*CPU, "--hf-model", folder(tmp_path, QWEN3), *RUN]
    token = tmp_path / "token"
    token.write_text("a")
    token.chmod(0o600)
    for more, ranks, count in (
        ("", 2, 2),
        ("", 1, 1),
        ("--rollout-num-engines 1", 2, 1),
        ("--rollout-engine scripted", 2, 1),
        (f"--rollout-endpoint http://a:1 --rollout-token-file {token}", 2, 1),
        ("--rollout-tensor-parallel-size 2", 2, 1),
    ):
        settings = parse_run(*words, more, world_size=ranks)
        assert settings.rollout.num_engines == count, (more, ranks)
    monkeypatch.setattr(derive, "_LEAST_PARAMETERS", 1_000_000)
    # 8 iterations of 16 prompts, 8 responses to each of 64 tokens at most.
    sampled = 8 * 16 * 8 * 64
    for more, least, count in (("", sampled, 2), ("", sampled + 1, 1), ("--grpo-group-size 16", sampled + 1, 2)):
        monkeypatch.setattr(derive, "_LEAST_TOKENS", least)
        assert parse_run(*words, more, world_size=2).rollout.num_engines == count, (more, least)


@pytest.mark.parametrize("num_cores", [1, 2, 64])
def test_mistakes_in_the_flags_of_a_model_are_said_whatever_the_cores(num_cores: int, monkeypatch) -> None:
    monkeypatch.setattr(derive, "count_cores", lambda: num_cores)
    words = [word for text in DENSE for word in text.split() if word != "--swiglu"]
    assert "--swiglu is missing" in error(*words, "--yarn-beta-fast 8", world_size=2)
    assert "without --position-embedding-type yarn" in error(*words, "--yarn-beta-fast 8", world_size=2)


def test_groups_get_smaller_where_a_script_has_too_few_responses_for_whole_ones(tmp_path: Path) -> None:
    words = [*CPU, "--hf-model", folder(tmp_path, QWEN3), *without(RUN, "--grpo-prompts-per-step")]
    settings = parse_run(*words, "--global-batch-size 16", world_size=4)
    assert settings.algorithm.group_size == 4
    assert any("--grpo-group-size is 4, not 8" in note for note in settings.notes)
    assert parse_run(*words, "--global-batch-size 32", world_size=4).algorithm.group_size == 8


@pytest.mark.parametrize("name", PRESETS)
def test_the_name_of_an_algorithm_sets_its_parts(name, tmp_path) -> None:
    teacher = folder(tmp_path, dataclasses.replace(QWEN3, vocab_size=100))
    others = {"opd": f"--teacher {teacher}", "ppo": "--critic policy", "vapo": "--critic policy"}
    settings = parse(*DENSE, f"--algorithm {name}", others.get(name, ""))
    for field, value in PRESETS[name].settings.items():
        assert getattr(settings.algorithm, field) == value
        assert settings.sources[f"algorithm.{field}"] == f"--algorithm {name}"


def test_a_part_that_is_written_goes_before_the_algorithms() -> None:
    for words in ("--algorithm dapo --grpo-clamp-eps-upper 0.3", "--grpo-clamp-eps-upper 0.3 --algorithm dapo"):
        algorithm = parse(*DENSE, words).algorithm
        assert (algorithm.clamp_eps_lower, algorithm.clamp_eps_upper) == (0.2, 0.3)


@pytest.mark.parametrize(
    ("words", "deciding"),
    [
        ("--reward exact", []),
        ("--reward exact length:9,3", ["exact"]),
        ("--reward exact length:9,3 --grpo-filter-by length", ["length"]),
        ("--reward exact length:9,3 --grpo-filter-by sum", []),
        (f"--reward exact --rollout-env {__file__}:Game --grpo-filter-by environment", ["environment"]),
        (f"--reward exact --rollout-agent {__file__}:act --grpo-filter-by style", ["style"]),
        ("--reward exact length:9,3 --grpo-advantage gdpo", ["exact", "length"]),
        ("--reward exact length:9,3=0 --grpo-advantage gdpo", ["exact"]),
    ],
)
def test_the_rewards_that_decide_a_signal_are_named_or_follow_from_all_rewards(words, deciding, tmp_path) -> None:
    run = [*CPU, "--hf-model", folder(tmp_path, QWEN3), *without(RUN, "--reward")]
    settings = parse_run(*run, "--grpo-filter-groups-with-same-reward", words)
    assert settings.sizes.plan.deciding_rewards == deciding
    is_chosen = words == "--reward exact length:9,3"
    notes = [note for note in settings.notes if "compares exact, the first of --reward" in note]
    assert len(notes) == is_chosen
    assert parse_run(*run, words.partition("--grpo-filter-by")[0]).sizes.plan.deciding_rewards == []


def test_defaults_that_are_not_megatrons_are_counted_and_listed_with_verbose() -> None:
    (counted,) = [note for note in parse(*DENSE).notes if "Megatron's scripts" in note]
    (listed,) = [note for note in parse(*DENSE, "--verbose").notes if "Megatron's scripts" in note]
    names = re.findall(r"(--[\w-]+) \(", listed.partition(": ")[2])
    assert "--hidden-dropout" in names
    assert f"scripts: {len(names)} (--verbose lists them)" in counted
    assert not any(name in counted for name in names)
    # A value that a flag gives is not a default.
    (fewer,) = [note for note in parse(*DENSE, "--grpo-kl-beta 0").notes if "Megatron's scripts" in note]
    assert f"scripts: {len(names) - 1} " in fewer


def test_the_page_says_which_defaults_hold_here() -> None:
    by_name = index_by_name(flags.list_flags())
    for name, (own, theirs) in flags.find_other_defaults().items():
        assert own != theirs
        if by_name[name].kind is Kind.USED and by_name[name].default is not None:
            assert describe.format_value(by_name[name].default) == own, name


@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_a_configuration_is_printed_for_a_platform_that_is_not_here(platform: str, tmp_path: Path) -> None:
    words = ["--hf-model", folder(tmp_path, QWEN3), *RUN, "--platform", platform, "--print-config"]
    settings = parse_run(*words)
    assert settings.platform == platform
    assert any(f"the platform {platform} is not on this machine" in note for note in settings.notes)
    assert describe.print_config(settings).startswith(f"platform = {platform}")
