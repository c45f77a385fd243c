"""The settings of `megatron-rl launch`: its flags, and the words of the trainer after `--`."""

import argparse
import dataclasses
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.errors import PlatformError, UsageError, packages_checked
from megatron_rl.flag_parser import FlagParser
from megatron_rl.launch.files import HOSTS_FILE, TOKEN_FILE, write_hosts
from megatron_rl.sidecar.hosts import DEFAULT_PORT
from megatron_rl.sidecar.hosts import FLAG as FLAG_OF_HOSTS

USAGE = "write megatron-rl launch SCHEDULER FLAGS -- pretrain_grpo.py FLAGS"
_PROGRAM = "pretrain_grpo.py"
_FOLDER = "--rollout-folder"
_SAVE = "--save"
_LISTEN = "--rollout-listen"
_NUM_ENGINES = "--rollout-num-engines"
_TENSOR_PARALLEL = "--rollout-tensor-parallel-size"
# A file of hosts that the check of a run's flags can read before the launch has written its own.
_ANY_HOST = f'token_file = "{TOKEN_FILE}"\n[every_host]\nengines = 1\n'
SERVICE_PORT = 7099
"""The port of a sidecar that ranks on other hosts reach."""
RENDEZVOUS_PORT = 29400
"""The port at which the ranks of all hosts meet."""
# The names of objects of Kubernetes and of jobs; it leaves room for what is appended.
_NAME = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")


@dataclasses.dataclass(frozen=True)
class LaunchSettings:
    """The checked settings of a launch on any scheduler."""

    name: str
    words: tuple[str, ...]
    """The trainer's words after those of torchrun, complete."""
    run: Path
    """The run's folder."""
    folder: Path
    """The folder of the files that a launch writes."""
    python: str
    trainer_hosts: int
    ranks_per_host: int
    engine_hosts: int
    engines_per_host: int
    hosts_per_engine: int
    devices_per_host: int
    port: int
    """The port of the agents."""
    engine_python: str
    is_dry: bool

    def torchrun(self, rank: str, first: str) -> str:
        """Return the trainer's command for a shell, with its words for a host's rank and the first host's name."""
        words = [self.python, "-m", "torch.distributed.run", "--nnodes", str(self.trainer_hosts)]
        words += ["--nproc-per-node", str(self.ranks_per_host)]
        place = f'--node-rank "{rank}" --master-addr "{first}" --master-port {RENDEZVOUS_PORT}'
        return f"{shlex.join(words)} {place} {shlex.join(self.words)}"

    def agent(self, address: str, token: str, logs: str) -> str:
        """Return the command of an agent for a shell, with its words for address, token's file and folder of logs."""
        words = [self.python, "-m", "megatron_rl.sidecar.agent"]
        return f'{shlex.join(words)} --listen "{address}:{self.port}" --token-file {token} --folder {logs}'

    def describe_hosts(self, kind: str = "", table: str = "") -> str:
        """Return the file of hosts, with what one kind of scheduler needs besides."""
        lines = [
            'token_file = "token"',
            "",
            "[every_host]",
            f"port = {self.port}",
            f"engines = {self.engines_per_host}",
        ]
        if self.devices_per_host:
            num_devices = self.engines_per_host * find_size(self.words) // self.hosts_per_engine
            lines.append(f"devices = {list(range(num_devices))}")
        if self.hosts_per_engine > 1:
            lines.append(f"hosts_per_engine = {self.hosts_per_engine}")
        if self.engine_python:
            lines.append(f'python = "{self.engine_python}"')
        return "\n".join([*lines, *(["", f"[{kind}]", table] if kind else [])]) + "\n"


def add_flags(parser: FlagParser) -> None:
    """Add the flags that each scheduler has."""
    parser.add_argument("--name", help="the name of the job; that of the run's folder if not given")
    parser.add_argument("--trainer-hosts", type=int, help="hosts of ranks; 1 if not given")
    parser.add_argument("--engine-hosts", type=int, help="hosts of engines")
    parser.add_argument("--devices-per-host", type=int, help="accelerators of a host; 8 if not given, 0 for CPUs")
    parser.add_argument("--ranks-per-host", type=int, help="ranks on a host; one for each accelerator if not given")
    parser.add_argument(
        "--engines-per-host", type=int, help="engines on a host; those that its accelerators suffice for"
    )
    parser.add_argument("--hosts-per-engine", type=int, help="hosts that each engine is divided over; 1 if not given")
    parser.add_argument("--port", type=int, help=f"the agents' port; {DEFAULT_PORT} if not given")
    parser.add_argument("--python", help="the Python of ranks and agents")
    parser.add_argument("--engine-python", help="the Python that has vLLM; the agents' own if not given")
    parser.add_argument("--out", type=Path, help="the folder of the files that are written")
    parser.add_argument("--dry-run", action="store_true", help="write and print the files, and start nothing")


