"""--stage sft: its flags, and the values that follow from them."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import pytest

from megatron_rl.command_line.checks import list_others
from megatron_rl.config.settings import CheckpointConfig, Subjects
from megatron_rl.errors import ForeignVersion, InputError
from megatron_rl.flag import Flag, IntegerOr, derive_flags
from megatron_rl.trainer.loop import saver
from megatron_rl.trainer.loop.inputs import check_loaded_stage
from megatron_rl.trainer.mcore.checkpoint import serialization
from tests.command_lines import (
    CPU,
    DENSE,
    PROMPTS,
    QWEN3,
    error,
    folder,
    keep_one_parser,
    parse_run,
    run_problems,
    without,
)

# The fields that --stage sft reads of the subjects that it does not read wholly.
READ = {
    "rollout.folder", "publish.dtype", "attention.backend", "attention.blocks",
    "data.prompts", "data.eval_prompts", "data.held_out",
    "data.prompt_key", "data.completion_key", "data.messages_key", "data.chat", "data.system_message", "data.shuffle",
    "loop.max_tokens_per_microbatch", "loop.exit_interval", "loop.exit_minutes", "loop.grace_seconds",
    "evaluation.interval", "evaluation.num_prompts", "observe.log_interval", "observe.progress", "observe.verbose",
    "observe.trace",
    "observe.tensorboard_dir", "observe.wandb_project", "observe.wandb_exp_name", "observe.wandb_save_dir",
    "observe.wandb_entity",
}  # fmt: skip
READ_WHOLLY = ("run", "model", "training", "schedule", "checkpoint", "distributed", "lora")
RUN = (
    *PROMPTS,
    *["--stage", "sft", "--lr", "1e-6", "--train-iters", "8", "--seq-length", "128", "--global-batch-size", "16"],
    *["--micro-batch-size", "2", "--rollout-folder", "run"],
)
ANOTHER = {int: "3", float: "3", str: "3", Path: "there"}


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_one_parser(monkeypatch)


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    return [*CPU, "--hf-model", folder(tmp_path, QWEN3), *RUN]


WITHIN_ONE = ("between 0 and 1", "above 0 and below 1", "at least 0 and below 1")


def own_flags() -> dict[str, Flag]:
    """Return the flags by their fields."""
    flags = [flag for subject, config in get_type_hints(Subjects).items() for flag in derive_flags(config, subject)]
    return {flag.targets[0]: flag for flag in flags}


def words_of(flag: Flag) -> str:
    """Return the flag with another value than its default."""
    if flag.is_switch:
        return flag.name
    if flag.choices:
        return f"{flag.name} {next(choice for choice in flag.choices if choice != flag.default)}"
    kind = int if isinstance(flag.convert, IntegerOr) else flag.convert
    return f"{flag.name} {0.25 if flag.bound in WITHIN_ONE else ANOTHER[kind]}"


def test_every_flag_is_read_by_the_stage_or_refused_with_it():
    refused = {*list_others()["sft"]}
    rest = {target for target in own_flags() if target.partition(".")[0] not in READ_WHOLLY}
    assert refused.isdisjoint(READ)
    assert refused | READ == rest


def test_every_flag_of_the_other_stage_is_an_error_that_names_it():
    flags = own_flags()
    assert len(list_others()["sft"]) > 60
    for stage, targets in list_others().items():
        for target in targets:
            words = words_of(flags[target])
            assert f"{words} needs --stage " in error(*DENSE, f"--stage {stage}", words), target


def test_a_run_of_demonstrations_wants_neither_prompts_per_step_nor_a_reward(base):
    settings = parse_run(*base, world_size=4)
    assert settings.sidecar is None
    assert settings.num_updates == 8
    assert settings.sizes.division.slots_per_update == 2
    assert settings.sizes.largest_micro_batch == 2 * 128
    assert not any("--grpo-group-size" in note or "--rollout" in note for note in settings.notes)


def test_all_that_a_run_of_demonstrations_lacks_is_said_at_once(base):
    words = base
    for flag in ("--lr", "--train-iters", "--seq-length", "--global-batch-size", "--rollout-folder"):
        words = without(words, flag)
    found = run_problems(*words, "--reward", "exact")
    assert [problem.partition(":")[0] for problem in found] == [
        "--reward exact needs --stage grpo, which samples responses", "--train-iters is missing", "--lr is missing",
        "--global-batch-size is missing", "--seq-length is missing", "--rollout-folder is missing",
    ]  # fmt: skip


@pytest.mark.parametrize(("words", "world_size", "said"), [
    ("", 3, "--global-batch-size 16 is not a multiple of --micro-batch-size 2 times 3 replicas: write a multiple of 6"),
    ("--lr-warmup-iters 8", 1, "--lr-warmup-iters 8 must be below the 8 updates of the decay: write fewer"),
    ("--max-tokens-per-microbatch 200", 1, "can have 256 tokens: lower it, or --seq-length"),
    ("--seq-length 300", 1, "--seq-length 300 is above the model's longest sequence, 256"),
    (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 16", 2,
        "1 micro-batches a replica do not fill the interleaved schedule of 2 stages",
    ),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_an_error_said_once(base, words, world_size, said):
    (problem,) = run_problems(*base, words, world_size=world_size)
    assert said in problem


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Make a checkpoint; return its settings, and the dictionary of what it keeps of its run."""
    kept = {field.name: None for field in dataclasses.fields(saver.KeptState)}
    monkeypatch.setattr(serialization, "read_common", lambda source: {"megatron_rl": kept})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "iter_0000003" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return CheckpointConfig(load=tmp_path), kept


@pytest.mark.parametrize(("saved", "own", "is_refused"), [
    ("sft", "grpo", True), ("grpo", "sft", True), ("sft", "sft", False), ("grpo", "grpo", False),
    ("sft", "dpo", True), ("dpo", "grpo", True), ("dpo", "dpo", False),
])  # fmt: skip
def test_a_checkpoint_of_the_other_stage_is_refused_unless_weights_alone_are_wanted(saved, own, is_refused, checkpoint):
    config, kept = checkpoint
    kept["stage"] = saved
    run = SimpleNamespace(stage=own)
    check_loaded_stage(SimpleNamespace(run=run, checkpoint=dataclasses.replace(config, finetune=True)))
    settings = SimpleNamespace(run=run, checkpoint=config)
    if not is_refused:
        check_loaded_stage(settings)
        return
    with pytest.raises(InputError, match=f"iter_0000003 was saved by --stage {saved}, and this run is --stage {own}"):
        check_loaded_stage(settings)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(saver.KeptState)])
def test_a_checkpoint_of_another_version_is_refused_unless_weights_alone_are_wanted(name, checkpoint):
    config, kept = checkpoint
    kept["stage"] = "sft"
    del kept[name]
    run = SimpleNamespace(stage="sft")
    check_loaded_stage(SimpleNamespace(run=run, checkpoint=dataclasses.replace(config, finetune=True)))
    with pytest.raises(ForeignVersion, match=f"iter_0000003 was written by another .* run's {name}.* --finetune"):
        check_loaded_stage(SimpleNamespace(run=run, checkpoint=config))


def test_micro_batches_are_made_as_large_as_a_budget_of_tokens_allows(base):
    words = without(base, "--micro-batch-size")
    assert parse_run(*words, "--max-tokens-per-gpu 600", world_size=2).sizes.plan.micro_batch_size == 4


def test_counts_of_samples_are_demonstrations(base):
    words = without(base, "--train-iters")
    assert parse_run(*words, "--train-samples 320").training.train_iters == 20
