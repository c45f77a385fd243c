"""`megatron-rl doctor --fit`: the memory that a rank of each pipeline stage takes with a run's flags.

megatron-rl doctor --fit RANKS FLAGS

FLAGS are those of pretrain_grpo.py about model, layout and lengths. Data, reward, learning rate and folders may be
missing.
"""

import os
from typing import TYPE_CHECKING

from megatron_rl.config.command_line import parse as command_line
from megatron_rl.config.command_line.run import Sizes
from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.footprint import Footprint, Workload

_GIB = 1 << 30
_HOST = "GiB of a rank on the host (publish: of one replica's ranks)"


def main(words: list[str], device_gib: float) -> int:
    """Print the table; return an exit code that says whether every rank fits."""
    if not words or not words[0].isdigit() or not int(words[0]):
        raise UsageError("--fit needs the number of ranks, then the flags of a run: --fit 64 --hf-model MODEL ...")
    world_size = int(words[0])
    # The flags are read as on the ranks of such a run.
    os.environ["LOCAL_WORLD_SIZE"] = str(min(world_size, 8))
    settings, sizes = command_line.parse_sizes(words[1:], world_size)
    # Megatron is imported after the platform is installed, which `parse_sizes` has done.
    from megatron_rl.trainer.mcore import footprint

    work = make_workload(sizes, world_size)
    footprints = footprint.count(settings, work)
    for line in describe(settings, work, footprints, device_gib):
        print(line)
    return ExitCode.OK if all(sum(one.device.values()) <= device_gib * _GIB for one in footprints) else ExitCode.RUN


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


def describe(settings: Settings, work: "Workload", footprints: "list[Footprint]", device_gib: float) -> list[str]:
    """Return the lines of a table of the memory, and a note of the memory that is not counted."""
    parts, sizes = list(footprints[0].device), settings.parallel_sizes
    num_tokens = sum(prompt + sum(responses) for prompt, responses in work.lengths)
    lines = [
        f"{work.world_size} ranks: TP {sizes.tensor}, PP {sizes.pipeline}, CP {sizes.context}, EP {sizes.expert}, "
        f"DP {work.world_size // sizes.model}; micro-batches of up to {num_tokens:,} tokens, "
        f"{work.num_micro_batches} a schedule",
        "",
        f"GiB of a rank, of {device_gib:g}, by pipeline stage",
        _row("stage", "parameters", *parts, "all"),
    ]
    for one in footprints:
        numbers = [f"{size / _GIB:.2f}" for size in (*one.device.values(), sum(one.device.values()))]
        lines.append(_row(str(one.stage), f"{one.num_parameters / 1e6:,.0f} M", *numbers))
    on_host = [one for one in footprints if any(one.host.values())]
    if on_host:
        lines += ["", _HOST, _row("stage", "", *on_host[0].host)]
        lines += [_row(str(one.stage), "", *(f"{size / _GIB:.2f}" for size in one.host.values())) for one in on_host]
    lines += [
        "",
        "Megatron's own layers were counted; TransformerEngine's keep less. Not counted: the device's own context, "
        "buffers of collectives, and gaps between blocks of memory.",
    ]
    large = [one for one in footprints if sum(one.device.values()) > device_gib * _GIB]
    for one in large:
        total, most = sum(one.device.values()) / _GIB, max(parts, key=one.device.__getitem__)
        lines.append(f"does not fit: stage {one.stage} takes {total:.1f} GiB of {device_gib:g}, most of it {most}")
    return lines if large else [*lines, "fits"]


def _row(first: str, second: str, *others: str) -> str:
    return f"{first:<6}{second:>12}" + "".join(f"{other:>13}" for other in others)
