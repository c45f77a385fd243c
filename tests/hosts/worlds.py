"""A supervisor whose engines are stand-ins on the hosts of agents."""

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.sidecar import parent
from megatron_rl.sidecar.agent.messages import TIMEOUTS, Timeouts
from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.hosts import HostList, HostPlace
from megatron_rl.sidecar.hosts.factory import HostsFactory
from megatron_rl.sidecar.hosts.membership import Hosts, Membership
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.supervisor import Supervisor, SupervisorConfig
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.server import ServerConfig
from tests.hosts.standin_agent import SLOW
from tests.processes import ROOT
from tests.sidecar.fake_engines import weights
from tests.sidecar.sidecar_process import alive

TOKEN = "0123456789abcdef"
SERVED_SECONDS = 120.0

Popen = Callable[..., "subprocess.Popen[bytes]"]


def find_free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


class Agent:
    """The process of an agent, which may be killed and started again."""

    program: Sequence[str] = ("-m", "tests.hosts.standin_agent")

    def __init__(self, folder: Path, address: str, popen: Popen = subprocess.Popen, inside: Path | None = None) -> None:
        """Make an agent; it sees its folder as `inside`, if that differs."""
        self.address = address
        self.folder = folder
        self.slow: dict[str, float] = {}
        """The seconds of the steps of its first engine."""
        self.process: subprocess.Popen[bytes] | None = None
        self._popen = popen
        self._inside = inside or folder
        folder.mkdir(mode=0o700)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def start(self) -> None:
        words = [sys.executable, *self.program, "--listen", self.address]
        words += ["--token-file", str(self._inside / "token"), "--folder", str(self._inside)]
        with (self.folder / "output").open("ab") as output:
            self.process = self._popen(
                words,
                cwd=ROOT,
                env={**os.environ, SLOW: json.dumps(self.slow), parent.VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait(self) -> None:
        """Wait until it serves."""
        host, port = self.address.split(":")
        deadline = time.monotonic() + SERVED_SECONDS
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, self.output
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
                return
            time.sleep(0.05)
        raise AssertionError(self.output)

    def list_engine_processes(self) -> list[psutil.Process]:
        """Return all processes of its engines."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        # Two others wait for the agent's end, to remove what it leaves.
        return [process for process in children if process.name() not in ("sh", "cat")]

    def await_no_engines(self, seconds: float) -> None:
        """Wait until its engines have ended, as they do at the latest when their lease has lapsed."""
        deadline = time.monotonic() + seconds
        while processes := self.list_engine_processes():
            assert time.monotonic() < deadline, processes
            time.sleep(0.1)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Ask it to end, and wait for that."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(SERVED_SECONDS)


@contextlib.contextmanager
def running(made: Sequence[Agent]) -> Iterator[None]:
    """Start agents; at the end, nothing of them is left, and their output is shown."""
    for agent in made:
        agent.start()
    try:
        for agent in made:
            agent.wait()
        yield
    finally:
        for agent in made:
            agent.end()
            print(agent.output)


@contextlib.contextmanager
def agents(
    folder: Path,
    addresses: Sequence[str],
    popens: Sequence[Popen] = (),
    slow: Mapping[str, float] | None = None,
) -> Iterator[list[Agent]]:
    """Run an agent at each address. The steps of the first engine of the first one last as long as `slow` says."""
    made = [
        Agent(folder / f"host-{number}", address, *popens[number : number + 1])
        for number, address in enumerate(addresses)
    ]
    made[0].slow = dict(slow or {})
    with running(made):
        yield made


def write_hosts(folder: Path, agents: Sequence[Agent], *lines: str) -> Path:
    """Write a file of static hosts, with these lines for each, and that of their token; return its path."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    named = ["\n".join(["[[host]]", f'address = "{agent.address}"', *lines, ""]) for agent in agents]
    (folder / "hosts.toml").write_text("\n".join(['token_file = "token"', *named]))
    return folder / "hosts.toml"


@dataclasses.dataclass
class World:
    """A supervisor over hosts with an engine each."""

    supervisor: Supervisor
    hosts: Hosts
    membership: Membership
    folder: Path
    """The folder of the weights, which the hosts share."""

    async def publish(self, version: int = 1) -> None:
        await self.supervisor.publish(weights(version, str(self.folder)))

    def engine(self, number: int = 0) -> Any:
        return self.supervisor._members[f"engine-{number}"].engine

    def error(self, number: int = 0) -> str:
        error: str = self.supervisor.status()["engines"][f"engine-{number}"]["error"]
        return error

    def is_ready(self, number: int = 0) -> bool:
        return self.engine(number).state is EngineState.READY


@contextlib.asynccontextmanager
async def serving(
    folder: Path, addresses: Sequence[str], token: str = TOKEN, timeouts: Timeouts = TIMEOUTS, run: str = "run"
) -> AsyncIterator[World]:
    """Make a supervisor over these agents, without an engine yet."""
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = ServerConfig(model=str(model), max_model_len=512)
    sockets = make_socket_folder()
    hosts = Hosts(HostList(tuple(HostPlace(address) for address in addresses), token), run, timeouts)
    own = VllmFactory(config, sockets, LocalLauncher())
    factory = HostsFactory(own, 0, hosts.all, config)
    supervisor = Supervisor(factory, SupervisorConfig(first_pause=0.1, watch_seconds=0.2))
    hosts.open()
    try:
        yield World(supervisor, hosts, Membership(hosts, factory, supervisor), model)
    finally:
        await supervisor.close()
        await hosts.close()
        shutil.rmtree(sockets)


async def until(condition: Callable[[], object], seconds: float = SERVED_SECONDS) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def until_gone(processes: list[psutil.Process], seconds: float = SERVED_SECONDS) -> None:
    """Wait until none of the processes runs."""
    await until(lambda: not alive(processes), seconds)
