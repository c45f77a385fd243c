"""Requests to reward functions, their results, and how they fail."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_rl.errors import InputError, MegatronRLError

# What a function is given besides the columns of the data.
GIVEN = ("prompts", "completions", "completion_ids")
# The name under which rewards know the column of --answer-key.
ANSWER = "answer"

Values = list[float | None]


class Misfit(ValueError):
    """A function does not fit the data, or what is wanted of it: every completion would fail in the same way."""


class MissingColumn(Misfit):
    """The data lacks what a function asks for; the text says what to do."""


class RewardError(MegatronRLError):
    """A reward function failed for one group: which function, which prompt, why."""

    def __init__(self, function: str, request: "RewardRequest", reason: str, *, is_at_fault: bool = True) -> None:
        """Without `is_at_fault` the message does not advise to correct the function or to substitute a reward."""
        remedy = (
            "; correct the function, or substitute a reward for failures with --reward-on-error" if is_at_fault else ""
        )
        row = f" ({request.row})" if request.row else ""
        super().__init__(f"reward {function} failed for prompt {request.index}{row}: {reason}{remedy}")
        self.function = function
        self.prompt_index = request.index
        self.reason = reason


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """One function: its source and its weight."""

    name: str
    source: str
    """A file, or the name of a ready-made one."""
    function: str | None = None
    """The function in the file; None for a ready-made one."""
    argument: str | None = None
    """The argument of a ready-made one."""
    weight: float = 1.0
    timeout: float = 30.0

    @property
    def is_file(self) -> bool:
        return self.function is not None


@dataclasses.dataclass(frozen=True)
class RewardRequest:
    """One group to score. The prompt is text, or a list of chat messages; columns hold the row's own values."""

    index: int
    prompt: str | Sequence[Mapping[str, Any]]
    completions: Sequence[str]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    row: str = ""
    """The row's name in its file."""

    def encode(self) -> bytes:
        """Encode the request as one line."""
        # Imported here: workers import this module too, and need no msgspec.
        import msgspec

        clashing = sorted(set(GIVEN) & set(self.columns))
        if clashing:
            raise InputError(
                f"prompt {self.index}: rename the columns {', '.join(clashing)}: rewards get arguments of these names"
            )
        if len(self.completion_ids) != len(self.completions):
            raise InputError(
                f"prompt {self.index}: {len(self.completions)} completions with {len(self.completion_ids)} lists of ids"
            )
        content = {
            "prompt": self.prompt if isinstance(self.prompt, str) else [dict(message) for message in self.prompt],
            "completions": list(self.completions),
            "columns": dict(self.columns),
        }
        try:
            text = json.dumps(content).encode()
        except (TypeError, ValueError) as error:
            raise InputError(f"prompt {self.index}: a column cannot be handed to rewards as JSON: {error}") from None
        # For this many numbers json takes ten times as long as msgspec.
        return b'%s, "completion_ids": %s}\n' % (text[:-1], msgspec.json.encode(self.completion_ids))


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """A scored group. A component holds a function's unweighted values; None means that it does not apply."""

    rewards: list[float]
    components: dict[str, Values]
    seconds: float
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    """The functions that failed and whose value was substituted, with the reasons."""


@dataclasses.dataclass(frozen=True)
class PoolSettings:
    """How reward functions are run."""

    num_workers: int = 2
    on_error: float | None = None
    """The reward to substitute when a function fails; None fails the group."""
    start_timeout: float = 120.0
    memory_bytes: int | None = None
    """The largest address space of a worker."""
    confine: Literal["auto", "require", "off"] = "auto"
    """auto confines as far as the kernel can, and logs the rest; require refuses to start unless it can."""
    private: tuple[Path, ...] = ()
    """Folders that functions must not see, such as the run's, which holds the token."""
    readable: tuple[Path, ...] = ()
    """Files and folders that functions may read, besides Python's, the system's and their own."""
    environment: tuple[str, ...] = ()
    """Environment variables for functions, besides those that every program needs."""
    log: Path | None = None
    """The file for what functions print; without it only the last line is kept, for errors."""
    namespace: bool = True
    """Give each worker its own process namespace, if the system allows it."""


def check_values(values: object, num_samples: int) -> Values:
    """Check the values that a function returned; raise a ValueError that says what is wrong, a Misfit for a wrong type.

    Runs in the worker, which still has the function's result, and again on the other side of the pipe, because a worker
    cannot be trusted.
    """
    to_list = getattr(values, "tolist", None)
    values = to_list() if callable(to_list) else values
    if not isinstance(values, list | tuple):
        raise Misfit(f"returned {type(values).__name__}, not a list of numbers")
    if len(values) != num_samples:
        raise Misfit(f"returned {len(values)} rewards for {num_samples} completions")
    return [_checked_value(index, value) for index, value in enumerate(values)]


def _checked_value(index: int, value: object) -> float | None:
    item = getattr(value, "item", None)
    value = item() if callable(item) else value
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise Misfit(f"completion {index} got {repr(value)[:100]} ({type(value).__name__}), not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"completion {index} got {repr(value)[:40]}, not a finite number")
    return number


def get_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a completion as text, also if it is a list of chat messages."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def get_column(columns: Mapping[str, Sequence[Any]], name: str, reward: str) -> Sequence[Any]:
    """Get a column of the data; the error lists the columns."""
    if name not in columns:
        there = ", ".join(sorted(set(columns) - set(GIVEN))) or "none"
        raise MissingColumn(
            f"the data has no column {name} (it has {there}): write --answer-key COLUMN for the column that holds the "
            f"answer, or --reward {reward}:COLUMN"
        )
    return columns[name]
