"""Agents as actors of a Ray cluster: `--rollout-hosts ray`.

Each host of engines is a placement group of one bundle, with an actor that starts an agent and nothing else. All that
follows is between service and agent, and Ray has no part in it. If a node is lost, Ray gives its group another one. The
actor and its agent start there, under another address.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from megatron_rl.errors import ExitCode, MegatronRLError
from megatron_rl.shared.records.append_file import make_private_folder
from megatron_rl.sidecar import parent
from megatron_rl.sidecar.hosts import FLAG, HostList
from megatron_rl.sidecar.hosts.sources import read_alike

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
_NEWS_SECONDS = 30.0
_SERVED_SECONDS = 120.0
_END_SECONDS = 60.0
_NUM_PORTS = 16


class NoRoomInCluster(MegatronRLError):
    """A Ray cluster has no room for a host, or an agent did not start on it."""

    exit_code = ExitCode.RUN


@dataclasses.dataclass(frozen=True)
class RayHosts:
    """The hosts that a run asks of a Ray cluster."""

    hosts: int
    cpus: int = 1
    """The processors of each host."""
    address: str = "auto"
    """The address of the cluster; `auto` is the one that this host belongs to."""


class RaySource:
    def __init__(self, text: str, tensor_parallel_size: int) -> None:
        is_installed = importlib.util.find_spec("ray") is not None
        missing = f"{FLAG} {text}: ray is not installed: pip install 'megatron-rl[ray]'"
        self._file = read_alike(text, RayHosts, tensor_parallel_size, () if is_installed else (missing,))

    @contextlib.asynccontextmanager
    async def opened(self, seconds: float) -> AsyncIterator[Callable[[], HostList]]:
        file = self._file
        cluster = RayCluster(file.which, file.token, file.port, len(file.every.devices or ()))
        async with cluster.opened(seconds):
            yield lambda: file.place(cluster.addresses)


class AgentActor:
    """Starts an agent on the node that it is placed on; the kernel ends the agent with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, token: str, port: int) -> str:
        """Start the agent, and return its address once it serves."""
        import ray

        host = ray.util.get_node_ip_address()
        port = _find_ports(host, port)
        # The logs of engines stay, as those of any agent do; the next agent at this port continues them.
        folder = Path(tempfile.gettempdir(), f"megatron_rl-agents-{os.getuid()}", str(port))
        make_private_folder(folder.parent)
        make_private_folder(folder)
        words = [sys.executable, "-m", "megatron_rl.sidecar.agent", "--listen", f"{host}:{port}"]
        # The token is in no file that a lost node would keep.
        words += ["--token-file", "/dev/stdin", "--folder", str(folder)]
        log = folder / "agent.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                words,
                env={**os.environ, parent.VARIABLE: str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        assert self._process.stdin is not None
        with self._process.stdin as given:
            given.write(token.encode())
        deadline = time.monotonic() + _SERVED_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((host, port), 1):
                return f"{host}:{port}"
            time.sleep(0.1)
        raise RuntimeError(f"the agent at {host}:{port} does not serve: {log.read_text()[-2000:]}")

    def is_running(self) -> bool:
        """Check whether the agent runs."""
        return self._process is not None and self._process.poll() is None

    def end(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


class _Host:
    """One host: its placement group, its actor, and the call that it waits for."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.actor: Any = None
        self.starting: asyncio.Future[str] | None = None
        self.address = ""


class RayCluster:
    def __init__(self, wanted: RayHosts, token: str, port: int, num_devices: int) -> None:
        self._wanted = wanted
        self._token = token
        self._port = port
        self._bundle = {"CPU": float(wanted.cpus), **({"GPU": float(num_devices)} if num_devices else {})}
        self._hosts: list[_Host] = []

    @contextlib.asynccontextmanager
    async def opened(self, seconds: float) -> AsyncIterator[None]:
        """Connect to the cluster, start all agents, and replace those that are lost within the context."""
        # Imported here: only this kind of hosts needs the extra.
        import ray
        from ray.util.placement_group import placement_group

        await asyncio.to_thread(ray.init, address=self._wanted.address, log_to_driver=False, logging_level="warning")
        try:
            self._hosts = [_Host(placement_group([self._bundle])) for _ in range(self._wanted.hosts)]
            for host in self._hosts:
                self._start(host)
            await self._wait(seconds)
            watching = asyncio.create_task(self._watch())
            watching.add_done_callback(_report_end)
            try:
                yield
            finally:
                watching.cancel()
        finally:
            await asyncio.gather(*map(self._end, self._hosts))
            await asyncio.to_thread(ray.shutdown)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the agents; that of a lost one until another has taken its place."""
        return [host.address for host in self._hosts]

    async def _watch(self) -> None:
        """Replace agents and nodes that are lost, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.gather(*map(self._look_after, self._hosts))

    async def _look_after(self, host: _Host) -> None:
        import ray

        if host.starting is None:
            try:
                running = await asyncio.wrap_future(host.actor.is_running.remote().future())
            except ray.exceptions.ActorUnavailableError:
                # The link to the node may be cut. Its agent lives on, or Ray will say that the node is lost.
                return
            except ray.exceptions.RayError as error:
                _log.warning("host %s of the Ray cluster is lost: %s", host.address, str(error).splitlines()[0])
                self._start(host)
            else:
                if not running:
                    _log.warning("the agent of host %s has ended, and is started again", host.address)
                    self._call(host)
        elif host.starting.done():
            try:
                host.address = host.starting.result()
                _log.info("host %s of the Ray cluster has an agent", host.address)
                host.starting = None
            except ray.exceptions.RayError as error:
                _log.warning("a host of the Ray cluster did not start its agent, and is asked again: %s", error)
                self._start(host)

    def _start(self, host: _Host) -> None:
        """Place an actor in the host's group as soon as it has room."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        host.actor = (
            ray.remote(AgentActor)
            .options(
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0.0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(host.group, placement_group_bundle_index=0),
            )
            .remote()
        )
        self._call(host)

    def _call(self, host: _Host) -> None:
        host.starting = asyncio.wrap_future(host.actor.start.remote(self._token, self._port).future())

    async def _end(self, host: _Host) -> None:
        """End a host's agent, unless it has no place yet, and give up its place."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if host.starting is None:
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(host.actor.end.remote().future()), _END_SECONDS)
        else:
            host.starting.cancel()
        remove_placement_group(host.group)

    async def _wait(self, seconds: float) -> None:
        import ray

        deadline, begun = time.monotonic() + seconds, time.monotonic()
        while missing := [host.starting for host in self._hosts if host.starting is not None]:
            left = deadline - time.monotonic()
            done, _ = await asyncio.wait(missing, timeout=min(max(left, 0.0), _NEWS_SECONDS))
            for host in self._hosts:
                if host.starting in done:
                    assert host.starting is not None
                    try:
                        host.address, host.starting = host.starting.result(), None
                    except ray.exceptions.RayError as error:
                        raise NoRoomInCluster(f"an agent did not start in the Ray cluster: {error}") from None
            if not done:
                said = self._describe_wait(len(missing), time.monotonic() - begun)
                if left <= 0:
                    raise NoRoomInCluster(f"{said}: add nodes, ask for less, or raise --rollout-start-minutes")
                _log.info("%s", said)

    def _describe_wait(self, num_missing: int, seconds: float) -> str:
        import ray

        free, present = (
            {name: counts.get(name, 0.0) for name in self._bundle}
            for counts in (ray.available_resources(), ray.cluster_resources())
        )
        return (
            f"{num_missing} of {len(self._hosts)} hosts have no agent in the Ray cluster after {seconds:.0f} s: each "
            f"needs a placement group of {self._bundle}, and {free} of {present} are free"
        )


def _report_end(watching: asyncio.Task[None]) -> None:
    if not watching.cancelled() and (error := watching.exception()) is not None:
        _log.error("lost hosts of the Ray cluster are not replaced from now on", exc_info=error)


def _find_ports(host: str, first: int) -> int:
    """Find a port that is free with the one after it: other hosts of the run may be on this node."""
    for port in range(first, first + 2 * _NUM_PORTS, 2):
        with contextlib.suppress(OSError), socket.create_server((host, port)), socket.create_server((host, port + 1)):
            return port
    raise RuntimeError(f"the ports {first} to {first + 2 * _NUM_PORTS - 1} of {host} are taken: write another port")
