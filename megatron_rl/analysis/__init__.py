"""Programs that read runs: report, ledger, explain, traces, pictures. No run imports this package."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from megatron_rl.errors import InputError


def write_out(out: Path, write: Callable[[Path], object]) -> None:
    """Write the file that --out names; it appears only when `write`, which gets another path, has completed it."""
    unfinished = out.with_name(f".{out.stem}.{os.getpid()}{out.suffix}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished)
        unfinished.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise InputError(f"--out {out} cannot be written: {error.strerror}") from None
