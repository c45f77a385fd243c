"""Requests to engines through the agent of their host, alone or gathered; the engines are servers in this process."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
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
    """An engine's server: it answers with what it was asked, as soon as it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = 0
        self.was_left = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        self.num_asked += 1
        leaving, waiting = asyncio.create_task(receive()), asyncio.create_task(self.may_answer.wait())
        await asyncio.wait((leaving, waiting), return_when=asyncio.FIRST_COMPLETED)
        self.was_left = leaving.done()
        headers = dict(scope["headers"])
        assert headers.keys().isdisjoint((b"authorization", b"x-lease"))
        kind = headers.get(b"content-type", b"a/b")
        await send({"type": "http.response.start", "status": 418, "headers": [(b"content-type", kind)]})
        told = f"{scope['method']} {scope['path']}?{scope['query_string'].decode()}".encode()
        for part in (told, bytes(range(256)), body):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def open_client(host: RemoteHost, name: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=host.connect(name), base_url="http://engine", timeout=None)


@contextlib.asynccontextmanager
async def engines(agent: Agent, host: RemoteHost) -> AsyncIterator[tuple[list[Engine], list[httpx.AsyncClient]]]:
    ended, made = asyncio.Event(), [Engine() for _ in NAMES]
    async with contextlib.AsyncExitStack() as stack:
        serving = []
        for name, engine in zip(NAMES, made, strict=True):
            await start(agent, host, name)
            address = Path(agent.world.launcher.handles[-1].address)
            serving.append(asyncio.create_task(serve(engine, uds=address, until=ended)))
            await until(address.exists)
        yield made, [await stack.enter_async_context(open_client(host, name)) for name in NAMES]
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


@pytest.mark.parametrize("extensions", [{}, PAUSE], ids=["alone", "gathered"])
def test_requests_reach_an_engine_and_return_as_they_are_or_fail_by_name_and_end_with_their_caller(
    tmp_path, extensions
):
    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host), engines(agent, host) as (made, clients):
            made[0].may_answer.set()
            kind = "application/msgpack"
            asked = {"content": b"\0body", "headers": {"content-type": kind}, "extensions": extensions}
            answer = await clients[0].post("/a/b?c=d&e=%20", **asked)
            assert (answer.status_code, answer.headers["content-type"]) == (418, kind)
            assert answer.content == b"POST /a/b?c=d&e=%20" + bytes(range(256)) + b"\0body"
            held, gone = (
                asyncio.create_task(client.post("/a", extensions=extensions))
                for client in (clients[1], open_client(host, "engine-9"))
            )
            await until(lambda: made[1].num_asked)
            with pytest.raises(httpx.ReadError, match=r"^host .*: this host has no engine 'engine-9'"):
                await gone
            assert not held.done()
            if not extensions:
                held.cancel()
                await until(lambda: made[1].was_left)
            Path(agent.world.launcher.handles[2].address).unlink()
            with pytest.raises(httpx.ReadError, match="the engine gave no answer"):
                await clients[2].post("/a", extensions=extensions)
            lease, host.lease = host.lease, "another"
            with pytest.raises(httpx.ReadError, match="the lease of this host is over"):
                await clients[0].post("/a", extensions=extensions)
            host.lease = lease
            # Without its agent, no request waits for ever.
            await agent.stop()
            with contextlib.suppress(asyncio.CancelledError), pytest.raises(httpx.HTTPError):
                await held
            with pytest.raises(httpx.HTTPError):
                await clients[0].post("/a", extensions=extensions)
            await agent.start()

    asyncio.run(check())


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
                assert answer.content == f"POST /pause?number={number}".encode() + bytes([*range(256), number])
            # The slow one fails alone.
            asking[1].cancel()
            await until(lambda: made[1].was_left)
            # A group is a request of its own.
            assert (await clients[0].post("/generate", extensions={STEP: "generate"})).status_code == 418
            assert len(count.routes) == 2

    asyncio.run(check())


def test_steps_leave_no_connection_open(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host), engines(agent, host) as (made, clients):
            for engine in made:
                engine.may_answer.set()

            async def step() -> None:
                await asyncio.gather(*(client.post("/pause", extensions=PAUSE) for client in clients))

            def num_sockets() -> int:
                return len(psutil.Process().net_connections("tcp"))

            await step()
            await until(lambda: not host._transport._pool.connections)
            before = num_sockets()
            for _ in range(20):
                await step()
            # Connections end on both sides soon after the last answer; the host's lease has one of its own.
            await until(lambda: num_sockets() <= before + 2)

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
