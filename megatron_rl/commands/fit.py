"""`megatron-rl doctor --fit`: the memory that a rank of each pipeline stage takes with a run's flags.

megatron-rl doctor --fit RANKS FLAGS

FLAGS are those of pretrain_grpo.py about model, layout and lengths. Data, reward, learning rate and folders may be
missing. With --rollout-colocate the last line divides the device between a rank and an engine.
"""

from typing import TYPE_CHECKING

from megatron_rl.command_line import pack_size
from megatron_rl.command_line.parse import find_platform_name
from megatron_rl.config.settings import Settings
from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.shared.device_memory import GIB
from megatron_rl.sidecar.vllm.flags import is_divided_by_user
from megatron_rl.trainer.loop import rank_memory

if TYPE_CHECKING:
    from megatron_rl.trainer.mcore.footprint import Footprint, Workload

_HOST = "GiB of a rank on the host (publish: of one replica's ranks)"


def main(words: list[str], device_gib: float) -> int:
    """Print the table; return an exit code that says whether every rank fits."""
    if not words or not words[0].isdigit() or not int(words[0]):
        raise UsageError("--fit needs the number of ranks, then the flags of a run: --fit 64 --hf-model MODEL ...")
    # Flags that are planned for devices follow from these, wherever the command runs.
    device = None if find_platform_name(words[1:]) == "cpu" else round(device_gib * GIB)
    settings, work, footprints = rank_memory.count(words[1:], int(words[0]), device)
    for note in settings.notes:
        if note.startswith(pack_size.NOTES):
            print(note)
    for line in describe(settings, work, footprints, device_gib):
        print(line)
    most = max(sum(one.device.values()) for one in footprints)
    if most > device_gib * GIB:
        return ExitCode.RUN
    if settings.rollout.is_colocated and not is_divided_by_user(settings.rollout.vllm_args):
        # If both do not fit, the error has the parts.
        print(rank_memory.divide_device(settings, round(device_gib * GIB), most).describe())
    return ExitCode.OK


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
        numbers = [f"{size / GIB:.2f}" for size in (*one.device.values(), sum(one.device.values()))]
        lines.append(_row(str(one.stage), f"{one.num_parameters / 1e6:,.0f} M", *numbers))
    on_host = [one for one in footprints if any(one.host.values())]
    if on_host:
        lines += ["", _HOST, _row("stage", "", *on_host[0].host)]
        lines += [_row(str(one.stage), "", *(f"{size / GIB:.2f}" for size in one.host.values())) for one in on_host]
    lines += [
        "",
        "Megatron's own layers were counted; TransformerEngine's keep less. Not counted: the device's own context, "
        "buffers of collectives, and gaps between blocks of memory.",
    ]
    large = [one for one in footprints if sum(one.device.values()) > device_gib * GIB]
    for one in large:
        total, most = sum(one.device.values()) / GIB, max(parts, key=one.device.__getitem__)
        lines.append(f"does not fit: stage {one.stage} takes {total:.1f} GiB of {device_gib:g}, most of it {most}")
    return lines if large else [*lines, "fits"]


def _row(first: str, second: str, *others: str) -> str:
    return f"{first:<6}{second:>12}" + "".join(f"{other:>13}" for other in others)
