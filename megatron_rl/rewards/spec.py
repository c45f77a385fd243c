"""The parser of --reward SOURCE[=WEIGHT][@SECONDS], and the checks of the flags of rewards.

The named files are read, not run. Some mistakes show only when a file runs, such as a missing import: a worker reports
them when the sidecar starts.
"""

import ast
import difflib
import math
import re
import symtable
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.config.settings import RewardConfig
from megatron_rl.confined.confinement import find_environment_problems
from megatron_rl.errors import UsageError
from megatron_rl.flag import suggest_nearest
from megatron_rl.rewards.classifier import check_classifier
from megatron_rl.rewards.judging import find_problems as find_judge_problems
from megatron_rl.rewards.judging import name_counts
from megatron_rl.rewards.model_folders import CLASSIFIER, JUDGE, check_folder
from megatron_rl.rewards.ready_made import REWARDS
from megatron_rl.rewards.types import RewardSpec

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SPEC = re.compile(rf"(?P<source>.+?)(?:=(?P<weight>{_NUMBER}))?(?:@(?P<timeout>{_NUMBER}))?")
_DEFAULT_TIMEOUT = 30.0
_NAMES = (*REWARDS, JUDGE)


def parse_spec(text: str, timeout: float = _DEFAULT_TIMEOUT) -> RewardSpec:
    """Parse a function: FILE.py:FUNCTION, ready-made NAME or NAME:ARGUMENT, or the http(s) address of a reward model.

    A number after the last "=" is the weight, and a number after a last "@" is the limit in seconds. If an argument
    itself ends in such a number, the weight must follow it.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise UsageError("--reward is empty: write --reward FILE.py:FUNCTION or --reward NAME")
    source, weight = match["source"], float(match["weight"] or 1.0)
    seconds = float(match["timeout"]) if match["timeout"] else timeout
    if not 0 < seconds < float("inf"):
        raise UsageError(
            f"--reward {text}: the limit of {seconds:g} seconds must be finite and above 0; write @SECONDS"
        )
    if abs(weight) == float("inf"):
        raise UsageError(f"--reward {text}: the weight must be finite")
    if source.startswith(("http://", "https://")):
        return RewardSpec("http", "http", argument=source, weight=weight, timeout=seconds)
    head, colon, tail = source.partition(":")
    if head in _NAMES:
        if head != JUDGE:
            _check_argument(text, head, tail if colon else None)
        return RewardSpec(head, head, argument=tail if colon else None, weight=weight, timeout=seconds)
    path, colon, function = source.rpartition(":")
    if path.endswith(".py"):
        if not function.isidentifier():
            raise UsageError(
                f"--reward {text}: {function!r} must be the name of a function; write {path}:FUNCTION=WEIGHT"
            )
        return RewardSpec(function, path, function, weight=weight, timeout=seconds)
    if source.endswith(".py"):
        raise UsageError(f"--reward {text}: the function is missing; write {source}:FUNCTION")
    raise UsageError(
        f"--reward {text} must be FILE.py:FUNCTION or one of {', '.join(_NAMES)}{suggest_nearest(head, _NAMES)}"
    )


def parse_specs(texts: Sequence[str], timeout: float = _DEFAULT_TIMEOUT) -> tuple[RewardSpec, ...]:
    """Parse all functions of a run and give them different names: equal names get their sources as prefixes."""
    specs = [parse_spec(text, timeout) for text in texts]
    counts = Counter(spec.name for spec in specs)
    named = [spec if counts[spec.name] == 1 else _with_long_name(spec) for spec in specs]
    for name, count in Counter(spec.name for spec in named).items():
        if count > 1:
            raise UsageError(f"--reward {name} is given {count} times: give it once, with the sum of the weights")
    return tuple(named)


def find_weights(config: RewardConfig) -> dict[str, float]:
    """Return the weight of each reward, by the name of its component; counts of a judge's answers have none."""
    weights: dict[str, float] = {}
    for spec in parse_specs(config.functions or (), config.timeout):
        weights |= {spec.name: spec.weight} | dict.fromkeys(
            name_counts(spec.name).values() if spec.source == JUDGE else (), 0.0
        )
    return weights


def parse_on_error(text: str, flag: str = "--reward-on-error") -> float | None:
    """Parse the flag's value: return None for "stop", else the reward that replaces a failure's."""
    if text == "stop":
        return None
    if not re.fullmatch(_NUMBER, text) or abs(float(text)) == float("inf"):
        raise UsageError(f"{flag} {text} must be stop or a finite number")
    return float(text)


