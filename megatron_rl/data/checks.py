"""Checks of the flags of a run's data, and of the paths that they name."""

import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.config.settings import DataConfig
from megatron_rl.data.prompt_files import KINDS


def find_problems(config: DataConfig, stage: str) -> Iterator[str]:
    """Yield each mistake of a run of this stage. No file is read: what is wrong in it is an error of its reader."""
    if not config.prompts:
        yield "--prompts is missing: write one FILE.jsonl or FILE.parquet, or several"
    if config.held_out < 0:
        yield f"--prompts-held-out {config.held_out} is below 0: write how many to hold out"
    if config.held_out and config.eval_prompts:
        yield f"--prompts-held-out {config.held_out} and --eval-prompts both say what is evaluated: leave one out"
    yield from _check_keys(config, stage)
    trained = {os.path.realpath(path) for path in config.prompts or ()}
    for path in config.eval_prompts or ():
        if os.path.realpath(path) in trained:
            yield f"{path} is in --prompts and in --eval-prompts: leave it out of one, or use --prompts-held-out"
    for flag, paths in (("--prompts", config.prompts or ()), ("--eval-prompts", config.eval_prompts or ())):
        yield from _check_paths(flag, paths)


def _check_keys(config: DataConfig, stage: str) -> Iterator[str]:
    keys = {"--prompt-key": config.prompt_key}
    if stage == "sft":
        keys |= {"--completion-key": config.completion_key, "--messages-key": config.messages_key}
    else:
        keys["--answer-key"] = config.answer_key
    for (first, key), (second, other) in itertools.combinations(keys.items(), 2):
        if key == other:
            yield f"{first} and {second} are both {key}: they name two columns"


def _check_paths(flag: str, paths: Sequence[Path]) -> Iterator[str]:
    files = [os.path.realpath(path) for path in paths]
    for number, path in enumerate(paths):
        if files[number] in files[:number]:
            yield f"{flag} lists {path} twice, and every row counts once: leave one out"
        elif (problem := _check_path(path)) is not None:
            yield f"{flag} {path} {problem}"


def _check_path(path: Path) -> str | None:
    """Return why a path cannot be one of rows, and what to do; None if it can."""
    if path.suffix.lower() not in KINDS:
        return f"is neither {' nor '.join(KINDS)}: convert it, or name it by what it is"
    try:
        os.stat(path)
    except FileNotFoundError:
        return "does not exist: write the path of a file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if path.is_dir():
        return "is a folder: write the path of a file"
    return None if os.access(path, os.R_OK) else "is not open to this user: let it be read"
