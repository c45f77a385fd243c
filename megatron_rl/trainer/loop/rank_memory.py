"""Counts the memory of a run's largest rank, and prints its bytes as the last line.

python -m megatron_rl.trainer.loop.rank_memory RANKS FLAGS

A rank calls this in a process of its own (`colocation.py`), since a counted model changes megatron's process groups and
random numbers. The process needs no device.
"""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl.command_line import parse as command_line
from megatron_rl.command_line.run import Sizes
from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, MegatronRLError

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.footprint import Footprint, Workload


def count(
    words: Sequence[str], world_size: int, device: int | None = None
) -> "tuple[Settings, Workload, list[Footprint]]":
    """Count the memory of a rank of each pipeline stage, for a run with these flags; other processes have no part.

    If `device` has the bytes of a rank's device, flags that follow from these are derived too.
    """
    # The flags are read as on the ranks of such a run.
    os.environ["LOCAL_WORLD_SIZE"] = str(min(world_size, 8))
    settings, sizes = command_line.parse_sizes(words, world_size, device)
    # Megatron is imported after the platform is installed, which `parse_sizes` has done.
    from megatron_rl.trainer.mcore import footprint

    work = make_workload(sizes, world_size)
    return settings, work, footprint.count(settings, work)


def make_workload(sizes: Sizes, world_size: int) -> "Workload":
    """Return the largest micro-batch that a run can have, and the number of micro-batches in a schedule."""
    from megatron_rl.trainer.mcore.footprint import Workload

    plan = sizes.plan
    num_responses = min(plan.group_size, plan.micro_batch_size)
    group = (sizes.longest_prompt, [sizes.longest_response] * num_responses)
    if not sizes.is_shared:
        # Each response has a prompt of its own.
        groups = [(sizes.longest_prompt, [sizes.longest_response])] * (sizes.division.groups_per_unit * num_responses)
    else:
        groups = [group] * sizes.division.groups_per_unit
    return Workload(world_size, groups, sizes.multiple_of, sizes.division.slots_per_update, plan.num_updates)


def main(words: Sequence[str]) -> int:
    try:
        _, _, footprints = count(words[1:], int(words[0]))
    except MegatronRLError as error:
        # The rank repeats the last line.
        print("; ".join(error.problems), file=sys.stderr)
        return error.exit_code
    print(max(sum(one.device.values()) for one in footprints))
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
