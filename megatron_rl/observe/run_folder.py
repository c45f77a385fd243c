"""Finds the folders of runs, also from the folder that --save was given, and names the runs."""

from collections.abc import Sequence
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


def label_runs(runs: Sequence[str], file_name: str) -> dict[str, Path]:
    """Find runs that are given as RUN or LABEL=RUN, by their labels: without one, a run is called like its folder."""
    found: dict[str, Path] = {}
    for run in runs:
        label, separator, text = run.partition("=")
        path = find_run(Path(text if separator else run), file_name)
        if not separator:
            label = (path if path.is_dir() else path.parent).resolve().name
        if label in found:
            raise UsageError(f"{found[label]} and {path} are both called {label}: write LABEL={path}")
        found[label] = path
    return found