def read_common(
    given: argparse.Namespace, words: Sequence[str], scheduler: str, python: str = sys.executable
) -> tuple[LaunchSettings, list[str]]:
    """Return the settings that each scheduler has, and all mistakes in them."""
    problems = list(_check_words(words))
    run = _find_run(words)
    if run is None:
        problems.append(f"{_FOLDER} is missing after --: name the run's folder, which all hosts of ranks share")
        run = Path("run")
    devices = getattr(given, "devices_per_host", 8)
    num_ranks = getattr(given, "trainer_hosts", 1) * getattr(given, "ranks_per_host", devices)
    problems += _check_run(_complete([*words, _FOLDER, str(run)], scheduler, 1), max(1, num_ranks))
    together = getattr(given, "hosts_per_engine", 1)
    size = find_size(words)
    if together < 1 or size % together or getattr(given, "engine_hosts", 0) % together:
        problems.append(
            f"--hosts-per-engine {together} must divide {_TENSOR_PARALLEL} {size} and --engine-hosts: write another"
        )
        together = 1
    size //= together
    settings = LaunchSettings(
        name=getattr(given, "name", run.name.lower().replace("_", "-")),
        words=_complete(words, scheduler, getattr(given, "trainer_hosts", 1)),
        run=run.absolute(),
        folder=getattr(given, "out", run / "launch").absolute(),
        python=getattr(given, "python", python),
        trainer_hosts=getattr(given, "trainer_hosts", 1),
        ranks_per_host=getattr(given, "ranks_per_host", devices),
        engine_hosts=getattr(given, "engine_hosts", 0),
        engines_per_host=getattr(given, "engines_per_host", devices // size or 1),
        hosts_per_engine=together,
        devices_per_host=devices,
        port=getattr(given, "port", DEFAULT_PORT),
        engine_python=getattr(given, "engine_python", ""),
        is_dry="dry_run" in given,
    )
    return settings, [*problems, *_check(settings, size)]


def _check_words(words: Sequence[str]) -> Iterator[str]:
    if not words:
        yield f"the trainer's command is missing: {USAGE}"
    elif Path(words[0]).name == "torchrun" or "torch.distributed.run" in words:
        yield f"{words[0]} must not stand after --, since the launch starts the ranks: {USAGE}"
    if _find(words, FLAG_OF_HOSTS) is not None:
        yield f"{FLAG_OF_HOSTS} must not be given after --: the launch writes it"


def _check_run(words: Sequence[str], num_ranks: int) -> list[str]:
    """Return all mistakes that the run would find in its flags; those of another program are not checked."""
    flags = _find_flags(words)
    if flags is None:
        return []
    model = _find(flags, "--hf-model")
    has_files = model is not None and Path(model).is_dir()
    if model is not None and not has_files:
        print(f"megatron-rl launch: {model} is not on this machine: only flags were checked", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        write_hosts(Path(folder), _ANY_HOST)
        found = [FLAG_OF_HOSTS, f"slurm:{folder}/{HOSTS_FILE}"]
        try:
            with packages_checked():
                # Imported here: a machine that only submits jobs may lack torch and megatron-core.
                from megatron_rl.command_line.parse import list_problems

                return list_problems([*flags, *found], num_ranks, has_files)
        except PlatformError as error:
            print(f"megatron-rl launch: the run's flags were not checked: {error}", file=sys.stderr)
            return []


def _find_flags(words: Sequence[str]) -> Sequence[str] | None:
    """Return the flags of this package's program; None if the words start another one."""
    for place, word in enumerate(words):
        if Path(word).name == _PROGRAM or list(words[place - 1 : place + 1]) == ["-m", "megatron_rl"]:
            return words[place + 1 :]
    return None


def _check(settings: LaunchSettings, size: int) -> Iterator[str]:
    if not _NAME.fullmatch(settings.name):
        yield f"--name {settings.name} must have small letters, digits and hyphens, 40 at most: write another"
    for flag, value in (
        ("--trainer-hosts", settings.trainer_hosts),
        ("--engine-hosts", settings.engine_hosts),
        ("--ranks-per-host", settings.ranks_per_host),
        ("--engines-per-host", settings.engines_per_host),
    ):
        if value < 1:
            yield f"{flag} {value} must be at least 1: write the number"
    if settings.devices_per_host < 0:
        yield f"--devices-per-host {settings.devices_per_host} must be at least 0: write 0 for CPUs"
    elif settings.devices_per_host and settings.engines_per_host * size > settings.devices_per_host:
        yield (
            f"--engines-per-host {settings.engines_per_host} with {size} accelerators each must not need more than the "
            f"{settings.devices_per_host} of a host: lower one of the two"
        )
    if not 1 <= settings.port <= 65534:
        yield f"--port {settings.port} must be from 1 to 65534: agents take weights at the port after it"


def _complete(words: Sequence[str], scheduler: str, trainer_hosts: int) -> tuple[str, ...]:
    """Add the words that follow from the launch."""
    added = [FLAG_OF_HOSTS, scheduler]
    if _find(words, _NUM_ENGINES) is None:
        added += [_NUM_ENGINES, "0"]
    if trainer_hosts > 1 and _find(words, _LISTEN) is None:
        added += [_LISTEN, f"0.0.0.0:{SERVICE_PORT}"]
    return (*words, *added)


def find_size(words: Sequence[str]) -> int:
    """Return the number of accelerators of an engine."""
    size = _find(words, _TENSOR_PARALLEL) or "1"
    if not size.isdigit() or int(size) < 1:
        raise UsageError(f"{_TENSOR_PARALLEL} {size} must be at least 1")
    return int(size)


def _find_run(words: Sequence[str]) -> Path | None:
    """Return the run's folder, by the rule of the trainer."""
    folder, save = _find(words, _FOLDER), _find(words, _SAVE)
    if folder is None and save is not None:
        return Path(save, "rollout", Path(save).resolve().name)
    return None if folder is None else Path(folder)


def _find(words: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag among words."""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None
