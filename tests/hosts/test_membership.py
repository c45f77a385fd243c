"""Hosts that join and leave while groups are sampled."""

import asyncio

import pytest

from megatron_rl.sidecar.hosts.sources import read_hosts
from tests.hosts.worlds import Agent, agents, find_free_address, serving, until, until_gone, write_hosts
from tests.sidecar.standin_engines import request

pytestmark = pytest.mark.slow


def test_hosts_join_while_groups_are_sampled_and_leave_with_a_publish_without_a_loss(tmp_path, caplog):
    async def check(first: Agent, second: Agent) -> None:
        async with serving(tmp_path, [first.address]) as world:
            supervisor = world.supervisor
            await supervisor.start(1)
            await world.publish()
            sampling = asyncio.create_task(supervisor.generate(request()))
            await until(lambda: supervisor.pool.in_flight("engine-0"))
            value = f"static:{write_hosts(tmp_path, [first, second])}"
            world.membership.follow_source(lambda: read_hosts(value, 1), seconds=0.1)
            await until(lambda: supervisor.names() == ["engine-0", "engine-1"] and world.is_ready(1))
            # The one that joins samples at once, with the version that was published before.
            (joined,) = await supervisor.generate(request())
            assert {span.version for span in joined.spans} == {"1"}
            (tmp_path / "hosts.toml").write_text("[[host")
            await until(lambda: "the hosts stay as they are until this is corrected" in caplog.text)
            write_hosts(tmp_path, [second])
            await until(lambda: supervisor.status()["engines"]["engine-0"]["leaving"])
            assert world.hosts.status()[first.address]["state"] == "leaving"
            assert (await sampling)[0].spans == joined.spans
            processes = first.list_engine_processes()
            assert processes
            await world.publish(2)
            assert supervisor.names() == ["engine-1"]
            await until_gone(processes)
            await until(lambda: [host.name for host in world.hosts.all] == [second.address])
            # It may come again.
            write_hosts(tmp_path, [second, first])
            await until(lambda: "engine-2" in supervisor.names() and world.is_ready(2))
            assert supervisor.pool.num_retried == 0
            await world.membership.close()

    with agents(tmp_path, [find_free_address(), find_free_address()], slow={"sampling": 10.0}) as (first, second):
        asyncio.run(check(first, second))
