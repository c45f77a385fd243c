"""What a run's trace says of its micro-batches: how long each was computed, forward and backward.

docs/metrics.md has the format. Only lengths of spans are used, so that no two clocks are compared.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

_FORMAT = 1
_MICROSECOND = 1e-6

_Slot = tuple[int, int, int]
"""Version, replica, index."""


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """A slot of a replica, as the policy went through it, over all stages."""

    version: int
    replica: int
    slot: int
    tokens: int
    forward: float
    backward: float


@dataclasses.dataclass(frozen=True)
class TraceRecord:
    """What is taken from a trace."""

    num_stages: int
    micro_batches: list[MicroBatch]
    max_in_flight: int | None
    """The most responses that an engine sampled at a time; None if the sidecar's trace is not there."""


def read_trace(lines: Iterable[Mapping[str, Any]]) -> TraceRecord | None:
    """Read the lines of all files of a trace; None if there is none of a format that is known."""
    # By slot, then by stage and name: a number from each rank of the stage.
    seconds: defaultdict[_Slot, defaultdict[tuple[int, str], list[float]]] = defaultdict(lambda: defaultdict(list))
    tokens: dict[_Slot, int] = {}
    bounds: list[int] = []
    num_stages = num_read = 0
    for line in lines:
        if line.get("format") != _FORMAT:
            continue
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
    """Over stages; of the ranks of a stage the mean."""
    return sum(sum(spent) / len(spent) for (_, of_name), spent in of_slot.items() if of_name == name)
