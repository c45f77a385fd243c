"""The records of a run that the planner reads: its groups and claims, the use of its time, and its micro-batches.

A trace gives only the lengths of spans, so that no two clocks are compared. docs/metrics.md has the formats.
"""

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron_rl.analysis.plan.costs import Talk
from megatron_rl.errors import InputError, check_writer
from megatron_rl.observe.metrics import (
    DRAFTED,
    ENVIRONMENT_MEAN,
    ENVIRONMENT_P95,
    MAX_IN_FLIGHT,
    number_at,
)
from megatron_rl.observe.trace import FORMAT

_MICROSECOND = 1e-6

_Slot = tuple[int, int, int]
"""Version, replica, index."""


@dataclasses.dataclass(frozen=True)
class RecordedGroup:
    """A group from the audit log."""

    index: int
    engine: str
    finished: float
    lengths: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Claimed:
    """A claim of a replica's slots."""

    time: float
    replica: int
    index: int
    groups: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class RecordedIteration:
    """An iteration of a run."""

    version: int
    submitted: float
    completed: float
    groups: Sequence[RecordedGroup]
    claims: Sequence[Claimed]
    seconds: Mapping[str, float]
    """Seconds of its parts, by their names in metrics.jsonl, and of "iteration", the whole."""
    prompt: float
    """Mean tokens of a prompt."""
    max_in_flight: int | None = None
    """The most responses that each engine was given at once, if the metrics have it."""
    talk: Talk = Talk()
    has_drafts: bool = False
    """True if engines drafted tokens."""

    @property
    def sampling(self) -> float:
        """Return the seconds from the submission to the last group."""
        return max(group.finished for group in self.groups) - self.submitted


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run without its first iteration, which warms up."""

    name: str
    num_prompts: int
    group_size: int
    micro_batch_size: int
    num_replicas: int
    num_updates: int
    in_prompt_order: bool
    num_engines: int
    iterations: Sequence[RecordedIteration]

    @property
    def iteration_seconds(self) -> float:
        """Return an iteration's median seconds."""
        return statistics.median(one.seconds["iteration"] for one in self.iterations)

    @property
    def talk(self) -> Talk:
        """Return the conversations of its iterations, in the mean."""
        talks = [one.talk for one in self.iterations]
        fields = dataclasses.fields(Talk)
        return Talk(**{field.name: statistics.fmean(getattr(one, field.name) for one in talks) for field in fields})

    @property
    def mean_length(self) -> float:
        lengths = [length for one in self.iterations for group in one.groups for length in group.lengths]
        return sum(lengths) / len(lengths)


def read_record(
    name: str, metrics: Iterable[Mapping[str, Any]], audit: Iterable[Mapping[str, Any]], num_skipped: int = 1
) -> RunRecord:
    """Combine a run's metrics.jsonl and audit.jsonl, and leave its first iterations out."""
    by_version = {line["version"]: line for line in metrics if "tokens" in line}
    found: dict[int, dict[str, Any]] = {}
    for event in audit:
        kind, version = event.get("event"), event.get("version", -1)
        if kind == "submit":
            # A version that is submitted again restarts.
            found[version] = {"submit": event, "groups": [], "claims": []}
        elif version in found and kind in ("group", "claim"):
            found[version][f"{kind}s"].append(event)
        elif version in found and kind == "complete":
            found[version]["complete"] = event
    whole = sorted(version for version, events in found.items() if "complete" in events and version in by_version)
    kept = [version for version in whole[num_skipped:] if not _is_restored(found[version])]
    if not kept:
        raise InputError(
            f"{name} has no whole iteration after the first {num_skipped}: plan needs its metrics.jsonl and "
            "audit.jsonl, with 2 iterations or more"
        )
    plan = found[kept[0]]["submit"]["plan"]
    iterations = [_make_iteration(found[version], by_version[version]) for version in kept]
    return RunRecord(
        name=name,
        num_prompts=plan["num_prompts"],
        group_size=plan["group_size"],
        micro_batch_size=plan["micro_batch_size"],
        num_replicas=plan["num_replicas"],
        num_updates=plan["num_updates"],
        in_prompt_order=plan["order"] == "prompt",
        num_engines=len({group.engine for one in iterations for group in one.groups}),
        iterations=iterations,
    )


