"""The message of an interrupt about a run's checkpoints."""

import types
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.settings import CheckpointConfig
from megatron_rl.trainer.loop.saver import Saver


def describe(num_done: int, loaded: tuple[int, Path] | None = None, **config: Any) -> str:
    saver = object.__new__(Saver)
    saver._settings = types.SimpleNamespace(checkpoint=CheckpointConfig(**config))  # type: ignore[assignment]
    saver._num_done, saver._loaded = num_done, loaded
    return saver.describe_loss()


@pytest.fixture
def save(tmp_path: Path) -> Path:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("4")
    return tmp_path


def test_the_same_command_resumes_from_the_newest_checkpoint_of_the_folder_that_it_loads(save: Path) -> None:
    assert describe(6, save=save, load=save) == (
        f"the newest checkpoint is {save}/iter_0000004, of iteration 4; 2 finished iterations after it are lost, and "
        "the same command resumes from it"
    )
    assert "0 finished iterations after it are lost" in describe(4, save=save, load=save)


@pytest.mark.parametrize("changes", [{"load": None}, {"finetune": True}, {"ckpt_step": 2}])
def test_a_command_that_would_load_something_else_is_told_what_to_write(save: Path, changes: dict[str, Any]) -> None:
    said = describe(5, **{"save": save, "load": save, **changes})
    assert said.endswith(
        f"1 finished iteration after it is lost, and --load {save} without --finetune and --ckpt-step resumes from it"
    )


def test_before_the_first_save_a_run_resumes_from_what_it_loaded_or_begins_again(tmp_path: Path) -> None:
    loaded = (3, tmp_path / "iter_0000003")
    assert describe(4, loaded, save=tmp_path / "new", load=tmp_path) == (
        f"the newest checkpoint is {loaded[1]}, of iteration 3; 1 finished iteration after it is lost, and the same "
        "command resumes from it"
    )
    assert describe(2, save=tmp_path) == (
        "no checkpoint exists; 2 finished iterations are lost, and the same command begins again"
    )
    assert describe(2).endswith("the same command begins again; --save keeps checkpoints")
