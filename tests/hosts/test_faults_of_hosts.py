"""Faults of hosts and of the links to them, on hosts of their own addresses: each is survived, or named in time."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from megatron_rl.sidecar.agent.messages import TIMEOUTS
from tests.hosts.namespaces import Host, network
from tests.hosts.worlds import Agent, World, agents, serving, until, until_gone
from tests.sidecar.standin_engines import request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PORT = 7100
# What a busy machine adds to a deadline.
BUSY_SECONDS = 15.0


@contextlib.contextmanager
def two_hosts(folder: Path, slow: dict[str, float]) -> Iterator[tuple[list[Host], list[Agent]]]:
    """Make two hosts with an agent each; the steps of the first host's engine last as long as `slow` says."""
    with network(2) as hosts:
        addresses = [f"{host.address}:{PORT}" for host in hosts]
        with agents(folder, addresses, [host.popen for host in hosts], slow) as made:
            yield hosts, made


@contextlib.asynccontextmanager
async def sampling(folder: Path, made: Sequence[Agent]) -> AsyncIterator[tuple[World, "asyncio.Task[list]"]]:
    """Serve with an engine on each host, and have the first sample a group."""
    async with serving(folder, [agent.address for agent in made]) as world:
        await world.supervisor.start(len(made))
        await world.publish()
        task = asyncio.create_task(world.supervisor.generate(request()))
        await until(lambda: world.supervisor.pool.in_flight("engine-0"))
        yield world, task


def test_a_link_that_is_cut_for_five_seconds_costs_nothing_but_the_wait(tmp_path):
    async def check(hosts: list[Host], made: list[Agent]) -> None:
        async with sampling(tmp_path, made) as (world, task):
            processes = made[0].list_engine_processes()
            hosts[0].set_link(False)
            await asyncio.sleep(5)
            hosts[0].set_link(True)
            begun = time.monotonic()
            (response,) = await task
            print(f"the group ended {time.monotonic() - begun:.1f} s after the link was mended")
            assert {span.version for span in response.spans} == {"1"}
            assert world.supervisor.pool.num_retried == 0
            await world.publish(2)
            assert made[0].list_engine_processes() == processes
            assert not world.error(0)

    with two_hosts(tmp_path, {"sampling": 8.0}) as (hosts, made):
        asyncio.run(check(hosts, made))


def test_a_host_whose_link_is_cut_for_a_minute_is_named_and_joins_again(tmp_path):
    async def check(hosts: list[Host], made: list[Agent]) -> None:
        async with sampling(tmp_path, made) as (world, task):
            processes = made[0].list_engine_processes()
            begun = time.monotonic()
            hosts[0].set_link(False)
            await until(lambda: "is lost: it has not answered for" in world.error(0))
            named = time.monotonic() - begun
            assert f"its host {made[0].address}" in world.error(0)
            (response,) = await task
            assert world.supervisor.pool.num_retried == 1
            assert {span.version for span in response.spans} == {"1"}
            # A publish without that host does not wait for it.
            await world.publish(2)
            assert world.is_ready(1)
            await until_gone(processes)
            ended = time.monotonic() - begun
            print(f"the host was named after {named:.1f} s, its engines had ended after {ended:.1f} s")
            assert named < TIMEOUTS.lost + TIMEOUTS.answer + BUSY_SECONDS
            assert ended < TIMEOUTS.lease + TIMEOUTS.answer + BUSY_SECONDS
            await asyncio.sleep(max(0.0, 60 - (time.monotonic() - begun)))
            hosts[0].set_link(True)
            begun = time.monotonic()
            await until(world.is_ready)
            print(f"its engine took groups again {time.monotonic() - begun:.1f} s after the link was mended")
            assert world.supervisor._members["engine-0"].num_failures <= 1
            await world.publish(3)

    with two_hosts(tmp_path, {"sampling": 600.0}) as (hosts, made):
        asyncio.run(check(hosts, made))


@pytest.mark.parametrize("step", ["pause", "load", "probe"])
def test_an_agent_that_is_killed_in_a_publish_does_not_end_it(step, tmp_path):
    async def check(made: list[Agent]) -> None:
        async with serving(tmp_path, [agent.address for agent in made]) as world:
            await world.supervisor.start(2)
            processes = made[0].list_engine_processes()
            publishing = asyncio.create_task(world.publish())
            await until(lambda: world.supervisor._steps.current.get("engine-0", ("",))[0] == step)
            begun = time.monotonic()
            made[0].kill()
            await publishing
            print(f"published {time.monotonic() - begun:.1f} s after the agent was killed")
            assert world.is_ready(1)
            await until_gone(processes)
            assert "is lost: its agent has ended" in world.error(0)
            made[0].start()
            await until(world.is_ready)

    with two_hosts(tmp_path, {step: 3.0}) as (_, made):
        asyncio.run(check(made))


def serve_until_killed(folder: Path, addresses: list[str]) -> None:
    async def serve() -> None:
        async with serving(folder, addresses) as world:
            await world.supervisor.start(len(addresses))
            await world.publish()
            (folder / "served").touch()
            await asyncio.sleep(3600)

    asyncio.run(serve())


def test_nothing_is_left_on_any_host_when_the_service_is_killed(tmp_path):
    with two_hosts(tmp_path, {}) as (_, made):
        service = multiprocessing.get_context("spawn").Process(
            target=serve_until_killed, args=(tmp_path, [agent.address for agent in made])
        )
        service.start()
        processes: list[psutil.Process] = []
        try:
            asyncio.run(until((tmp_path / "served").exists))
            processes = [process for agent in made for process in agent.list_engine_processes()]
            assert len(processes) == 6
        finally:
            assert service.pid is not None
            os.kill(service.pid, signal.SIGKILL)
            service.join()
        begun = time.monotonic()
        asyncio.run(until_gone(processes))
        print(f"the engines of both hosts had ended {time.monotonic() - begun:.1f} s after the service was killed")
        assert time.monotonic() - begun < TIMEOUTS.lease + BUSY_SECONDS