def _is_restored(events: Mapping[str, Any]) -> bool:
    """Check whether groups came from a journal, so that they were not sampled in this time."""
    return any(event.get("is_restored") for event in events["groups"])


def _make_iteration(events: Mapping[str, Any], metrics: Mapping[str, Any]) -> RecordedIteration:
    groups = [
        RecordedGroup(
            index=event["prompt"],
            engine=event["responses"][0]["engine"],
            finished=event["time"],
            lengths=tuple(response["num_tokens"] for response in event["responses"]),
        )
        for event in events["groups"]
    ]
    claims = [
        Claimed(event["time"], event["replica"], event["index"], tuple(event["prompts"])) for event in events["claims"]
    ]
    seconds = {name: value for name, value in metrics["time"].items() if not name.endswith("_per_second")}
    max_in_flight = seconds.pop(MAX_IN_FLIGHT, None)
    answer, _ = seconds.pop(ENVIRONMENT_MEAN, 0.0), seconds.pop(ENVIRONMENT_P95, None)
    return RecordedIteration(
        version=metrics["version"],
        submitted=events["submit"]["time"],
        completed=events["complete"]["time"],
        groups=groups,
        claims=claims,
        seconds=seconds,
        prompt=metrics["tokens"]["prompt"] / metrics["groups"],
        max_in_flight=max_in_flight,
        talk=_describe_talk(metrics, answer),
        has_drafts=DRAFTED in metrics["time"],
    )


def _describe_talk(metrics: Mapping[str, Any], answer: float) -> Talk:
    tokens, turns = metrics["tokens"], number_at(metrics, "responses", "turns")
    if turns is None:
        return Talk()
    given = tokens.get("environment", 0)
    return Talk(turns, given / max(1, given + tokens["response"]), answer)


# The trace.


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A slot of a replica, with the seconds of the policy's passes over all stages."""

    version: int
    replica: int
    slot: int
    tokens: int
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class TraceRecord:
    """The part of a trace that the planner uses."""

    num_stages: int
    micro_batches: list[MicroBatch]
    max_running: int | None
    """The largest number of responses that an engine samples at once; None without the sidecar's trace."""


def read_trace_record(lines: Iterable[Mapping[str, Any]]) -> TraceRecord | None:
    """Read the lines of all files of a trace; return None if there are none."""
    # By slot, then by stage and name: a number from each rank of the stage.
    seconds: defaultdict[_Slot, defaultdict[tuple[int, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    tokens: dict[_Slot, int] = {}
    bounds: list[int] = []
    num_stages = num_read = 0
    for line in lines:
        check_writer("the trace", line.get("format"), FORMAT, "plan with that version, or move the trace away")
        num_read += 1
        stage = line.get("stage") or 0
        num_stages = max(num_stages, stage + 1)
        bounds += (line.get("engines") or {}).values()
        of_line: defaultdict[tuple[_Slot, str], float] = defaultdict(float)
        for kind, _, length, *details in line["spans"]:
            of_kind = line["kinds"][kind]
            if of_kind["lane"] == "compute" and of_kind.get("role", "policy") == "policy" and details:
                slot = (line["version"], line.get("replica") or 0, details[0])
                of_line[slot, of_kind["name"]] += length * _MICROSECOND
                if len(details) > 1 and details[1]:
                    tokens[slot] = details[1]
        for (slot, name), spent in of_line.items():
            seconds[slot][stage, name].append(spent)
    if not num_read:
        return None
    micro_batches = [
        MicroBatch(*slot, tokens[slot], _sum(of_slot, "forward"), _sum(of_slot, "backward"))
        for slot, of_slot in sorted(seconds.items())
        if slot in tokens and len(of_slot) == 2 * num_stages
    ]
    return TraceRecord(num_stages, micro_batches, max(bounds, default=None))


def _sum(of_slot: Mapping[tuple[int, str], list[float]], name: str) -> float:
    """Sum the seconds over stages; the ranks of a stage count with their mean."""
    return sum(sum(spent) / len(spent) for (_, of_name), spent in of_slot.items() if of_name == name)
