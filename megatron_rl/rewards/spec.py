"""What stands after --reward: SOURCE[=WEIGHT][@SECONDS]."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.flag import suggest_nearest
from megatron_rl.errors import UsageError
from megatron_rl.rewards.ready_made import REWARDS
from megatron_rl.rewards.types import RewardSpec

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SPEC = re.compile(rf"(?P<source>.+?)(?:=(?P<weight>{_NUMBER}))?(?:@(?P<timeout>{_NUMBER}))?")
_DEFAULT_TIMEOUT = 30.0


def parse_spec(text: str, timeout: float = _DEFAULT_TIMEOUT) -> RewardSpec:
    """One function: FILE.py:FUNCTION, a ready-made NAME or NAME:ARGUMENT, or the http(s) address of a reward model.

    A number after the last "=" is the weight and one after a last "@" the limit in seconds; an argument that itself
    ends in such a number is followed by its weight.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise UsageError("--reward is empty: write --reward FILE.py:FUNCTION or --reward NAME")
    source, weight = match["source"], float(match["weight"] or 1.0)
    seconds = float(match["timeout"]) if match["timeout"] else timeout
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--reward {text}: the limit of {seconds:g} seconds is not positive; write @SECONDS after it")
    if abs(weight) == float("inf"):
        raise UsageError(f"--reward {text}: the weight is not finite")
    if source.startswith(("http://", "https://")):
        return RewardSpec("http", "http", argument=source, weight=weight, timeout=seconds)
    head, colon, tail = source.partition(":")
    if head in REWARDS:
        _check_argument(text, head, tail if colon else None)
        return RewardSpec(head, head, argument=tail if colon else None, weight=weight, timeout=seconds)
    path, colon, function = source.rpartition(":")
    if path.endswith(".py"):
        if not function.isidentifier():
            raise UsageError(f"--reward {text}: {function!r} names no function; write {path}:FUNCTION=WEIGHT")
        return RewardSpec(function, path, function, weight=weight, timeout=seconds)
    if source.endswith(".py"):
        raise UsageError(f"--reward {text}: which function of the file? Write {source}:FUNCTION")
    raise UsageError(
        f"--reward {text}: neither FILE.py:FUNCTION nor one of {', '.join(REWARDS)}{suggest_nearest(head, REWARDS)}"
    )


def parse_specs(texts: Sequence[str], timeout: float = _DEFAULT_TIMEOUT) -> tuple[RewardSpec, ...]:
    """All functions of a run, under different names: where two have one name, their sources tell them apart."""
    specs = [parse_spec(text, timeout) for text in texts]
    counts = Counter(spec.name for spec in specs)
    named = [spec if counts[spec.name] == 1 else _with_long_name(spec) for spec in specs]
    for name, count in Counter(spec.name for spec in named).items():
        if count > 1:
            raise UsageError(f"--reward {name} is given {count} times: give it once, with the sum of the weights")
    return tuple(named)


def parse_on_error(text: str) -> float | None:
    """What stands after --reward-on-error: None for "stop", else the value that stands for a failure."""
    if text == "stop":
        return None
    if not re.fullmatch(_NUMBER, text) or abs(float(text)) == float("inf"):
        raise UsageError(f"--reward-on-error {text}: neither stop nor a finite number")
    return float(text)


def _check_argument(text: str, name: str, argument: str | None) -> None:
    """Make the reward once and forget it: a bad argument shows here and not in a worker."""
    try:
        REWARDS[name](argument, _DEFAULT_TIMEOUT)
    except ValueError as error:
        raise UsageError(f"--reward {text}: {error}") from None


def _with_long_name(spec: RewardSpec) -> RewardSpec:
    tail = spec.function if spec.is_file else spec.argument
    head = str(Path(spec.source)) if spec.is_file else spec.source
    name = head if tail is None else f"{head}:{tail}"
    return RewardSpec(name, spec.source, spec.function, spec.argument, spec.weight, spec.timeout)
