"""`megatron-rl launch slurm`: one het-job, whose first component has the ranks, and whose second has the agents."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.flag import FlagParser
from megatron_rl.launch.files import HOSTS_FILE, TOKEN_FILE, submit, write_hosts
from megatron_rl.launch.settings import LaunchSettings, add_flags, read_common
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar.hosts import VARIABLE

_SCRIPT_FILE = "job.sh"
_LOGS = "logs"


@dataclasses.dataclass(frozen=True)
class _SlurmSettings:
    """The settings of a launch by Slurm."""

    common: LaunchSettings
    of_both: tuple[str, ...]
    """Flags of sbatch for both components."""
    of_trainer: tuple[str, ...]
    of_engines: tuple[str, ...]
    source: Path | None
    """A shell file that the job reads first."""


def launch(argv: Sequence[str], words: Sequence[str]) -> None:
    """Write the script of the job, print it, and submit it."""
    settings = _parse(argv, words)
    folder = settings.common.folder
    # The run asks for a folder of its own.
    make_private_folder(settings.common.run)
    write_hosts(folder, settings.common.describe_hosts())
    script = folder / _SCRIPT_FILE
    script.write_text(build_script(settings))
    print(script.read_text(), flush=True)
    submit(["sbatch", str(script)], is_dry=settings.common.is_dry)


def build_script(settings: _SlurmSettings) -> str:
    """Return the script of the job."""
    common = settings.common
    folder = common.folder
    shown = {name: shlex.quote(str(folder / name)) for name in (HOSTS_FILE, TOKEN_FILE, _LOGS)}
    agent = common.agent("$SLURMD_NODENAME", shown[TOKEN_FILE], f'{shown[_LOGS]}/"$SLURMD_NODENAME"')
    ranks = common.torchrun("$SLURM_PROCID", "$first")
    devices = [f"--gpus-per-node={common.devices_per_host}"] if common.devices_per_host else []
    every = ["--ntasks-per-node=1", "--exclusive", "--mem=0", *devices, *settings.of_both]
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={common.name} --output={folder / 'job-%j.log'}",
        f"#SBATCH --chdir={Path.cwd()}",
        f"#SBATCH --nodes={common.trainer_hosts} {shlex.join([*every, *settings.of_trainer])}",
        "#SBATCH hetjob",
        # The job outlives a host of engines.
        f"#SBATCH --nodes={common.engine_hosts} --no-kill {shlex.join([*every, *settings.of_engines])}",
        "# Written by `megatron-rl launch slurm`: ranks in the first component, agents of engines in the second.",
        "set -euo pipefail",
        *([] if settings.source is None else [f"source {shlex.quote(str(settings.source.absolute()))}"]),
        f"export {VARIABLE}={shown[HOSTS_FILE]}",
        'export first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)',
        "",
        f"srun --het-group=1 --kill-on-bad-exit=0 --cpu-bind=none --output={folder / 'agent-%N.log'} \\",
        f"    bash -c {shlex.quote(f'exec {agent}')} &",
        "",
        "code=0",
        "srun --het-group=0 --kill-on-bad-exit=1 --cpu-bind=none \\",
        f"    bash -c {shlex.quote(f'exec {ranks}')} || code=$?",
        "",
        "# Agents end their engines, and remove what these have left.",
        'scancel --signal=TERM "$SLURM_JOB_ID+1" || true',
        "wait",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _parse(argv: Sequence[str], words: Sequence[str]) -> _SlurmSettings:
    parser = FlagParser(prog="megatron-rl launch slurm", description=(__doc__ or "").partition(": ")[2])
    add_flags(parser)
    parser.add_argument(
        "--sbatch", help="flags of sbatch for all hosts, as one text: --sbatch='--partition=gpu --time=8:00:00'"
    )
    parser.add_argument("--trainer-sbatch", help="flags of sbatch for the hosts of ranks")
    parser.add_argument("--engine-sbatch", help="flags of sbatch for the hosts of engines")
    parser.add_argument("--source", type=Path, help="a shell file that the job reads first, for modules and variables")
    given = parser.parse_args(list(argv))
    common, problems = read_common(given, words, "slurm")
    source = getattr(given, "source", None)
    if source is not None and not source.is_file():
        problems.append(f"--source {source} must be a file")
    for what, path in (("--out", common.folder), ("the working directory", Path.cwd())):
        if any(character.isspace() for character in str(path)):
            problems.append(f"{what} {path} must have no spaces: Slurm's own lines cannot quote them")
    if problems:
        raise UsageError(*problems)
    both, trainer, engines = (
        tuple(shlex.split(getattr(given, name, ""))) for name in ("sbatch", "trainer_sbatch", "engine_sbatch")
    )
    return _SlurmSettings(common, both, trainer, engines, source)
