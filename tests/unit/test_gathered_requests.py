"""Requests of a step to several engines of a host, which travel as one; the engines are servers in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron_rl.sidecar.agent import messages
from megatron_rl.sidecar.agent.messages import REQUESTS_ROUTE, EngineAnswer, pack, unpack
from megatron_rl.sidecar.engines.hosts import STEP
from megatron_rl.sidecar.hosts.remote import RemoteHost
from megatron_rl.sidecar.serving import serve
from tests.unit.test_remote_host import Agent, connected, start, until

NAMES = ("engine-0", "engine-1", "engine-2")
PAUSE = {STEP: "pause"}


class Engine:
    """An engine's server: it answers with its name, when it may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.may_answer = asyncio.Event()
        self.num_asked = 0
        self.was_left = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.num_asked += 1
        leaving = asyncio.create_task(receive())
        waiting = asyncio.create_task(self.may_answer.wait())
        await asyncio.wait((leaving, waiting), return_when=asyncio.FIRST_COMPLETED)
        self.was_left = leaving.done()
        head = {"type": "http.response.start", "status": 200 + int(self.name[-1]), "headers": []}
        await send(head)
        query = scope["query_string"].decode()
        await send({"type": "http.response.body", "body": f"{self.name} {scope['path']}?{query} {body!r}".encode()})


@contextlib.asynccontextmanager
async def engines(agent: Agent, host: RemoteHost) -> AsyncIterator[tuple[list[Engine], list[httpx.AsyncClient]]]:
    ended, made = asyncio.Event(), [Engine(name) for name in NAMES]
    async with contextlib.AsyncExitStack() as stack:
        serving = []
        for engine in made:
            await start(agent, host, engine.name)
            address = Path(agent.world.launcher.handles[-1].address)
            serving.append(asyncio.create_task(serve(engine, uds=address, until=ended)))
            await until(address.exists)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(transport=host.connect(name), base_url="http://e", timeout=None)
            )
            for name in NAMES
        ]
        yield made, clients
        ended.set()
        await asyncio.gather(*serving)


class Count:
    """Counts the requests that reach an agent."""

    def __init__(self, host: RemoteHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.routes: list[str] = []
        handle = host._transport.handle_async_request

        async def count(request: httpx.Request) -> httpx.Response:
            self.routes.append(request.url.path)
            return await handle(request)

        monkeypatch.setattr(host._transport, "handle_async_request", count)


def test_a_step_of_several_engines_is_one_request_and_each_answer_comes_by_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "_CONNECTS_AT_ONCE", 1)

    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host), engines(agent, host) as (made, clients):
            count = Count(host, monkeypatch)
            asking = [
                asyncio.create_task(client.post(f"/pause?number={number}", content=bytes([number]), extensions=PAUSE))
                for number, client in enumerate(clients)
            ]
            await until(lambda: all(engine.num_asked for engine in made))
            assert count.routes == [REQUESTS_ROUTE]
            # Engines that take long for a step keep no other host from its connection.
            await until(lambda: not host._limits.connects.locked())
            for number in (2, 0):
                made[number].may_answer.set()
                answer = await asyncio.wait_for(asking[number], 60)
                assert answer.status_code == 200 + number
                assert answer.text == f"engine-{number} /pause?number={number} {bytes([number])!r}"
            # The slow one fails alone.
            asking[1].cancel()
            await until(lambda: made[1].was_left)
            # A group is a request of its own.
            assert (await clients[0].post("/generate", content=b"g", extensions={STEP: "generate"})).status_code == 200
            assert count.routes == [REQUESTS_ROUTE, "/v1/engines/engine-0/generate"]

    asyncio.run(check())


def test_an_engine_that_gives_no_answer_fails_by_name_and_the_others_do_not(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host), engines(agent, host) as (made, clients):
            made[0].may_answer.set()
            gone = httpx.AsyncClient(transport=host.connect("engine-9"), base_url="http://e", timeout=None)
            asking = [asyncio.create_task(client.post("/a", extensions=PAUSE)) for client in (*clients[:2], gone)]
            assert (await asking[0]).status_code == 200
            with pytest.raises(httpx.ReadError, match=r"^host .*: this host has no engine 'engine-9'"):
                await asking[2]
            assert not asking[1].done()
            Path(agent.world.launcher.handles[1].address).unlink()
            with pytest.raises(httpx.ReadError, match="the engine gave no answer"):
                await clients[1].post("/a", extensions=PAUSE)
            # Without its agent, no request waits for ever.
            await agent.stop()
            with pytest.raises(httpx.HTTPError):
                await asking[1]
            with pytest.raises(httpx.HTTPError):
                await clients[0].post("/a", extensions=PAUSE)
            await agent.start()

    asyncio.run(check())


def test_a_lease_that_is_over_is_said_to_each_engine(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host), engines(agent, host) as (_, clients):
            host._lease = "another"
            for client in clients[:2]:
                with pytest.raises(httpx.ReadError, match="409: .*the lease of this host is over"):
                    await client.post("/a", extensions=PAUSE)

    asyncio.run(check())


def test_answers_are_found_in_any_division_of_their_bytes():
    answers = [
        EngineAnswer(number=number, status=200, kind="a/b", body=bytes(number), is_fault=number == 1)
        for number in range(3)
    ]
    sent, came, found = b"".join(map(pack, answers)), bytearray(), []
    for byte in sent:
        came.append(byte)
        found += unpack(came)
    assert found == answers
    assert not came
    assert list(unpack(bytearray(sent))) == answers
