"""Folders of files that several processes fill: laid out with full size and headers, and renamed in one step.

This module does not import torch.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megatron_rl.errors import InputError, NoRoom, find_no_room

DIGESTS_FILE = "digests.json"
"""The file of the tensors' digests beside the tensors."""


class LaidOutFiles(Protocol):
    """The files of a folder."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of bytes of each file."""
        ...

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The first bytes of each file."""
        ...


def create(folder: Path, plan: LaidOutFiles, private: bool = False, is_sparse: bool = False) -> None:
    """Create the plan's files in a new folder, with full size and headers; `private` gives them to this user only.

    Sparse files take room only for what is written into them.
    """
    folder.mkdir(parents=True, mode=0o700 if private else 0o777)
    try:
        _lay_out(folder, plan, private, is_sparse)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _lay_out(folder: Path, plan: LaidOutFiles, private: bool, is_sparse: bool) -> None:
    free, num_bytes = shutil.disk_usage(folder).free, sum(plan.sizes.values())
    if free < num_bytes:
        raise NoRoom(
            f"{folder} cannot be written: the weights take {num_bytes} bytes, {free} are free; make room there, "
            "then resume"
        )
    for file, size in plan.sizes.items():
        descriptor = os.open(folder / file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666)
        try:
            # Room that is missing when a page is written through a mapping ends the process, without an error.
            if is_sparse:
                os.truncate(descriptor, size)
            else:
                os.posix_fallocate(descriptor, 0, size)
            os.pwrite(descriptor, plan.headers[file], 0)
        finally:
            os.close(descriptor)


def put_in_place(staged: Path, folder: Path) -> None:
    """Rename a finished folder, in one step."""
    try:
        staged.rename(folder)
    except OSError as error:
        no_room = find_no_room(error, folder)
        raise no_room or InputError(
            f"{folder} cannot be created ({error.strerror}): name a folder that does not exist"
        ) from None
