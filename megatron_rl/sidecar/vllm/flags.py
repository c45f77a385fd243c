"""Flags of vLLM that a user adds to ours (--rollout-vllm-args).

`python -m megatron_rl.sidecar.vllm.flags <flags>` asks the parser of the installed vLLM, which expands abbreviations,
dots and files as an engine would. If the parser refuses the flags, it prints its own error, and the exit code is 2. If
the flags set a value that the user may not set, a line is printed for each, and the exit code is 3.
"""

import argparse
import asyncio
import importlib
import itertools
import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.shared.device_memory import EngineMemory

FLAG = "--rollout-vllm-args"
# Flags of vLLM that are set for engines already, each with our flag that decides its value; None if no flag does.
_SET = {
    "--model": "--hf-model",
    "--dtype": "--rollout-dtype",
    "--max-model-len": "--rollout-max-model-len",
    "--max-num-seqs": "--rollout-max-num-seqs",
    "--tensor-parallel-size": "--rollout-tensor-parallel-size",
    "-tp": "--rollout-tensor-parallel-size",
    "--weight-transfer-config": "--rollout-transport",
    **dict.fromkeys(("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port"), "--rollout-hosts"),
    **dict.fromkeys(
        ("--served-model-name", "--uds", "--host", "--port", "--api-key", "--enable-scale-out", "--skip-tokenizer-init",
         "--generation-config", "--logprobs-mode", "--worker-extension-cls", "--middleware",
         "--data-parallel-size", "-dp", "--config", "--load-format", "--headless"),
    ),
}  # fmt: skip
FLAGS_OF_DRAFTS = ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens")
"""All names of the flags with which vLLM drafts tokens. Each takes one value."""
MEMORY_FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override")
"""Flags with which a user divides a device's memory, in place of --rollout-colocate."""
FLAGS_OF_STAGES = ("--pipeline-parallel-size", "-pp")
"""All names of the flag that divides layers into stages."""
# Flags with which tokens lack experts, with the reason.
_WITHOUT_EXPERTS = {
    FLAGS_OF_DRAFTS: "which experts drafted tokens went to has not been compared",
    ("--no-enable-prefix-caching",): "vLLM keeps no experts of a prompt, and ends",
    FLAGS_OF_STAGES: "vLLM does not return experts of several stages, and ends",
}
# Ways to accept drafted tokens that keep the policy's distribution; vLLM's others sample from another one.
_EXACT = ("standard", "block")
_NOT_FREE = 3
# vLLM moves its parser from release to release.
_PARSERS = tuple(f"vllm.entrypoints.{part}.cli_args" for part in ("common", "launchers", "openai"))
_UTILITIES = ("vllm.utils.argparse_utils", "vllm.utils")
_SECONDS = 600


def split_flags(text: str) -> list[str]:
    """Split a text into words as a shell does."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{FLAG} {text!r} cannot be read: {error}") from None


def find_problems(text: str) -> Iterator[str]:
    """Yield each mistake in the flags that can be found without vLLM."""
    try:
        words = split_flags(text)
    except UsageError as error:
        yield str(error)
        return
    if words and not words[0].startswith("-"):
        yield f"{FLAG} {text!r} must begin with a flag of vLLM"
    for word in words:
        if meant := _find_meant(word, _SET):
            yield _describe_taken(_find_name(word), meant[0])


def find_problems_of_replay(text: str) -> Iterator[str]:
    """Yield each flag with which vLLM does not return the experts of every token."""
    for flags, reason in _WITHOUT_EXPERTS.items():
        if flag := find_flag(text, *flags):
            yield f"{FLAG}: with {flag}, {reason}: drop it, or --rollout-replay-routing"


def _describe_taken(written: str, name: str) -> str:
    ours, short = _SET[name], "" if written == name else f" (short for {name})"
    return (
        f"{FLAG}: {written}{short} is set by {ours}: write that"
        if ours
        else (f"{FLAG}: {written}{short} is not free: drop it")
    )


def names_flag(words: Sequence[str], *flags: str) -> bool:
    """Tell whether one of these flags of vLLM is among the words, in full or abbreviated."""
    return any(_find_meant(word, flags) for word in words)


def find_flag(text: str, *flags: str) -> str | None:
    """Return the first of these flags of vLLM that a text names; None if it names none, or cannot be read."""
    try:
        words = split_flags(text)
    except UsageError:
        return None
    return next((meant[0] for word in words if (meant := _find_meant(word, flags))), None)


def is_divided_by_user(vllm_args: str) -> bool:
    """Check whether a user's flags of vLLM divide the memory."""
    return names_flag(split_flags(vllm_args), *MEMORY_FLAGS)


