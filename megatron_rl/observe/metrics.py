"""The results of iterations, a line of strict JSON for each; docs/metrics.md explains the names."""

import math
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.observe.timeline import START, WHOLE
from megatron_rl.shared.records.append_file import LineFile, read_lines

FILE_NAME = "metrics.jsonl"
# The object with durations, throughputs and what follows from them, the only one that differs between identical runs.
TIME = "time"
# A hash over all events, their times included.
_HEAD = "audit_head"
# The most responses that each engine was given at once: a choice that follows from times, and differs like them.
MAX_IN_FLIGHT = "max_in_flight"
# Seconds in which environments answer a turn.
ENVIRONMENT_MEAN = "environment_mean"
ENVIRONMENT_P95 = "environment_p95"
# Drafts of tokens that engines checked: a resumed run has fewer, because finished groups are not sampled again.
DRAFTED, ACCEPTED, ACCEPTED_LENGTH = "drafted_tokens", "accepted_tokens", "accepted_length"
# Not parts of an iteration: the whole, the time before the first one, a number of responses, times of answers, drafts.
BESIDE = (
    WHOLE, START, MAX_IN_FLIGHT, ENVIRONMENT_MEAN, ENVIRONMENT_P95, DRAFTED, ACCEPTED, ACCEPTED_LENGTH,
)  # fmt: skip


class MetricsFile(LineFile):
    """The metrics of a run; see `LineFile` for what a kill leaves and what a resumed run does."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Append the line of an iteration, which "version" names.

        JSON has only finite numbers: any other is written as null, and "nonfinite" lists its name.
        """
        nonfinite: list[str] = []
        record = plain(values, "", nonfinite)
        version = record.pop("version")
        self.append(version, {**record, "nonfinite": nonfinite} if nonfinite else record)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run, given its file or folder."""
    path = run / FILE_NAME if run.is_dir() else run
    records = read_lines(path)
    if not records:
        raise InputError(f"{path} has no line yet: wait for the end of the first iteration")
    return records


def without_times(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the values that must be equal, bit for bit, in two identical runs in prompt order."""
    return [{name: value for name, value in record.items() if name not in (TIME, _HEAD)} for record in records]


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Flatten nested values to numbers named "group/name"; leave out the version and values that are not numbers."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in flat(value).items()}
        elif name != "version" and (number := _number(value)) is not None:
            found[name] = number
    return found


def number_at(values: Mapping[str, Any], *names: str) -> float | None:
    """Return the number under these nested names; None if it does not exist."""
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return _number(found)


def pass_name(records: Iterable[Mapping[str, Any]]) -> str:
    """Name the share of held-out prompts that pass: pass@k, for k responses to each."""
    counts = {number_at(record, "evaluation", "num_samples") for record in records} - {None}
    return f"pass@{counts.pop():.0f}" if len(counts) == 1 else "pass"


def start_seconds(records: Iterable[Mapping[str, Any]]) -> float:
    """Sum the seconds before the first iteration, over all of the run's starts."""
    return sum(number_at(record, TIME, START) or 0.0 for record in records)


def seconds_by_span(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of an iteration's "time": neither the whole nor throughputs."""
    times = values.get(TIME)
    found = flat(times) if isinstance(times, Mapping) else {}
    return {name: value for name, value in found.items() if name not in BESIDE and not name.endswith("_per_second")}


def _number(value: Any) -> float | None:
    value = _scalar(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _scalar(value: Any) -> Any:
    """Convert a number of numpy's or torch's to one of Python's."""
    if isinstance(value, bool | int | str) or value is None or type(value) is float:
        return value
    return value.item() if hasattr(value, "item") else float(value) if isinstance(value, numbers.Real) else value


def plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    """Convert the value to strict JSON; add the names of numbers that JSON does not have to `nonfinite`."""
    if isinstance(value, Mapping):
        prefix = f"{name}/" if name else ""
        return {key: plain(inner, f"{prefix}{key}", nonfinite) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, f"{name}/{index}", nonfinite) for index, inner in enumerate(value)]
    value = _scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite.append(name)
        return None
    return value
