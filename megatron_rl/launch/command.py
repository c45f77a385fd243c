"""`megatron-rl launch SCHEDULER FLAGS -- pretrain_grpo.py FLAGS`: start a run on many hosts.

SCHEDULER is slurm or kubernetes. The words after -- are those of the trainer, as torchrun takes them. The launch adds
the flags that name its hosts. It writes a token and the files that the scheduler takes beside the run, and hands these
over; with --dry-run it prints them. `megatron-rl launch SCHEDULER --help` lists the flags.
"""

from collections.abc import Callable, Mapping, Sequence

from megatron_rl.errors import ExitCode, UsageError
from megatron_rl.launch import kubernetes, slurm
from megatron_rl.launch.settings import USAGE

_SCHEDULERS: Mapping[str, Callable[[Sequence[str], Sequence[str]], None]] = {
    "slurm": slurm.launch,
    "kubernetes": kubernetes.launch,
}


def main(argv: Sequence[str]) -> int:
    """Launch a run, or print what would be launched."""
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        return ExitCode.OK if argv else ExitCode.USAGE
    scheduler, *rest = argv
    if scheduler not in _SCHEDULERS:
        raise UsageError(f"{scheduler} must be one of {', '.join(_SCHEDULERS)}: {USAGE}")
    place = rest.index("--") if "--" in rest else len(rest)
    _SCHEDULERS[scheduler](rest[:place], rest[place + 1 :])
    return ExitCode.OK
