"""Which folder is a run's, where the one that --save was given may be meant."""

from pathlib import Path

from megatron_rl.errors import UsageError


def find_run(path: Path, file_name: str) -> Path:
    """The run's folder in one that --save was given; any other path as it is.

    A run's folder holds the file. Where --save holds several runs, a UsageError lists them.
    """
    if not path.is_dir() or (path / file_name).exists():
        return path
    runs = sorted(file.parent for file in path.glob(f"rollout/*/{file_name}"))
    if len(runs) > 1:
        listed = "".join(f"\n  {run}" for run in runs)
        raise UsageError(f"{path} holds {len(runs)} runs: name one of{listed}")
    return runs[0] if runs else path
