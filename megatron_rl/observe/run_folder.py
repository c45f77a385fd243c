"""Finds a run's folder, also from the folder that --save was given."""

from pathlib import Path

from megatron_rl.errors import UsageError


def find_run(path: Path, file_name: str) -> Path:
    """Find the run's folder in one that --save was given; return any other path as it is.

    A run's folder holds the file. If there is none, or --save's folder holds several, raise a UsageError.
    """
    if not path.is_dir() or (path / file_name).exists():
        return path
    runs = sorted(file.parent for file in path.glob(f"rollout/*/{file_name}"))
    if len(runs) > 1:
        listed = "".join(f"\n  {run}" for run in runs)
        raise UsageError(f"{path} holds {len(runs)} runs: name one of{listed}")
    if not runs:
        raise UsageError(
            f"{path} has no {file_name}: name the run's folder (--rollout-folder, if the run had one), or the folder "
            f"that --save was given"
        )
    return runs[0]
