"""What an iteration came to, a line of strict JSON each; docs/metrics.md says what the names mean."""

import math
import numbers
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.errors import InputError
from megatron_rl.observe.timeline import START, WHOLE
from megatron_rl.records.append_file import LineFile, read_lines

FILE_NAME = "metrics.jsonl"
# The object that holds durations and throughputs: all that differs between two runs of the same thing.
TIME = "time"
# A hash over what happened when, times included.
_HEAD = "audit_head"
# The whole, and what was before it.
_BESIDE = (WHOLE, START)


class MetricsFile(LineFile):
    """The metrics of a run; see `LineFile` for what a kill leaves and what a resumed run does."""

    def write(self, values: Mapping[str, Any]) -> None:
        """Append the line of an iteration, which "version" names. JSON has no number that is not finite: such a value
        is written as null, and "nonfinite" lists its name.
        """
        nonfinite: list[str] = []
        record = plain(values, "", nonfinite)
        version = record.pop("version")
        self.append(version, {**record, "nonfinite": nonfinite} if nonfinite else record)


def read(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run: of the file, or of the one in a folder."""
    path = run / FILE_NAME if run.is_dir() else run
    records = read_lines(path)
    if not records:
        raise InputError(f"{path} has no line yet: wait for the end of the first iteration")
    return records


def without_times(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What must be equal, bit for bit, in two runs of the same thing in prompt order."""
    return [{name: value for name, value in record.items() if name not in (TIME, _HEAD)} for record in records]


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in nested values, named "group/name"; the version and whatever is no number are left out."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in flat(value).items()}
        elif name != "version" and (number := _number(value)) is not None:
            found[name] = number
    return found


def number_at(values: Mapping[str, Any], *names: str) -> float | None:
    """The number under these nested names; None where there is none."""
    found: Any = values
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return _number(found)


def pass_name(records: Iterable[Mapping[str, Any]]) -> str:
    """What the share of held-out prompts that pass is called, by the responses to each of them."""
    counts = {number_at(record, "evaluation", "num_samples") for record in records} - {None}
    return f"pass@{counts.pop():.0f}" if len(counts) == 1 else "pass"


def start_seconds(records: Iterable[Mapping[str, Any]]) -> float:
    """How long the run took before its first iteration, all of its starts together."""
    return sum(number_at(record, TIME, START) or 0.0 for record in records)


def seconds_by_span(values: Mapping[str, Any]) -> dict[str, float]:
    """Where the time of an iteration went: what of its "time" is a part of it, neither the whole nor a throughput."""
    times = values.get(TIME)
    found = flat(times) if isinstance(times, Mapping) else {}
    return {name: value for name, value in found.items() if name not in _BESIDE and not name.endswith("_per_second")}


def _number(value: Any) -> float | None:
    value = _scalar(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _scalar(value: Any) -> Any:
    """A number of numpy's or torch's as one of Python's."""
    if isinstance(value, bool | int | str) or value is None or type(value) is float:
        return value
    return value.item() if hasattr(value, "item") else float(value) if isinstance(value, numbers.Real) else value


def plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    """The value as strict JSON has it; the names of numbers that it has not are added to `nonfinite`."""
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
