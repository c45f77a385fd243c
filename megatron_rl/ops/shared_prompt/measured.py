"""Measured times of the backends, from which `auto` takes the fastest for the groups of a run.

`measured.json` beside this file has the times that docs/kernels.md shows. `make gpu-bench` writes such a file for the
chip that it runs on. A time counts for groups that are near the measured one, on a chip of the same name.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.errors import UsageError
from megatron_rl.ops.shared_prompt.backends.triton_blocks import read_blocks

SHIPPED = Path(__file__).with_name("measured.json")
# Of a length or a number that is further away than this factor, a measurement says too little.
FARTHEST = 4.0
FLAG = "--shared-prompt-times"


@dataclasses.dataclass(frozen=True)
class GroupShape:
    """The lengths of a group, and the heads of a rank that attend."""

    prompt: int
    response: int
    """The length of a response, or the mean of several lengths."""
    num_responses: int
    num_heads: int
    num_groups: int
    """Heads of keys and values."""
    head_dim: int

    def find_distance(self, other: "GroupShape") -> float | None:
        """Return the number of doublings between the shapes; None if they are too far apart, or heads differ in width.

        Blocks of kernels depend on the width.
        """
        if self.head_dim != other.head_dim:
            return None
        own, theirs = ((*one._sizes, one.num_heads / one.num_groups) for one in (self, other))
        ratios = [abs(math.log2(size / of_other)) for size, of_other in zip(own, theirs, strict=True)]
        return None if max(ratios) > math.log2(FARTHEST) else sum(ratios)

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.prompt, self.response, self.num_responses, self.num_heads


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times of one shape on one chip."""

    chip: str
    """The name that torch has for it."""
    shape: GroupShape
    milliseconds: Mapping[str, float]
    """The time of forward and backward in bf16, by backend."""
    blocks: str | None = None
    """The name of the blocks with which `triton` was fastest; None if no others were tried, or none were faster."""

    @property
    def fastest_first(self) -> list[str]:
        """The backends, ordered by their times."""
        return sorted(self.milliseconds, key=self.milliseconds.__getitem__)

    def __str__(self) -> str:
        shape = self.shape
        return (
            f"{shape.prompt}/{shape.response}/{shape.num_responses} with {shape.num_heads}/{shape.num_groups} heads of "
            f"{shape.head_dim} on {self.chip}"
        )


def find_nearest_measured(chip: str, shape: GroupShape, times: Iterable[Measured]) -> Measured | None:
    """Return the measurement of the chip that is nearest to the shape; None if none is near enough."""
    found = [(distance, one) for one in times if (distance := _find_distance(one, chip, shape)) is not None]
    return min(found, key=lambda pair: pair[0], default=(0.0, None))[1]


def _find_distance(measured: Measured, chip: str, shape: GroupShape) -> float | None:
    return measured.shape.find_distance(shape) if measured.chip == chip else None


def read_times(file: Path = SHIPPED) -> list[Measured]:
    """Read a file that `write_times` wrote; raise a UsageError if it is not one."""
    try:
        return [_read_one(entry) for entry in json.loads(file.read_text())]
    except OSError as error:
        raise UsageError(f"{FLAG} {file} cannot be read: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{FLAG} {file} must be a list of measured times as `make gpu-bench` writes it: "
            f"{type(error).__name__}: {error}"
        ) from error


def write_times(times: Sequence[Measured], file: Path) -> None:
    """Write the file that `read_times` reads."""
    entries = [
        {
            "chip": one.chip,
            **dataclasses.asdict(one.shape),
            "milliseconds": dict(one.milliseconds),
            **({} if one.blocks is None else {"blocks": one.blocks}),
        }
        for one in times
    ]
    file.write_text(json.dumps(entries, indent=1) + "\n")


def _read_one(entry: dict[str, Any]) -> Measured:
    chip, milliseconds, blocks = entry.pop("chip"), entry.pop("milliseconds"), entry.pop("blocks", None)
    if blocks is not None:
        read_blocks(blocks)
    shape = GroupShape(**entry)
    for what, number in (*dataclasses.asdict(shape).items(), *milliseconds.items()):
        if not (isinstance(number, int | float) and 0 < number < math.inf):
            raise ValueError(f"{what} must be a number above 0, not {number!r}")
    return Measured(chip, shape, milliseconds, blocks)