def read_share(vllm_args: str) -> float:
    """Return the share of a device that a user's flags of vLLM give an engine; half if they say it in another way."""
    words = " ".join(split_flags(vllm_args)).replace("=", " ").split()
    given = [value for name, value in itertools.pairwise(words) if name == MEMORY_FLAGS[0]]
    try:
        return float(given[-1])
    except (IndexError, ValueError):
        return 0.5


def list_memory_flags(memory: EngineMemory) -> Iterator[str]:
    """Yield the flags of vLLM that give an engine this memory."""
    yield from ("--gpu-memory-utilization", str(memory.share))
    yield from ("--kv-cache-memory-bytes", str(memory.cache_bytes))


def drop_flags(words: Sequence[str], *flags: str) -> tuple[str, ...]:
    """Return the words without these flags of vLLM, which take one value each."""
    left, kept = iter(words), []
    for word in left:
        if not _find_meant(word, flags):
            kept.append(word)
        elif "=" not in word:
            next(left, None)
    return tuple(kept)


def _find_meant(word: str, flags: Collection[str]) -> list[str]:
    """Return those of the flags that a word may mean; vLLM's parser refuses an abbreviation of several."""
    name = _find_name(word)
    return [name] if name in flags else [flag for flag in flags if name.strip("-") and flag.startswith(name)]


def _find_name(word: str) -> str:
    """Return the flag's name as vLLM's parser spells it: with dashes, and without the text after `=` or a dot."""
    name = word.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


async def check_with_vllm(python: Path | str, words: Sequence[str], packages: Path | str) -> None:
    """Ask the parser of this interpreter's vLLM; raise a UsageError with the mistakes in the flags."""
    asked = await asyncio.create_subprocess_exec(
        str(python), "-m", __name__, *words,
        env={**os.environ, "PYTHONPATH": str(packages)},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(_SECONDS):
            said, complained = await asked.communicate()
    except TimeoutError:
        raise PlatformError(
            f"{FLAG}: vLLM's parser gave no answer within {_SECONDS} s: check the load of this machine"
        ) from None
    finally:
        # Its answer is not awaited any more if another part of the start has failed.
        if asked.returncode is None:
            asked.kill()
            await asked.wait()
    if asked.returncode == _NOT_FREE:
        raise UsageError(*(line for line in said.decode().splitlines() if line.startswith(FLAG)))
    if asked.returncode == 2:
        raise UsageError(f"{FLAG}: vLLM refuses it: {_find_error(complained.decode(errors='replace'))}")


def _find_error(output: str) -> str:
    """Return argparse's message, which follows its usage."""
    _, is_found, message = output.rpartition("error: ")
    return " ".join((message if is_found else output).split())


def build_parser() -> argparse.ArgumentParser | None:
    """Build the parser of the installed vLLM; return None if this vLLM has it in another place."""
    parsers, utilities = (_import_first(names) for names in (_PARSERS, _UTILITIES))
    if parsers is None or utilities is None:
        return None
    parser: argparse.ArgumentParser = parsers.make_arg_parser(utilities.FlexibleArgumentParser())
    return parser


def _main(words: list[str]) -> int:
    parser = build_parser()
    if parser is None:
        return 0
    found = list(_find_taken(parser, words))
    print("\n".join(found))
    return _NOT_FREE if found else 0


class _Absent(list[str]):
    """The value of an option that no flag has set; a list, because some actions append to the old value."""


def _find_taken(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    """Yield each mistake in the flags, once vLLM's parser has read them."""
    # The parser's own table of options has no public name.
    actions = parser._option_string_actions
    targets = {actions[name].dest: name for name in _SET if name in actions}
    absent = _Absent()
    values = parser.parse_args(list(words), argparse.Namespace(**dict.fromkeys(targets, absent)))
    for target, name in targets.items():
        if getattr(values, target) is not absent:
            yield _describe_taken(name, name)
    speculation = getattr(values, "speculative_config", None) or {}
    for written, value in speculation.items() if isinstance(speculation, dict) else ():
        # As vLLM reads it.
        key = written.replace("-", "_")
        is_lossy = key == "rejection_sample_method" and value not in _EXACT
        if is_lossy or key.startswith(("synthetic_", "fly")):
            yield (
                f"{FLAG}: --speculative-config with {key} {value} samples other tokens than the policy would: write "
                f"rejection_sample_method {' or '.join(_EXACT)}"
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
