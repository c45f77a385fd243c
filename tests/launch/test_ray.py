"""Agents on a Ray cluster of two nodes on this machine: one is lost and replaced, and a wait says what it waits for."""

import asyncio
import contextlib
import os
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from megatron_rl.cli import main as megatron_rl
from megatron_rl.errors import MegatronRLError
from megatron_rl.shared.protocol.client import RolloutClient, read_token
from megatron_rl.sidecar.hosts import build_source, ray_cluster
from megatron_rl.sidecar.hosts.ray_cluster import NoRoomInCluster
from tests.e2e import loop
from tests.hosts.worlds import TOKEN, find_free_address

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SECONDS = 240.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Make a cluster whose first node has no room for a host."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        yield made
    finally:
        ray.shutdown()
        for node in list(made.worker_nodes):
            made.remove_node(node, allow_graceful=False)
        made.remove_node(made.head_node, allow_graceful=False)


def write(folder: Path, address: str, hosts: int, port: int = 7100, engines: int = 3) -> str:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    path = folder / "hosts.toml"
    table = f'[ray]\naddress = "{address}"\nhosts = {hosts}\n'
    path.write_text(f'token_file = "token"\n[every_host]\nengines = {engines}\nport = {port}\n{table}')
    return f"ray:{path}"


def is_healthy(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{address}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def test_a_node_that_is_lost_is_replaced_and_nothing_is_left(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_LOOK_SECONDS", 0.2)
    first = cluster.add_node(num_cpus=1)
    port = find_free_port()

    async def check() -> None:
        async with contextlib.AsyncExitStack() as stack:
            source = build_source(write(tmp_path, cluster.address, 1, port), 1)
            read = await stack.enter_async_context(source.opened(SECONDS))
            (place,) = read().hosts
            assert (place.engines, read().token) == (3, TOKEN)
            assert is_healthy(place.address)
            await asyncio.to_thread(cluster.remove_node, first, False)
            while is_healthy(place.address):
                await asyncio.sleep(0.1)
            host, _, number = place.address.rpartition(":")
            # Another program has the port: the agent takes another one.
            with socket.create_server((host, int(number))):
                cluster.add_node(num_cpus=1)
                async with asyncio.timeout(SECONDS):
                    while read().hosts == (place,):
                        await asyncio.sleep(0.1)
            (replaced,) = read().hosts
            assert is_healthy(replaced.address)
        assert not is_healthy(replaced.address)

    left = set(Path("/dev/shm").glob("megatron_rl-agent-*"))
    asyncio.run(check())
    assert set(Path("/dev/shm").glob("megatron_rl-agent-*")) == left
    logs = Path(tempfile.gettempdir(), f"megatron_rl-agents-{os.getuid()}", str(port))
    assert [path.name for path in logs.iterdir() if TOKEN in path.read_text()] == []


def test_a_run_whose_only_node_with_engines_is_lost_continues_on_the_one_that_replaces_it(cluster, tmp_path, capsys):
    first = cluster.add_node(num_cpus=1)
    world, port = loop.make_world(tmp_path, head_dim=32), find_free_port()
    words = world.words(
        "run", train_iters=4, tensor_model_parallel_size=2, rollout_engine="vllm", rollout_num_engines=0,
        rollout_hosts=write(tmp_path, cluster.address, 1, port, engines=1), rollout_max_num_seqs=8,
    )  # fmt: skip
    folder = tmp_path / "runs" / "run"
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(loop.running(tmp_path / "outputs", 2, words, OMP_NUM_THREADS="1"))

        def await_(condition: Callable[[Mapping[str, Any]], object]) -> Mapping[str, Any]:
            end = time.monotonic() + SECONDS
            while not condition(status := ask(folder)):
                assert all(process.poll() is None for process in ranks.processes), ranks.text()
                assert time.monotonic() < end, f"{status}\n{ranks.text()}"
                time.sleep(0.05)
            return status

        def is_sampling_after_the_first(status: Mapping[str, Any]) -> bool:
            return status.get("version") in (1, 2) and any(one["in_flight"] for one in list_engines(status).values())

        version = await_(is_sampling_after_the_first)["version"]
        cluster.remove_node(first, False)
        (lost,) = await_(lambda status: "lost" in [host["state"] for host in status["hosts"].values()])["hosts"]
        # The agent that replaces it has another address, as on another machine.
        stack.enter_context(socket.create_server((lost.rpartition(":")[0], port)))
        cluster.add_node(num_cpus=1)
        status = await_(lambda status: [one for one in list_engines(status).values() if one["state"] == "ready"])
        # The iteration that lost its only engine continues.
        assert status["version"] == version
        assert {name: host["state"] for name, host in status["hosts"].items() if name != lost}.popitem()[1] == "up"
        assert ranks.wait(SECONDS) == [0, 0], ranks.text()
    assert megatron_rl(["audit", str(folder)]) == 0
    assert "4 of 4 iterations complete, 0 breaches" in capsys.readouterr().out


def ask(folder: Path) -> Mapping[str, Any]:
    """Return the state of the run's service, or nothing if it does not answer."""
    with contextlib.suppress(OSError, MegatronRLError):
        address, token = (folder / "address").read_text().strip(), read_token(folder / "token")
        with RolloutClient(address, token, 5.0) as client:
            return client.status()
    return {}


def list_engines(status: Mapping[str, Any]) -> Mapping[str, Any]:
    engines: Mapping[str, Any] = status.get("engines", {}).get("engines", {})
    return engines


def find_free_port() -> int:
    return int(find_free_address().rpartition(":")[2])


def test_a_wait_for_room_says_what_it_waits_for(cluster, tmp_path):
    cluster.add_node(num_cpus=1)

    async def check() -> None:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(build_source(write(tmp_path, cluster.address, 2), 1).opened(15.0))

    said = r"1 of 2 hosts have no agent .* group of \{'CPU': 1.0\}, and \{'CPU': 0.0\} of \{'CPU': 1.0\} are free"
    with pytest.raises(NoRoomInCluster, match=said):
        asyncio.run(check())
