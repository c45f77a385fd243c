"""Engines on the host of an agent: they work as local ones, and none outlives its agent or its service."""

import asyncio
import dataclasses
from pathlib import Path

import httpx
import msgspec
import pytest

from megatron_rl.sidecar.agent.messages import REQUESTS_ROUTE, TIMEOUTS
from megatron_rl.sidecar.engines import EngineLost
from tests.hosts.worlds import TOKEN, Agent, agents, find_free_address, serving, until, until_gone
from tests.sidecar.standin_engines import request

pytestmark = pytest.mark.each_change


def test_an_engine_on_another_host_works_as_a_local_one_and_dies_with_its_agent(tmp_path):
    async def check(agent: Agent) -> None:
        async with serving(tmp_path, [agent.address], timeouts=dataclasses.replace(TIMEOUTS, first_pause=0.1)) as world:
            await world.supervisor.start(1)
            await world.publish()
            (response,) = await world.supervisor.generate(request())
            assert {span.version for span in response.spans} == {"1"}
            processes = agent.list_engine_processes()
            # The server, its core and its worker.
            assert len(processes) == 3
            assert "127.0.0.1:" in str(world.engine()._handle.log)
            # The output of the host's processes can be read here.
            await until(lambda: any("running on unix socket" in line for line in world.engine()._handle.log_lines()))
            next(process for process in processes if "VLLM::EngineCore" in process.cmdline()[0]).kill()
            await until(lambda: "has ended" in world.error())
            await until(world.is_ready)
            await until_gone(processes)
            processes = agent.list_engine_processes()
            sockets = Path(next(word for word in processes[0].cmdline() if word.endswith(".sock"))).parents[1]
            assert sockets.is_dir()
            agent.kill()
            await until(lambda: "is lost: its agent has ended" in world.error())
            await until_gone(processes)
            await until(lambda: not sockets.exists())
            sampling = asyncio.create_task(world.supervisor.generate(request()))
            agent.start()
            await until(world.is_ready)
            (again,) = await sampling
            assert again.spans == response.spans
            processes = agent.list_engine_processes()
        await until_gone(processes)
        # Its host is free for another run.
        async with serving(tmp_path, [agent.address], run="another") as world:
            await until(lambda: world.hosts.all[0].lease)

    with agents(tmp_path, [find_free_address()]) as (agent,):
        asyncio.run(check(agent))


def test_an_agent_tells_nothing_without_its_token_and_one_service_does_not_take_the_host_of_another(tmp_path):
    async def check(agent: Agent) -> None:
        quick = dataclasses.replace(TIMEOUTS, lost=1.0)
        async with serving(tmp_path, [agent.address]) as holder:
            await until(lambda: holder.hosts.all[0].lease)
            async with httpx.AsyncClient(base_url=f"http://{agent.address}") as client:
                assert (await client.get("/health")).json() == {"status": "ok"}
                for method, route in (("POST", "/v1/lease"), ("POST", REQUESTS_ROUTE), ("GET", "/no")):
                    for headers in ({}, {"authorization": "Bearer another"}):
                        answer = await client.request(method, route, headers=headers)
                        assert (answer.status_code, answer.json()) == (401, {"error": "the token is missing or wrong"})
                right = {"authorization": f"Bearer {TOKEN}"}
                # A request of a service that holds no lease.
                answer = await client.put("/v1/engines/engine-0", headers=right, content=b"{}")
                assert answer.status_code in (400, 409)
                answer = await client.post(REQUESTS_ROUTE, headers=right, content=msgspec.msgpack.encode([]))
                assert answer.status_code == 409
            for token, run, reason in ((f"{TOKEN}0", "run", "the token is wrong"), (TOKEN, "another", "the run 'run'")):
                async with serving(tmp_path, [agent.address], token, quick, run) as world:
                    with pytest.raises(EngineLost, match=reason):
                        await world.supervisor.start(1)

    with agents(tmp_path, [find_free_address()]) as (agent,):
        asyncio.run(check(agent))


def test_an_agent_ends_the_engines_of_a_service_that_is_silent(tmp_path):
    timeouts = dataclasses.replace(TIMEOUTS, lease=3.0, beat=0.2)

    async def check(agent: Agent) -> None:
        async with serving(tmp_path, [agent.address], timeouts=timeouts) as world:
            await world.supervisor.start(1)
            processes = agent.list_engine_processes()
            assert processes
            # Later than the lease is long: beats have renewed it.
            await asyncio.sleep(2 * timeouts.lease)
            assert not world.error()
            for task in world.hosts._tasks.values():
                task.cancel()
            await until_gone(processes)
            assert "has been silent for 3 s" in agent.output

    with agents(tmp_path, [find_free_address()]) as (agent,):
        asyncio.run(check(agent))