def _check_argument(text: str, name: str, argument: str | None) -> None:
    """Make the reward once, so that a wrong argument is reported here and not in a worker."""
    try:
        REWARDS[name](argument, _DEFAULT_TIMEOUT)
    except ValueError as error:
        raise UsageError(f"--reward {text}: {error}") from None


def _with_long_name(spec: RewardSpec) -> RewardSpec:
    tail = spec.function if spec.is_file else spec.argument
    head = str(Path(spec.source)) if spec.is_file else spec.source
    name = head if tail is None else f"{head}:{tail}"
    return RewardSpec(name, spec.source, spec.function, spec.argument, spec.weight, spec.timeout)


# The memory that Python alone needs, without any function.
_LEAST_MEMORY_GIB = 0.125
# Ways to bind names that cannot be found in the source.
_DYNAMIC = {"exec", "globals", "locals", "setattr", "vars", "modules", "__getattr__"}


def problems(reward: RewardConfig, is_needed: bool = True) -> Iterator[str]:
    """Yield each mistake that would end workers; without `is_needed`, there may be no function."""
    if is_needed and not reward.functions:
        yield "--reward is missing: name a function FILE.py:FUNCTION, or a ready-made one"
    yield from _problems_of_functions(reward.functions or [])
    if reward.model_device != "cpu" and not any(text.startswith(f"{CLASSIFIER}:") for text in reward.functions or ()):
        yield f"--reward-model-device {reward.model_device} needs --reward model:FOLDER: add it, or drop the flag"
    yield from find_judge_problems(reward, sum(text.startswith(f"{JUDGE}:") for text in reward.functions or ()))
    try:
        parse_on_error(reward.on_error)
    except UsageError as error:
        yield from error.problems
    if reward.workers < 1:
        yield f"--reward-workers {reward.workers} must be at least 1"
    if not 0 < reward.timeout < math.inf:
        yield f"--reward-timeout {reward.timeout:g} must be a finite number of seconds above 0"
    if reward.memory_gib is not None and not _LEAST_MEMORY_GIB <= reward.memory_gib < math.inf:
        yield (
            f"--reward-memory-gib {reward.memory_gib:g} must be at least {_LEAST_MEMORY_GIB:g}, which Python needs: "
            f"raise it, or leave it out"
        )
    for path in reward.readable or ():
        if not path.exists():
            yield f"--reward-readable {path} does not exist: name a file or folder that does"
    yield from find_environment_problems(reward.environment or ())


def read_source(flag: str, file: Path | str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} {file} cannot be read: {error}; name a readable file") from None


def _problems_of_functions(texts: list[str]) -> Iterator[str]:
    are_right = True
    for text in texts:
        try:
            spec = parse_spec(text)
            if spec.is_file:
                _check_file(text, spec)
            elif spec.source == CLASSIFIER:
                check_classifier(spec.argument)
            elif spec.source == JUDGE:
                check_folder(spec.argument, JUDGE)
        except UsageError as error:
            are_right = False
            yield from error.problems
        except ValueError as error:
            yield f"--reward {text}: {error}"
    if are_right:
        try:
            parse_specs(texts)
        except UsageError as error:
            yield from error.problems


def _check_file(text: str, spec: RewardSpec) -> None:
    """Raise a UsageError unless the file is Python and may have the function."""
    source = read_source("--reward", spec.source)
    try:
        names = _names(source, spec.source)
    except SyntaxError as error:
        raise UsageError(
            f"--reward {text}: {spec.source}:{error.lineno} does not import: SyntaxError: {error.msg}; correct the file"
        ) from None
    except ValueError as error:
        raise UsageError(f"--reward {text}: {spec.source} does not import: {error}; correct the file") from None
    if names is None or spec.function in names:
        return
    near = difflib.get_close_matches(str(spec.function), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"name one of its functions: {spec.source}:FUNCTION"
    raise UsageError(f"--reward {text}: {spec.source} has no function {spec.function}; {hint}")


def _names(source: str, file: str) -> set[str] | None:
    """Find the names that a module binds; return None if the source does not show them."""
    for node in ast.walk(ast.parse(source, file)):
        is_star = isinstance(node, ast.alias) and node.name == "*"
        if is_star or {getattr(node, field, None) for field in ("id", "attr", "name")} & _DYNAMIC:
            return None
    return set(_bound(symtable.symtable(source, file, "exec")))


def _bound(scope: symtable.SymbolTable) -> Iterator[str]:
    """Yield the names that a scope, or one inside it, binds in its module."""
    for symbol in scope.get_symbols():
        is_bound = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
        if symbol.is_declared_global() or (is_bound and scope.get_type() == "module"):
            yield symbol.get_name()
    for child in scope.get_children():
        yield from _bound(child)
