"""`megatron-rl launch slurm`: one het-job, whose first component has the ranks, and whose second has the agents."""

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.errors import UsageError
from megatron_rl.flag_parser import FlagParser
from megatron_rl.launch.files import HOSTS_FILE, TOKEN_FILE, fill_template, submit, write_hosts
from megatron_rl.launch.settings import LaunchSettings, add_flags, read_common
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar.hosts import VARIABLE

_SCRIPT_FILE = "job.sh"
_LOGS = "logs"


@dataclasses.dataclass(frozen=True)
class _SlurmSettings:
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
    script.write_text(_fill_script(settings))
    print(script.read_text(), flush=True)
    submit(["sbatch", str(script)], is_dry=settings.common.is_dry)


def _fill_script(settings: _SlurmSettings) -> str:
    common = settings.common
    hosts, token, logs = (shlex.quote(str(common.folder / name)) for name in (HOSTS_FILE, TOKEN_FILE, _LOGS))
    devices = [f"--gpus-per-node={common.devices_per_host}"] if common.devices_per_host else []
    every = ["--ntasks-per-node=1", "--exclusive", "--mem=0", *devices, *settings.of_both]
    agent = common.agent("$SLURMD_NODENAME", token, f'{logs}/"$SLURMD_NODENAME"')
    ranks = common.torchrun("$SLURM_PROCID", "$first")
    return fill_template(
        _SCRIPT_FILE,
        name=common.name,
        folder=common.folder,
        directory=Path.cwd(),
        trainer_hosts=common.trainer_hosts,
        trainer_flags=shlex.join([*every, *settings.of_trainer]),
        engine_hosts=common.engine_hosts,
        engine_flags=shlex.join([*every, *settings.of_engines]),
        source=f"source {shlex.quote(str(settings.source.absolute()))}\n" if settings.source else "",
        hosts_variable=VARIABLE,
        hosts=hosts,
        agent=shlex.quote(f"exec {agent}"),
        ranks=shlex.quote(f"exec {ranks}"),
    )


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
