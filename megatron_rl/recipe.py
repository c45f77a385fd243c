"""Runs a script of Megatron-LM with `pretrain` replaced: `torchrun -m megatron_rl.recipe pretrain_gpt.py FLAGS`.

The flags are Megatron's and ours. A patched script calls `start` in its first line.
"""

import logging
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.trainer.loop.entry import Entry

# The script that is running: if its first line calls `start`, it must not be started twice.
_running: list[Path] = []


def start(name: str) -> None:
    """Start the script again inside a run, and exit with the run's code; a patched script calls this first.

    Do nothing without --prompts, which only GRPO has, so that the script works as before. Do nothing if a run has
    already started the script, or if a process only imports it.
    """
    is_asked = any(word.partition("=")[0] == "--prompts" for word in sys.argv)
    if name == "__main__" and is_asked and not _running:
        raise SystemExit(run(sys.argv))


def run(words: Sequence[str]) -> int:
    """Run the script that the first word names, with the flags after it; return the exit code."""
    return Entry("recipe").run(lambda entry: _run(words, entry))


def _run(words: Sequence[str], entry: Entry) -> int:
    if not words or words[0].startswith("-"):
        raise UsageError("the recipe's script is missing: write python -m megatron_rl.recipe pretrain_gpt.py FLAGS")
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(f"{script} must be a file: write the path of the recipe's script, as pretrain_gpt.py")
    # As Python does for a script: modules in its folder, above all Megatron's tree, can be imported.
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = list(words)
    _running.append(script)
    # Megatron lets every package log at level INFO, at which httpx logs each request to the sidecar.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    late = entry.late()
    try:
        from megatron_rl.trainer.recipe.hooks import Hooks

        hooks = Hooks(entry, words[1:])
        hooks.install()
    finally:
        late.cancel()
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ModuleNotFoundError as error:
        raise PlatformError(
            f"{script} needs the module {error.name}, which is not installed: install the packages of its tree, or put "
            "the module's folder on PYTHONPATH"
        ) from error
    if hooks.exit_code is None:
        raise UsageError(f"{script} ended without a call of megatron.training.pretrain: there is nothing to train")
    return hooks.exit_code


if __name__ == "__main__":
    # The module of a patched script's import: it knows then that the script is running.
    from megatron_rl.recipe import run as run_importable

    sys.exit(run_importable(sys.argv[1:]))
