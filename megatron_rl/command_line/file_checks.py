"""Checks of the files and folders that a command line names, before any process is started."""

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.config.rollout import ROW_FORMATS, SourceFile, read_weights
from megatron_rl.config.settings import DataConfig, DraftSettings


def find_problems(settings: DraftSettings) -> Iterator[str]:
    """Yield each problem with the files that this host reads and the folders that it writes.

    No file is read or made: rows, weights and checkpoints are checked when the run starts.
    """
    yield from find_data_problems(settings.data, settings.run.stage)
    # A dashboard's folder may be missing.
    folders = {"--rollout-folder": settings.rollout.folder, "--publish-folder": settings.publish.folder}
    for flag, folder in (*folders.items(), *settings.checkpoint.written.items()):
        if folder is not None and (problem := _check_folder(folder)) is not None:
            yield f"{flag} {folder} cannot be made or written: {problem}"


def find_data_problems(config: DataConfig, stage: str) -> Iterator[str]:
    """Yield each mistake in the flags and paths of this stage. No file is read: its reader reports its mistakes."""
    if stage == "serve":
        if config.prompts or config.eval_prompts:
            yield "--prompts and --eval-prompts need another --stage: clients send their data; drop them"
        return
    if not config.prompts:
        yield "--prompts is missing: write one FILE.jsonl or FILE.parquet, or several"
    if config.held_out < 0:
        yield f"--prompts-held-out {config.held_out} must be at least 0: write the number of rows to hold out"
    if config.held_out and config.eval_prompts:
        yield f"--prompts-held-out {config.held_out} and --eval-prompts both choose what is evaluated: leave one out"
    yield from _check_keys(config, stage)
    files = read_weights(config.prompts or ())
    yield from _check_weights(files, stage)
    trained = {os.path.realpath(file.path) for file in files}
    for path in config.eval_prompts or ():
        if os.path.realpath(path) in trained:
            yield f"{path} is in --prompts and in --eval-prompts: leave it out of one, or use --prompts-held-out"
    for flag, paths in (("--prompts", [file.path for file in files]), ("--eval-prompts", config.eval_prompts or ())):
        yield from _check_paths(flag, paths)


def _check_keys(config: DataConfig, stage: str) -> Iterator[str]:
    keys = {"--prompt-key": config.prompt_key}
    if stage == "sft":
        keys |= {"--completion-key": config.completion_key, "--messages-key": config.messages_key}
    elif stage == "dpo":
        keys |= {"--chosen-key": config.chosen_key, "--rejected-key": config.rejected_key}
    else:
        keys["--answer-key"] = config.answer_key
    for (first, key), (second, other) in itertools.combinations(keys.items(), 2):
        if key == other:
            yield f"{first} and {second} are both {key}: they must name two columns"


def _check_paths(flag: str, paths: Sequence[Path]) -> Iterator[str]:
    files = [os.path.realpath(path) for path in paths]
    for number, path in enumerate(paths):
        if files[number] in files[:number]:
            yield f"{flag} lists {path} twice, and every row counts once: leave one out"
        elif (problem := _check_rows_file(path)) is not None:
            yield f"{flag} {path} {problem}"


def _check_rows_file(path: Path) -> str | None:
    """Return the reason why a path cannot be a file of rows, and the remedy; None if it can."""
    if path.suffix.lower() not in ROW_FORMATS:
        return f"is neither {' nor '.join(ROW_FORMATS)}: convert it, or rename it by its format"
    try:
        os.stat(path)
    except FileNotFoundError:
        return "does not exist: write the path of a file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if path.is_dir():
        return "is a folder: write the path of a file"
    return None if os.access(path, os.R_OK) else "is not open to this user: make it readable"


def _check_weights(files: Sequence[SourceFile], stage: str) -> Iterator[str]:
    weights = [file.weight for file in files if file.weight is not None]
    if weights and stage != "grpo":
        yield f"--prompts FILE=WEIGHT: --stage {stage} takes every row once an epoch; write the files alone"
    elif 0 < len(weights) < len(files):
        missing = next(file.path for file in files if file.weight is None)
        yield f"--prompts {missing} has no weight, and others have: write {missing}=WEIGHT, or no weights"
    for file in files:
        if file.weight is not None and not 0 < file.weight < math.inf:
            yield f"--prompts {file.path}={file.weight:g}: a weight must be a finite number above 0; write one"


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
