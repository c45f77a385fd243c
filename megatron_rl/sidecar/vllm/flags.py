"""Flags of vLLM that a person adds to ours (--rollout-vllm-args).

`python -m megatron_rl.sidecar.vllm.flags <flags>` asks the parser of the vLLM that is installed. It expands
abbreviations, dots and files as an engine would. Exit code 2, and its own words, if it refuses the flags; exit code 3,
and a line each, if they set what is not free.
"""

import argparse
import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from megatron_rl.errors import PlatformError, UsageError

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
# How tokens that are drafted may be accepted: the others sample from another distribution than the policy's.
_EXACT = ("standard", "block")
_NOT_FREE = 3
# vLLM moves it from release to release.
_PARSERS = tuple(f"vllm.entrypoints.{part}.cli_args" for part in ("common", "launchers", "openai"))
_UTILITIES = ("vllm.utils.argparse_utils", "vllm.utils")
_SECONDS = 600


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
        # vLLM takes any beginning of a flag that no other flag has.
        meant = [name] if name in _SET else [known for known in _SET if name[2:] and known.startswith(name)]
        if meant:
            yield _describe_taken(name, meant[0])


def _describe_taken(written: str, name: str) -> str:
    ours, short = _SET[name], "" if written == name else f" (short for {name})"
    return (
        f"{FLAG}: {written}{short} is set by {ours}: write that"
        if ours
        else (f"{FLAG}: {written}{short} is not free: drop it")
    )


def _find_name(word: str) -> str:
    """The flag's name as vLLM's parser has it: dashes for underscores, without what `=` or a dot adds."""
    name = word.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def check_with_vllm(python: Path | str, words: Sequence[str], packages: Path | str) -> None:
    """Ask the parser of the vLLM of this interpreter; a UsageError has what is wrong with the flags."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    try:
        done = subprocess.run(
            [str(python), "-m", __name__, *words],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PlatformError(
            f"{FLAG}: vLLM's parser gave no answer within {_SECONDS} s: is this machine overloaded?"
        ) from None
    if done.returncode == _NOT_FREE:
        raise UsageError(*(line for line in done.stdout.splitlines() if line.startswith(FLAG)))
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
    found = list(_find_taken(parsers.make_arg_parser(utilities.FlexibleArgumentParser()), words))
    print("\n".join(found))
    return _NOT_FREE if found else 0


class _Absent(list[str]):
    """Stands for a value that no flag has set; some actions append to what is there."""


def _find_taken(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the flags once vLLM's parser has read them."""
    # The parser's own table of options has no public name.
    actions = parser._option_string_actions
    targets = {actions[name].dest: name for name in _SET if name in actions}
    absent = _Absent()
    values = parser.parse_args(list(words), argparse.Namespace(**dict.fromkeys(targets, absent)))
    for target, name in targets.items():
        if getattr(values, target) is not absent:
            yield _describe_taken(name, name)
    speculation = getattr(values, "speculative_config", None) or {}
    for key, value in speculation.items() if isinstance(speculation, dict) else ():
        is_lossy = key == "rejection_sample_method" and value not in _EXACT
        if is_lossy or key.startswith(("synthetic_", "fly")):
            yield (
                f"{FLAG}: --speculative-config with {key} {value} samples other tokens than the policy would: write a "
                f"rejection_sample_method that does not, {' or '.join(_EXACT)}"
            )


def _import_first(names: Sequence[str]) -> ModuleType | None:
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
