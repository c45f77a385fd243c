"""Flags that divide an iteration, and those that cannot: each is one error, with the flag and a remedy."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.command_line import file_checks
from megatron_rl.command_line.run import compute_sizes, find_run_folder, find_shared_folder
from megatron_rl.config.settings import DraftSettings, ModelConfig, Settings, Subjects, TrainingConfig
from megatron_rl.errors import UsageError
from megatron_rl.types import Architecture

ARCHITECTURE = Architecture(
    family="llama", num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, num_query_groups=4,
    kv_channels=16, vocab_size=100, max_position_embeddings=128,
)  # fmt: skip

DIVIDED = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "microbatch_group_size_per_vp_stage": None,
}


def settings(transformer: dict[str, Any] | None = None, lr: float | None = 1e-6, **changes: Any) -> Settings:
    """Build settings of a valid run; a change names subject and field, as algorithm__group_size."""
    made = Subjects(
        model=ModelConfig(hf_model=Path("model")),
        training=TrainingConfig(train_iters=1, seq_length=128, micro_batch_size=8),
    )
    made = _with(made, {"algorithm__prompts_per_step": 8, "sampling__max_tokens": 32, **changes})
    config = SimpleNamespace(**DIVIDED | (transformer or {}))
    return Settings(
        **vars(made), platform="cpu", world_size=None, architecture=ARCHITECTURE,
        transformer=config, optimizer=SimpleNamespace(lr=lr), ddp=None, sources={},
    )  # fmt: skip


def _with(made: Subjects, changes: dict[str, Any]) -> Subjects:
    for name, value in changes.items():
        subject, _, field = name.partition("__")
        part = dataclasses.replace(getattr(made, subject), **{field: value})
        made = dataclasses.replace(made, **{subject: part})
    return made


def test_a_batch_of_all_samples_makes_one_update():
    sizes = compute_sizes(settings(training__global_batch_size=64), 2)
    assert (sizes.plan.num_updates, sizes.division.slots_per_replica) == (1, 4)


def test_a_smaller_batch_makes_several_updates_of_an_iteration():
    sizes = compute_sizes(settings(training__global_batch_size=16), 2)
    assert (sizes.plan.num_updates, sizes.division.slots_per_update) == (4, 1)


@pytest.mark.parametrize("changes", [{"algorithm__kl_beta": 0.1}, {"training__global_batch_size": 16}])
def test_a_reference_or_an_old_policy_may_lie_in_the_hosts_memory(changes):
    assert compute_sizes(settings(loop__frozen_offload=True, **changes), 2).plan.num_prompts == 8


def test_without_prompts_per_step_the_batch_size_gives_their_number():
    changes = {"algorithm__prompts_per_step": None, "training__global_batch_size": 32}
    assert compute_sizes(settings(**changes), 1).plan.num_prompts == 4


@pytest.mark.parametrize(("micro_batch", "expected"), [(8, 96 + 8 * 32), (16, 2 * (96 + 8 * 32)), (2, 96 + 2 * 32)])
def test_the_largest_micro_batch_is_known_before_the_run(micro_batch, expected):
    assert compute_sizes(settings(training__micro_batch_size=micro_batch), 1).largest_micro_batch == expected


def test_without_sharing_the_largest_micro_batch_counts_each_copy_of_a_prompt() -> None:
    changes = {"training__micro_batch_size": 16, "attention__is_shared": False}
    assert compute_sizes(settings(**changes), 1).largest_micro_batch == 16 * (96 + 32)


def test_the_largest_micro_batch_counts_its_padding() -> None:
    divided = {"tensor_model_parallel_size": 4, "context_parallel_size": 3}
    assert compute_sizes(settings(), 1).largest_micro_batch == 352
    assert compute_sizes(settings(divided), 1).largest_micro_batch == 354
    assert compute_sizes(settings(divided | {"sequence_parallel": True}), 1).largest_micro_batch == 360


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__seq_length": None}, "--seq-length is missing"),
        ({"sampling__max_tokens": None}, "--rollout-max-tokens is missing"),
        ({"sampling__max_tokens": 128}, "--rollout-max-tokens 128"),
        ({"training__global_batch_size": 24}, "--global-batch-size 24 does not divide"),
        ({"training__global_batch_size": 4}, "--global-batch-size 4 does not divide"),
        ({"training__micro_batch_size": 12}, "--micro-batch-size 12 is neither"),
        ({"algorithm__prompts_per_step": 7}, "--grpo-prompts-per-step"),
        ({"loop__max_tokens_per_microbatch": 300}, "--max-tokens-per-microbatch 300.*352"),
        ({"sampling__temperature": float("nan")}, "--rollout-temperature nan"),
        ({"evaluation__temperature": -1.0}, "--eval-temperature -1"),
        ({"evaluation__num_samples": 4}, "--eval-num-samples 4 at --eval-temperature 0"),
        ({"algorithm__ref_model": Path("reference")}, "--grpo-ref-model reference needs a reference.*--grpo-kl-beta"),
        (
            {"algorithm__kl_beta": 0.1, "algorithm__ref_model": Path("nowhere")},
            "--grpo-ref-model nowhere must be a folder",
        ),
        ({"schedule__lr_warmup_iters": 1}, "--lr-warmup-iters 1 must be below the 1 updates of the decay"),
        (
            {"schedule__lr_warmup_iters": 4, "training__global_batch_size": 16},
            "--lr-warmup-iters 4 must be below the 4 updates",
        ),
        (
            {"schedule__lr_decay_style": "WSD", "schedule__lr_wsd_decay_iters": 2},
            "--lr-wsd-decay-iters 2 must be at most the 1 updates",
        ),
        (
            {"loop__frozen_offload": True, "loop__tri_model": "separate", "training__global_batch_size": 16},
            "--frozen-offload has no model",
        ),
    ],
)
def test_sizes_that_cannot_be_are_one_error_with_its_flag(changes, message):
    with pytest.raises(UsageError, match=message):
        compute_sizes(settings(**changes), 2)


def test_micro_batches_that_do_not_fill_an_interleaved_schedule_are_an_error_before_it_runs():
    divided = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    made = settings(divided, training__micro_batch_size=16)
    assert compute_sizes(made, 2).division.slots_per_update == 2
    with pytest.raises(UsageError, match="1 micro-batches an update do not fill"):
        compute_sizes(made, 4)


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("rollout__folder", "--rollout-folder"),
        ("publish__folder", "--publish-folder"),
        ("checkpoint__save", "--save"),
        ("checkpoint__save_hf", "--save-hf"),
    ],
)
def test_a_folder_that_cannot_be_made_is_one_problem_with_its_flag(field, flag, tmp_path):
    def problems(folder):
        return [
            text for text in file_checks.find_problems(settings(**{field: folder})) if not text.startswith("--prompts")
        ]

    assert problems(tmp_path / "new" / "run") == []
    (tmp_path / "file").write_text("")
    for folder, problem in ((tmp_path / "file" / "run", "file is not a folder"), (tmp_path / ("a" * 300), "too long")):
        (text,) = problems(folder)
        assert text.startswith(f"{flag} {folder} cannot be made or written: ")
        assert problem in text
        assert text.endswith(": write another folder")


def test_a_disk_that_is_full_is_said_with_the_folder_on_it_and_what_to_do(tmp_path, monkeypatch):
    full = os.statvfs_result((*os.statvfs(tmp_path)[:4], 0, *os.statvfs(tmp_path)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    said = [*file_checks.find_problems(settings(rollout__folder=tmp_path / "run"))]
    assert said[-1] == (
        f"--rollout-folder {tmp_path}/run cannot be made or written: the disk of {tmp_path} is full: make room there, "
        "or write another folder"
    )


def test_a_run_has_the_name_of_its_folder_or_of_where_it_is_saved():
    assert find_run_folder(settings(checkpoint__save=Path("runs/first"))).name == "first"
    assert find_run_folder(settings(rollout__folder=Path("here/second"))).name == "second"
    with pytest.raises(UsageError, match="--rollout-folder is missing"):
        find_run_folder(settings())


def test_runs_of_one_name_in_two_places_hand_their_weights_over_in_two_places(tmp_path):
    folders = {
        find_shared_folder(settings(rollout__folder=tmp_path / place / "run", publish__folder=tmp_path))
        for place in "ab"
    }
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path}


def test_settings_are_made_only_of_a_draft_with_an_architecture():
    draft = DraftSettings(
        platform="cpu", world_size=1, architecture=None, transformer=None, optimizer=None, ddp=None, sources={}
    )
    with pytest.raises(AssertionError):
        Settings.accept(draft)
    architecture = settings().architecture
    accepted = Settings.accept(dataclasses.replace(draft, architecture=architecture))
    assert type(accepted) is Settings
    assert accepted.architecture is architecture
