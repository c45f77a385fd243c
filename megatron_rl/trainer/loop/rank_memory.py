"""The memory of a run's ranks: counted without the ranks, and divided with engines (--rollout-colocate).

python -m megatron_rl.trainer.loop.rank_memory RANKS FLAGS

prints the bytes of the largest rank as the last line. A rank calls this in a process of its own, since a counted model
changes megatron's process groups and random numbers. The process needs no device.
"""

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_rl import platforms
from megatron_rl.command_line.run import RunSettings, Sizes
from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, MegatronRLError, UsageError
from megatron_rl.shared import device_memory
from megatron_rl.shared.device_memory import make_look_up, read_engine_needs
from megatron_rl.sidecar.settings import SidecarSettings
from megatron_rl.sidecar.vllm.flags import FLAG, is_divided_by_user

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.footprint import Footprint, Workload

# The count is for megatron's modules on the host; these follow the rank's own flags, and the last value counts.
_ON_HOST = (
    "--platform", "cpu", "--shared-prompt-backend", "auto", "--output-layer-backend", "auto",
    "--elementwise-backend", "auto", "--qkv-backend", "auto", "--linear-attention-backend", "auto",
)  # fmt: skip
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_SECONDS = 300


class RankCount(contextlib.AbstractContextManager["RankCount"]):
    """A count of a rank's memory in a process of its own, while the rank does something else."""

    def __init__(self, settings: RunSettings) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        module = "megatron_rl.trainer.loop.rank_memory"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(settings.world_size or 1), *settings.words, *_ON_HOST],
            # No device is visible, so that the process makes no context on one.
            env={**environment, "CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def wait(self) -> int:
        """Return the bytes of the largest rank; raise a UsageError if they cannot be counted."""
        try:
            output, errors = self._process.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise UsageError(_describe_failure(f"it took more than {_SECONDS} s")) from None
        if self._process.returncode:
            raise UsageError(_describe_failure((errors.strip() or "no reason was given").splitlines()[-1]))
        return int(output.splitlines()[-1])

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def begin_count(settings: RunSettings) -> RankCount | None:
    """Begin to count a rank's memory, unless the user divides the device; the caller closes the count."""
    return None if is_divided_by_user(settings.rollout.vllm_args) else RankCount(settings)


def share_device(settings: RunSettings, count: RankCount | None) -> tuple[SidecarSettings, str]:
    """Return the settings of engines that share the ranks' devices, and a line that says how memory is divided."""
    sidecar = settings.sidecar
    assert sidecar is not None
    if count is None:
        return sidecar, f"device memory: {FLAG} divides it between ranks and engines"
    division = divide_device(settings, platforms.select(settings.platform).memory().total, count.wait())
    return dataclasses.replace(sidecar, memory=division.memory), division.describe()


def divide_device(settings: Settings, device: int, counted: int) -> device_memory.SharedDevice:
    """Divide a device of these bytes between a rank, with its counted bytes, and an engine with these settings."""
    needs = read_engine_needs(make_look_up(settings), settings.architecture)
    divide = device_memory.take_turns if settings.rollout.takes_turns else device_memory.divide
    return divide(device, counted, needs)


def count(
    words: Sequence[str], world_size: int, device: int | None = None
) -> "tuple[Settings, Workload, list[Footprint]]":
    """Count the memory of a rank of each pipeline stage, for a run with these flags; other processes have no part.

    If `device` has the bytes of a rank's device, flags that follow from these are derived too.
    """
    from megatron_rl.command_line.parse import parse_sizes

    # The flags are read as on the ranks of such a run.
    os.environ["LOCAL_WORLD_SIZE"] = str(min(world_size, 8))
    settings, sizes = parse_sizes(words, world_size, device)
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


def _describe_failure(reason: str) -> str:
    return (
        f"{device_memory.FLAG_OF_SHARING}: the memory of a rank could not be counted: {reason}: divide the device "
        f"yourself, with {device_memory.DIVIDED_BY_USER}"
    )


def main(words: Sequence[str]) -> int:
    """Print the bytes of the largest rank; return the exit code."""
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
