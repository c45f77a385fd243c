"""Requests to reward functions, their results and their failures."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.errors import InputError, MegatronRLError

# The arguments of a function besides the columns of the data.
GIVEN = ("prompts", "completions", "completion_ids")
# The name that rewards use for the column of --answer-key.
ANSWER = "answer"

Values = list[float | None]


class Misfit(ValueError):
    """A function that does not fit the data or its task: every completion would fail in the same way."""


class MissingColumn(Misfit):
    """A column that a function needs and the data lacks; the text says what to do."""


class RewardError(MegatronRLError):
    """The failure of a reward function for one group, with function, prompt and reason."""

    def __init__(self, function: str, request: "RewardRequest", reason: str, *, is_at_fault: bool = True) -> None:
        """Make the error; without `is_at_fault` it does not advise to correct the function or substitute a reward."""
        remedy = (
            "; correct the function, or substitute a reward for failures with --reward-on-error" if is_at_fault else ""
        )
        row = f" ({request.row})" if request.row else ""
        super().__init__(f"reward {function} failed for prompt {request.index}{row}: {reason}{remedy}")


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    name: str
    source: str
    """A file, or the name of a ready-made reward."""
    function: str | None = None
    """The function in the file; None for a ready-made reward."""
    argument: str | None = None
    """The argument of a ready-made reward."""
    weight: float = 1.0
    timeout: float = 30.0
    device: str = "cpu"
    """The device of a model."""

    @property
    def is_file(self) -> bool:
        return self.function is not None


@dataclasses.dataclass(frozen=True)
class RewardRequest:
    """A group to score. The prompt is text or a list of chat messages; columns have the row's own values.

    A completion is the text of one turn, or the messages of several.
    """

    index: int
    prompt: str | Sequence[Mapping[str, Any]]
    completions: Sequence[str | Sequence[Mapping[str, Any]]]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    row: str = ""
    """The row's name in its file."""

    def encode(self) -> bytes:
        # Imported here, because workers import this module too and do not need msgspec.
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
            raise InputError(f"prompt {self.index}: a column cannot be passed to rewards as JSON: {error}") from None
        # For these numbers json takes ten times as long as msgspec.
        return b'%s, "completion_ids": %s}' % (text[:-1], msgspec.json.encode(self.completion_ids))


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """A scored group. A component has a function's unweighted values; None means that it does not apply.

    A completion that no function applies to has the reward None, or the one of `on_error`.
    """

    rewards: Values
    components: dict[str, Values]
    seconds: float
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    """The reasons of failures, by function; `on_error` replaced values of these functions."""


def check_values(values: object, num_samples: int) -> Values:
    """Check the values that a function returned; raise a ValueError with the fault, a Misfit for a wrong type.

    Both sides of the pipe call this: the worker, because it still has the function's own result, and the parent,
    because a worker cannot be trusted.
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
    """Return a column of the data; the error for a missing one lists the columns."""
    if name not in columns:
        there = ", ".join(sorted(set(columns) - set(GIVEN))) or "none"
        raise MissingColumn(
            f"the data has no column {name} (it has {there}): write --answer-key COLUMN for the column that holds the "
            f"answer, or --reward {reward}:COLUMN"
        )
    return columns[name]
