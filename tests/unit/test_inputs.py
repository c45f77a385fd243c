"""Inputs of a run that are refused before a sidecar starts."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.config.trainer import CheckpointConfig
from megatron_rl.environments import pool
from megatron_rl.environments.types import Description
from megatron_rl.errors import InputError, UsageError
from megatron_rl.trainer.loop import inputs
from megatron_rl.trainer.loop import run as loop_run
from megatron_rl.trainer.loop.inputs import check_save_folder
from tests import chat_models
from tests.command_lines import QWEN3, RUN, folder, parse_run, without


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Write a folder with the checkpoints of two iterations."""
    folder = tmp_path / "saved"
    for iteration in (3, 5):
        (folder / f"iter_{iteration:07d}").mkdir(parents=True)
        (folder / f"iter_{iteration:07d}" / "metadata.json").write_text("{}")
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def check(**fields: object) -> None:
    check_save_folder(SimpleNamespace(checkpoint=CheckpointConfig(**fields)))


def test_a_run_saves_to_an_empty_folder_or_to_the_one_that_it_resumes_from(saved: Path, tmp_path: Path) -> None:
    check()
    check(save=tmp_path / "new")
    check(save=tmp_path / "new", load=saved, finetune=True)
    check(save=tmp_path / "new", load=tmp_path / "new")
    check(save=saved, load=saved / ".." / "saved")
    # Newer checkpoints of the same run may be replaced.
    check(save=saved, load=saved, ckpt_step=3)


@pytest.mark.parametrize("load", [None, "another"])
def test_checkpoints_that_the_run_does_not_resume_from_are_not_mixed_with_its_own(load, saved, tmp_path) -> None:
    with pytest.raises(InputError, match=f"--save {saved} holds checkpoints already: add --load {saved} to resume"):
        check(save=saved, load=None if load is None else tmp_path / load)


def test_a_run_that_begins_again_does_not_save_beside_newer_checkpoints(saved: Path) -> None:
    with pytest.raises(InputError, match="up to iteration 5, and this run begins at iteration 0 with .*: choose anoth"):
        check(save=saved, load=saved, finetune=True)


def test_no_sidecar_is_started_for_a_run_that_may_not_save(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(loop_run, "OwnSidecar", lambda settings, module: started.append(settings))
    monkeypatch.setattr(inputs, "read_prompts", lambda config: None)
    monkeypatch.setattr(inputs, "_check_weights", lambda settings: None)
    settings = SimpleNamespace(
        run=SimpleNamespace(stage="grpo"),
        data=None,
        checkpoint=CheckpointConfig(save=saved),
        observe=SimpleNamespace(progress="none"),
        sidecar=SimpleNamespace(rollout=SimpleNamespace(is_colocated=False, takes_turns=False)),
    )
    with contextlib.ExitStack() as stack, pytest.raises(InputError, match="holds checkpoints already"):
        loop_run._prepare(settings, SimpleNamespace(), stack)
    assert started == []


@pytest.mark.parametrize(
    ("offered", "said"),
    [
        (
            Description("Sums", True, tools=({"function": {"name": "add"}},)),
            r"Sums has tools \(add\), and --rollout-tool-parser is missing: write hermes",
        ),
        (Description("Sums", False), "Sums has no method get_reward: add it, or write --reward"),
    ],
)
def test_no_sidecar_is_started_for_an_environment_that_it_would_refuse(
    offered: Description, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums.py").write_text("class Sums: ...")
    model = folder(chat_models.save_tokenizer(tmp_path, chat_models.HERMES, "<|im_end|>"), QWEN3)
    words = ("--platform", "cpu", "--hf-model", model, *without(RUN, "--reward"))
    settings = parse_run(*words, "--rollout-env", f"{tmp_path / 'sums.py'}:Sums", world_size=1)
    started: list[object] = []
    monkeypatch.setattr(loop_run, "OwnSidecar", lambda settings, module: started.append(settings))
    monkeypatch.setattr(inputs, "_check_weights", lambda settings: None)
    monkeypatch.setattr(pool, "describe_environment", lambda config, processes: offered)
    startup = SimpleNamespace(show=lambda stream: None)
    with contextlib.ExitStack() as stack, pytest.raises(UsageError, match=said):
        loop_run._prepare(settings, startup, stack)
    assert started == []
