"""An engine over several hosts, between a service and its agents; no engines. The second host has other folders."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.errors import InputError, UsageError
from megatron_rl.sidecar.engines import NotGiven, WeightsNotWritten
from megatron_rl.sidecar.hosts import HostList, HostPlace
from megatron_rl.sidecar.hosts.factory import HostsFactory
from megatron_rl.sidecar.hosts.membership import Hosts
from megatron_rl.sidecar.hosts.sources import read_hosts
from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.factory import VllmFactory
from megatron_rl.sidecar.vllm.parts import encode_places, find_interface, pick_place
from megatron_rl.sidecar.vllm.server import ServerConfig
from tests.unit.test_host_sources import write
from tests.unit.test_remote_host import QUICK, TOKEN, Agent, until, version

TOGETHER = 'together = "a"'


@contextlib.asynccontextmanager
async def two_hosts(folder: Path, engines: int = 1) -> AsyncIterator[tuple[list[Agent], Hosts, HostsFactory]]:
    agents = []
    for number in range(2):
        (folder / f"host-{number}").mkdir()
        agents.append(Agent(folder / f"host-{number}"))
        await agents[-1].start()
    places = tuple(
        HostPlace(f"127.0.0.1:{agent.port}", engines, tuple(range(2 * engines)), together="a") for agent in agents
    )
    hosts = Hosts(HostList(places, TOKEN), "run", QUICK)
    config = ServerConfig(str(folder), 64, device="cuda", tensor_parallel_size=4, python="")
    hosts.open()
    try:
        await until(lambda: all(host.lease for host in hosts.all))
        yield (
            agents,
            hosts,
            HostsFactory(VllmFactory(config, make_socket_folder(), LocalLauncher()), 0, hosts.all, config),
        )
    finally:
        await hosts.close()
        for agent in agents:
            await agent.stop()
            agent.world.close()


def find_value(words: tuple[str, ...], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_each_host_starts_its_part_of_every_engine_with_its_own_devices(tmp_path):
    async def check() -> None:
        async with two_hosts(tmp_path, engines=2) as (agents, hosts, factory):
            assert hosts.num_engines == 2
            for name in ("engine-0", "engine-1"):
                factory.create(name)
            await until(lambda: all(len(agent.world.launcher.specs) == 2 for agent in agents))
            leader = agents[0].port
            for rank, agent in enumerate(agents):
                # The agent starts them in the order in which they were asked for.
                for number, spec in enumerate(agent.world.launcher.specs):
                    words = spec.command
                    assert (find_value(words, "--nnodes"), find_value(words, "--node-rank")) == ("2", str(rank))
                    assert find_value(words, "--tensor-parallel-size") == "4"
                    assert find_value(words, "--master-port") == str(leader + 2 + number)
                    assert ("--headless" in words) == (rank == 1)
                    assert spec.environment["CUDA_VISIBLE_DEVICES"] == f"{2 * number},{2 * number + 1}"
                    assert spec.environment["VLLM_HOST_IP"] == "127.0.0.1"
                    assert spec.environment["GLOO_SOCKET_IFNAME"] == "lo"

    asyncio.run(check())


def test_a_lost_part_is_named_with_its_host_and_all_parts_are_ended_together(tmp_path):
    async def check() -> None:
        async with two_hosts(tmp_path) as (agents, hosts, factory):
            engine = factory.create("engine-0")
            handle: Any = engine._handle
            await until(lambda: all(agent.world.launcher.handles for agent in agents))
            parts = [agent.world.launcher.handles[0] for agent in agents]
            parts[1].lines = ["the lines", "of the second part"]
            handle.need([11, 12, 21, 22])
            await until(lambda: [part.needed for part in parts] == [[11, 12], [21, 22]])
            await until(lambda: handle.log_lines() == ["one", "two"])
            assert handle.find_fault() is None
            watching = asyncio.create_task(agents[1].world.engines.watch())
            parts[1].fault = "its process 21 has ended"
            await until(handle.find_fault)
            assert handle.find_fault() == f"its part on host {hosts.all[1].name}: its process 21 has ended"
            assert handle.log_lines() == parts[1].lines
            watching.cancel()
            await engine.close()
            assert [part.is_killed for part in parts] == [True, True]

    asyncio.run(check())


def test_a_version_has_reached_an_engine_once_it_has_arrived_on_all_of_its_hosts(tmp_path):
    async def check() -> None:
        async with two_hosts(tmp_path) as (agents, hosts, factory):
            both = factory.create("engine-0").host
            folders = [tmp_path / f"host-{number}" / "weights" / "version-4" for number in range(2)]
            folders[0].mkdir()
            assert await hosts.all[0].is_given(version(4))
            assert not await both.is_given(version(4))
            assert not await both.has_copy(version(4))
            with pytest.raises(NotGiven, match=hosts.all[1].name):
                await both.find_weights(version(4))
            hosts.leave_out(hosts.all[1].name, 4, "its link was slow")
            error = both.explain_not_written(version(4), WeightsNotWritten("2 tensors are missing"))
            assert f"host {hosts.all[1].name} was not given all of version 4: its link was slow" in str(error)
            folders[1].mkdir()
            assert await both.is_given(version(4))
            assert [place.folder for place in await both.find_weights(version(4))] == [str(path) for path in folders]
            assert await both.answers()
            await agents[1].stop()
            assert not await both.answers()
            await agents[1].start()
            await both.until_back()

    asyncio.run(check())


def test_a_worker_takes_the_place_of_its_own_host():
    places = encode_places([("/first", 1), ("/second", 2)])
    assert pick_place(places, SimpleNamespace(node_rank=1)) == (Path("/second"), 2)
    # A vLLM that knows no engines over several hosts.
    assert pick_place(places, SimpleNamespace()) == (Path("/first"), 1)


def test_an_address_that_this_host_does_not_have_is_refused():
    with pytest.raises(InputError, match=r"no network interface of this host has the address 192\.0\.2\.77"):
        find_interface("192.0.2.77")
    assert find_interface("localhost") == find_interface("::1") == "lo"


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ([TOGETHER, ""], "is said of one host only"),
        ([TOGETHER] * 3, "--rollout-tensor-parallel-size 4 cannot be divided over 3 hosts: write a multiple of 3"),
        ([TOGETHER, f"engines = 2\n{TOGETHER}"], "must have the same number of engines"),
        (["together = 3"] * 2, "together must be a word in quotes"),
        ([f"devices = [0, 1, 2, 3]\n{TOGETHER}", TOGETHER], "must name 2 different ones, 2 for each of 1 engines"),
    ],
)
def test_hosts_that_cannot_share_engines_are_refused(tmp_path, hosts, words):
    text = "".join(f'[[host]]\naddress = "10.0.0.{number}:7100"\n{rest}\n' for number, rest in enumerate(hosts, 1))
    with pytest.raises(UsageError) as raised:
        read_hosts(write(tmp_path, f'token_file = "token"\n{text}'), tensor_parallel_size=4)
    assert any(words in problem for problem in raised.value.problems), raised.value.problems
