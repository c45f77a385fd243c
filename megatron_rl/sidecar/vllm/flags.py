"""Flags of vLLM that a person adds to ours (--rollout-vllm-args).

`python -m megatron_rl.sidecar.vllm.flags <flags>` asks the parser of the vLLM that is installed: exit code 2, and its
own words, if it refuses them.
"""

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from megatron_rl.errors import UsageError

FLAG = "--rollout-vllm-args"
# What is set for engines already, and the flag of ours that decides it; None where nothing may.
_SET = {
    "--model": "--hf-model",
    "--dtype": "--rollout-dtype",
    "--max-model-len": "--rollout-max-model-len",
    "--max-num-seqs": "--rollout-max-num-seqs",
    "--tensor-parallel-size": "--rollout-tensor-parallel-size",
    "-tp": "--rollout-tensor-parallel-size",
    "--weight-transfer-config": "--rollout-transport",
    **dict.fromkeys(
        ("--served-model-name", "--uds", "--host", "--port", "--api-key", "--enable-scale-out", "--skip-tokenizer-init",
         "--generation-config", "--logprobs-mode", "--worker-extension-cls", "--middleware",
         "--data-parallel-size", "-dp", "--config", "--load-format"),
    ),
}  # fmt: skip
# vLLM moves it from release to release.
_PARSERS = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
_UTILITIES = ("vllm.utils.argparse_utils", "vllm.utils")
_SECONDS = 120


def split_flags(text: str) -> list[str]:
    """The words of a text as a shell has them."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{FLAG} {text!r} cannot be read: {error}") from None


def find_problems(text: str) -> Iterator[str]:
    """What is wrong with the flags that can be seen without vLLM."""
    try:
        words = split_flags(text)
    except UsageError as error:
        yield str(error)
        return
    if words and not words[0].startswith("-"):
        yield f"{FLAG} {text!r} must begin with a flag of vLLM"
    for word in words:
        name = _find_name(word)
        if name in _SET:
            ours = _SET[name]
            yield f"{FLAG}: {name} is set by {ours}: write that" if ours else f"{FLAG}: {name} is not free: drop it"


def _find_name(word: str) -> str:
    """The flag's name as vLLM's parser has it: dashes for underscores, without what `=` or a dot adds."""
    name = word.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def check_with_vllm(python: Path | str, words: Sequence[str], packages: Path) -> None:
    """Ask the parser of the vLLM of this interpreter; a UsageError has what it says against the flags."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    try:
        done = subprocess.run(
            [str(python), "-m", __name__, *words],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        # The engine will say what there is to say.
        return
    if done.returncode == 2:
        raise UsageError(f"{FLAG}: vLLM refuses it: {_find_error(done.stderr)}")


def _find_error(output: str) -> str:
    """argparse's message, behind its usage."""
    _, is_there, said = output.rpartition("error: ")
    return " ".join((said if is_there else output).split())


def _main(words: list[str]) -> int:
    parsers, utilities = (_import_first(names) for names in (_PARSERS, _UTILITIES))
    if parsers is None or utilities is None:
        return 0
    parsers.make_arg_parser(utilities.FlexibleArgumentParser()).parse_args(words)
    return 0


def _import_first(names: Sequence[str]) -> ModuleType | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
