"""A Slurm cluster of Debian's packages on this machine: each node is a network namespace with a slurmd of its own."""

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.hosts.namespaces import OWN_ADDRESS, Host, network

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
SECONDS = 120.0
_SOCKET = "munge.socket"


class Cluster:
    """The nodes of a cluster, and its commands."""

    def __init__(self, folder: Path, names: Sequence[str], hosts: Sequence[Host]) -> None:
        self.folder = folder
        self.names = names
        self.hosts = hosts
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *words: str, check: bool = True) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout}\n{self.read_logs()}"
        return done.stdout

    def find_states(self, job: str) -> set[str]:
        """Return the states of a job's components; none are left once Slurm has forgotten it."""
        said = self.call("scontrol", "--oneliner", "show", "job", job, check=False)
        return {word.removeprefix("JobState=") for word in said.split() if word.startswith("JobState=")}

    def read_logs(self) -> str:
        """Return the end of what the daemons have logged."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster(folder: Path, names: Sequence[str]) -> Iterator[Cluster]:
    """Start a cluster with these nodes, and end it; skip the test where Slurm is not installed."""
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        pytest.skip(
            f"this host lacks {', '.join(missing)}: Debian's slurmctld, slurmd, slurm-client and munge have them"
        )
    with network(len(names)) as hosts, _named(names, hosts), contextlib.ExitStack() as stack:
        made = Cluster(folder, names, hosts)
        _write_files(made)
        munged = ["munged", "--foreground", "--force"]
        munged += [f"--{what}={folder / name}" for what, name in _MUNGE_FILES.items()]
        _start(stack, made, "munged", munged)
        _wait(made, (folder / _SOCKET).exists, "munge")
        _start(stack, made, "slurmctld", ["slurmctld", "-D"])
        for name, host in zip(names, hosts, strict=True):
            # Processes of a job belong to sessions of their own, and are ended by the slurmd.
            words = ["ip", "netns", "exec", host.namespace, "slurmd", "-D", "-N", name]
            _start(stack, made, f"slurmd-{name}", words)
        _wait(made, lambda: _are_idle(made), "idle nodes")
        yield made


_MUNGE_FILES = {
    "key-file": "munge.key",
    "socket": _SOCKET,
    "pid-file": "munge.pid",
    "log-file": "munge.log",
    "seed-file": "munge.seed",
}


@contextlib.contextmanager
def _named(names: Sequence[str], hosts: Sequence[Host]) -> Iterator[None]:
    """Give the namespaces a file of hosts that has the names of all nodes."""
    # Programs look the machine's own name up.
    text = f"127.0.0.1 localhost {os.uname().nodename}\n" + "".join(
        f"{host.address} {name}\n" for name, host in zip(names, hosts, strict=True)
    )
    folders = [Path("/etc/netns", host.namespace) for host in hosts]
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(text)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _write_files(made: Cluster) -> None:
    folder = made.folder
    folder.mkdir(mode=0o700)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    nodes = "\n".join(
        f"NodeName={name} NodeAddr={host.address} CPUs=1 State=UNKNOWN"
        for name, host in zip(made.names, made.hosts, strict=True)
    )
    # A namespace has a /sys of its own, without a hierarchy of cgroups; the first version's plug-in asks for none.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    for name in made.names:
        (folder / f"spool-{name}").mkdir()
    (folder / "slurm.conf").write_text(f"""
ClusterName=tests
SlurmctldHost={os.uname().nodename.partition(".")[0]}({OWN_ADDRESS})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder / _SOCKET}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
KillWait=30
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")


def _start(stack: contextlib.ExitStack, made: Cluster, name: str, words: Sequence[str]) -> None:
    """Start a daemon in the foreground, and end it with the stack."""
    output = stack.enter_context((made.folder / f"{name}-output.log").open("wb"))
    process = subprocess.Popen(
        words, env=made.environment, cwd=made.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _are_idle(made: Cluster) -> bool:
    said = made.call("sinfo", "--noheader", "--Node", "--format=%T", check=False)
    return said.split() == ["idle"] * len(made.names)


def _wait(made: Cluster, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {SECONDS:g} s\n{made.read_logs()}"
        time.sleep(0.1)
