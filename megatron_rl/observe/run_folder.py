"""Finds the folders of runs, also from the folder that --save was given, and names the runs."""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.observe import config_file


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
        for folder in (path, *sorted(path.glob("rollout/*"))):
            check_samples(folder, file_name)
        raise UsageError(
            f"{path} has no {file_name}: name the run's folder (--rollout-folder, if the run had one), or the folder "
            f"that --save was given"
        )
    return runs[0]


def check_samples(folder: Path, wanted: str) -> None:
    """Raise a UsageError if the folder holds a supervised run, which samples nothing; `wanted` is what it lacks."""
    config = config_file.read(folder / config_file.FILE_NAME) if folder.is_dir() else None
    stage = None if config is None else config.sections.get("run", {}).get("stage")
    if stage is not None and stage.text == "sft":
        raise UsageError(
            f"{folder} is a run of --stage sft, which samples nothing, so it has no {wanted}: name a run of --stage "
            f"grpo; `megatron-rl explain` and `megatron-rl picture` read both"
        )


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
