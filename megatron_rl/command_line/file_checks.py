"""Checks of the files and folders that a command line names, before any process is started."""

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.settings import DraftSettings
from megatron_rl.trainer.data import prompt_files


def find_problems(settings: DraftSettings) -> Iterator[str]:
    """Yield each problem with the files that this host reads and the folders that it writes.

    No file is read or made: rows, weights and checkpoints are checked when the run starts.
    """
    yield from prompt_files.find_problems(settings.data, settings.run.stage)
    yield from _check_folders(settings)


def _check_folders(settings: DraftSettings) -> Iterator[str]:
    """Yield each folder that this host cannot make; a dashboard's folder may be missing."""
    folders = {"--rollout-folder": settings.rollout.folder, "--publish-folder": settings.publish.folder}
    for flag, folder in (*folders.items(), *settings.checkpoint.written.items()):
        if folder is not None and (problem := _check_folder(folder)) is not None:
            yield f"{flag} {folder} cannot be made or written: {problem}"


def _check_folder(folder: Path) -> str | None:
    """Return the problem with a folder and its remedy; None if the folder can be made and written."""
    try:
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        is_full = os.statvfs(parent).f_bavail == 0
    except OSError as error:
        return f"{error.strerror}: write another folder"
    if not parent.is_dir():
        return f"{parent} is not a folder: write another folder"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f"{parent} is not open to this user: write another folder"
    return f"the disk of {parent} is full: make room there, or write another folder" if is_full else None
