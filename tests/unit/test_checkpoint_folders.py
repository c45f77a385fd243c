"""A save that is killed at any step leaves the checkpoint before it.

Old ones are removed, except those that are kept.
"""

import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.errors import InputError
from megatron_rl.trainer.mcore.checkpoint import folders


class Killed(BaseException):
    """A stand-in for a signal that no code sees."""


def save(
    folder: Path,
    iteration: int,
    keep_last: int | None = None,
    retain_interval: int | None = None,
    loaded: int | None = None,
) -> None:
    staged = folders.stage(folder, iteration, loaded)
    (staged / "__0_0.distcp").write_text(str(iteration))
    (staged / "metadata.json").write_text("{}")
    folders.put_in_place(staged, folder, iteration, loaded)
    folders.prune(folder, iteration, keep_last, retain_interval)


def content(folder: Path) -> str:
    iteration, source = folders.find(folder)
    assert (source / "__0_0.distcp").read_text() == str(iteration)
    return str(iteration)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_a_save_that_is_killed_at_any_step_leaves_a_whole_checkpoint_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rolled_back: bool
) -> None:
    loaded = 2 if is_rolled_back else None
    steps = 0
    for kill_at in range(100):
        folder = tmp_path / str(kill_at)
        save(folder, 1)
        save(folder, 2)
        if is_rolled_back:
            save(folder, 3)
        count = 0

        def step(original, kill_at=kill_at):
            def counted(*arguments, **keywords):
                nonlocal count
                if count == kill_at:
                    raise Killed
                count += 1
                return original(*arguments, **keywords)

            return counted

        with monkeypatch.context() as patch:
            for owner, name in (
                *((Path, name) for name in ("mkdir", "rename", "replace", "write_text")),
                (shutil, "rmtree"),
                (os, "fsync"),
            ):
                patch.setattr(owner, name, step(getattr(owner, name)))
            try:
                save(folder, 3, keep_last=1, loaded=loaded)
                is_killed = False
            except Killed:
                is_killed = True
        steps += is_killed
        assert content(folder) in ("2", "3")
        if content(folder) == "2":
            save(folder, 3, keep_last=1, loaded=loaded)
        save(folder, 4, keep_last=1, loaded=loaded)
        assert names(folder) == ["iter_0000004", folders.TRACKER]
        if not is_killed:
            break
    assert steps > 8


def test_the_last_checkpoints_and_those_at_the_interval_are_kept(tmp_path: Path) -> None:
    for iteration in range(1, 7):
        save(tmp_path / "last", iteration, keep_last=2)
        save(tmp_path / "interval", iteration, keep_last=1, retain_interval=4)
        save(tmp_path / "interval alone", iteration, retain_interval=3)
        save(tmp_path / "all", iteration)
    tracker = folders.TRACKER
    assert names(tmp_path / "last") == ["iter_0000005", "iter_0000006", tracker]
    assert names(tmp_path / "interval") == ["iter_0000004", "iter_0000006", tracker]
    assert names(tmp_path / "interval alone") == ["iter_0000003", "iter_0000006", tracker]
    assert len(names(tmp_path / "all")) == 7


def test_only_a_checkpoint_of_an_abandoned_run_is_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(InputError, match="iter_0000001 exists already: choose another --save"):
        folders.stage(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / folders.TRACKER).write_text("1")
    save(tmp_path, 2)
    assert content(tmp_path) == "2"


def test_a_run_that_resumed_from_an_earlier_checkpoint_replaces_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    abandoned = folders.iteration_folder(tmp_path, 2) / "abandoned"
    abandoned.touch()
    for loaded in (None, 0, 2):
        with pytest.raises(InputError, match="iter_0000002 exists already: choose another --save"):
            folders.stage(tmp_path, 2, loaded)
    assert abandoned.exists()
    save(tmp_path, 2, loaded=1)
    assert content(tmp_path) == "2"
    assert not abandoned.exists()


def test_two_saves_of_an_iteration_never_write_to_one_folder(tmp_path: Path) -> None:
    assert folders.stage(tmp_path, 1) != folders.stage(tmp_path, 1)
