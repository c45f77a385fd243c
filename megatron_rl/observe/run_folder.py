"""Finds a run's folder, also from the folder that --save was given."""

from pathlib import Path

from megatron_rl.errors import UsageError


def find_run(path: Path, file_name: str) -> Path:
    """Find the run's folder in one that --save was given; return any other path as it is.

    A run's folder holds the file. If --save's folder holds several runs, raise a UsageError that lists them.
    """
    if not path.is_dir() or (path / file_name).exists():
        return path
    runs = sorted(file.parent for file in path.glob(f"rollout/*/{file_name}"))
    if len(runs) > 1:
        listed = "".join(f"\n  {run}" for run in runs)
        raise UsageError(f"{path} holds {len(runs)} runs: name one of{listed}")
    return runs[0] if runs else path
