"""The folders of checkpoints, and the order in which files appear and vanish: the named checkpoint is always complete.

Invariants, at every moment at which a writer may be killed:
- `latest_checkpointed_iteration.txt` names a complete checkpoint, or does not exist;
- a folder that is being written or removed has a name that starts with a dot, unlike any checkpoint's;
- no two saves write to the same folder, even if a writer outlives the run that started it.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

from megatron_rl.errors import InputError, find_no_room

TRACKER = "latest_checkpointed_iteration.txt"
_ITERATION = re.compile(r"iter_(\d{7,})")
_UNFINISHED = re.compile(r"\.iter_\d{7,}(\.[0-9a-f]+)?\.(partial|removed)")


def find(folder: Path, iteration: int | None = None) -> tuple[int, Path]:
    """Return the iteration, and the folder with the shards, of the newest or the given iteration's checkpoint."""
    if (folder / "metadata.json").exists():
        return 0, folder
    tracker = folder / TRACKER
    if iteration is None:
        if not tracker.exists():
            raise InputError(f"{folder} holds no checkpoint: it has neither {TRACKER} nor metadata.json")
        text = tracker.read_text().strip()
        if text == "release":
            return 0, _check_complete(folder / "release")
        if not text.isdigit():
            raise InputError(
                f"{tracker} must hold a number or `release`, not {text!r}: name an iteration with --ckpt-step"
            )
        iteration = int(text)
    return iteration, _check_complete(iteration_folder(folder, iteration))


def find_named(folder: Path | None, iteration: int | None) -> tuple[int, Path] | None:
    """Return the same for the folder of --load; None if there is none, or if it is empty and no iteration is given."""
    if folder is None or (iteration is None and not holds_checkpoint(folder)):
        return None
    return find(folder, iteration)


def holds_checkpoint(folder: Path) -> bool:
    """Check whether `find` would find a checkpoint without a given iteration."""
    return (folder / TRACKER).exists() or (folder / "metadata.json").exists()


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Return the folder of an iteration, by Megatron's name."""
    return folder / f"iter_{iteration:07d}"


def latest_iteration(folder: Path) -> int | None:
    """Return the newest checkpoint's iteration, if the tracker names one."""
    tracker = folder / TRACKER
    text = tracker.read_text().strip() if tracker.exists() else ""
    return int(text) if text.isdigit() else None


def check_own(save: Path | None, load: Path | None) -> None:
    """Raise an InputError if `save` holds checkpoints and is not the folder that the run resumes from."""
    if save is None or not (save / TRACKER).exists():
        return
    if load is None or load.resolve() != save.resolve():
        raise InputError(
            f"--save {save} holds checkpoints already: add --load {save} to resume from them, or choose another folder"
        )


def find_resumed(save: Path | None, version: int, source: Path) -> int | None:
    """Return the version if it is loaded from the folder `save`, where newer checkpoints may then be replaced.

    Raise an InputError if the folder has newer checkpoints and the version comes from elsewhere.
    """
    if save is None:
        return None
    if source.resolve() == iteration_folder(save, version).resolve():
        return version
    newest = latest_iteration(save)
    if newest is not None and newest > version:
        raise InputError(
            f"--save {save} holds checkpoints up to iteration {newest}, and this run begins at iteration {version} "
            f"with {source}: choose another --save"
        )
    return None


def stage(folder: Path, iteration: int, loaded: int | None = None) -> Path:
    """Make an empty folder to write to, after removing the remains of killed runs.

    `loaded` is the iteration in this folder that the run resumed from.
    """
    target = iteration_folder(folder, iteration)
    _check_replaceable(folder, iteration, loaded)
    staged = folder / f".{target.name}.{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        staged.mkdir()
    except OSError as error:
        raise find_no_room(error, staged) or InputError(f"{staged} cannot be created: {error}") from None
    return staged


def put_in_place(staged: Path, folder: Path, iteration: int, loaded: int | None = None) -> Path:
    """Make the written checkpoint the newest; until the last step, the previous one stays the newest.

    A folder of that iteration that is not the newest is replaced: a run left it that was killed here, or that resumed
    from an earlier iteration. The newest itself is replaced only if this run resumed from an earlier one, which is the
    newest meanwhile.
    """
    target = iteration_folder(folder, iteration)
    _check_replaceable(folder, iteration, loaded)
    try:
        for path in (*staged.rglob("*"), staged):
            _make_durable(path)
        if target.exists():
            if loaded is not None and latest_iteration(folder) == iteration:
                _name_latest(folder, loaded)
            _remove(target)
        staged.rename(target)
        _name_latest(folder, iteration)
    except OSError as error:
        raise find_no_room(error, target) or InputError(f"{target} cannot be finished: {error}") from None
    return target


def prune(folder: Path, latest: int, keep_last: int | None, retain_interval: int | None) -> list[int]:
    """Remove checkpoints up to `latest`, except the last ones and those at multiples of the interval.

    With an interval and no number to keep, only the newest is kept besides the multiples, as in Megatron.
    """
    if keep_last is None and retain_interval is None:
        return []
    found = sorted(
        int(match[1]) for path in folder.iterdir() if (match := _ITERATION.fullmatch(path.name)) and path.is_dir()
    )
    old = [iteration for iteration in found if iteration <= latest][: -(keep_last or 1)]
    removed = [iteration for iteration in old if not retain_interval or iteration % retain_interval]
    for iteration in removed:
        _remove(iteration_folder(folder, iteration))
    return removed


def withdraw(target: Path) -> None:
    """Remove the folder of an iteration that will be written again, and the remains of killed runs next to it."""
    if target.exists():
        _remove(target)
    if target.parent.exists():
        _clear(target.parent)


def _check_complete(folder: Path) -> Path:
    if not (folder / "metadata.json").exists():
        raise InputError(
            f"{folder} must be a distributed checkpoint (metadata.json is missing): "
            f"convert it to Megatron's torch_dist format, or name another with --ckpt-step"
        )
    return folder


def _check_replaceable(folder: Path, iteration: int, loaded: int | None) -> None:
    target = iteration_folder(folder, iteration)
    if not target.exists() or latest_iteration(folder) != iteration:
        return
    if loaded is None or loaded >= iteration or not (iteration_folder(folder, loaded) / "metadata.json").exists():
        raise InputError(f"{target} exists already: choose another --save, or remove it")


def _name_latest(folder: Path, iteration: int) -> None:
    unfinished = folder / f".{TRACKER}"
    unfinished.write_text(str(iteration))
    _make_durable(unfinished)
    unfinished.replace(folder / TRACKER)
    _make_durable(folder)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _remove(target: Path) -> None:
    """Rename the folder, so that it is no longer a checkpoint, and then remove it."""
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}.removed")
    target.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _make_durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
