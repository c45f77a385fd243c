"""A rollout service and an agent in one process, over a real socket: what each learns of the other; no engines."""

import asyncio
import contextlib
import dataclasses
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from megatron_rl.shared.protocol.wire import FileSource, Weights
from megatron_rl.shared.weights.folders import writing
from megatron_rl.sidecar.agent import messages
from megatron_rl.sidecar.agent.application import build_agent_application
from megatron_rl.sidecar.agent.messages import EngineAnswer, LeaseRequest, Timeouts, pack
from megatron_rl.sidecar.engines import EngineLost, NotGiven, WeightsNotWritten
from megatron_rl.sidecar.hosts import HostList, HostPlace
from megatron_rl.sidecar.hosts.membership import Hosts
from megatron_rl.sidecar.hosts.remote import HostLost, RemoteHandle, RemoteHost
from megatron_rl.sidecar.serving import open_listener, serve
from megatron_rl.sidecar.vllm.connection import Connection
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.trainer.loop.reporter import HostNews
from tests.unit.test_host_engines import World

TOKEN = "0123456789abcdef"
QUICK = Timeouts(beat=0.02, lost=0.5, first_pause=0.05, longest_pause=0.1)


@contextlib.contextmanager
def full_listener() -> Iterator[int]:
    """Yield a port that accepts no connection any more: the kernel drops attempts."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


class Agent:
    """An agent that can stop to serve, and serve again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder)
        self.port = 0
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, tls: tuple[Path, Path] | None = None) -> None:
        listener = open_listener("127.0.0.1", self.port)
        self.port = listener.getsockname()[1]
        self._ended = asyncio.Event()
        app = build_agent_application(self.world.engines, TOKEN)
        self._task = asyncio.create_task(serve(app, listener=listener, until=self._ended, tls=tls))

    async def stop(self) -> None:
        assert self._task is not None
        self._ended.set()
        await self._task


@contextlib.asynccontextmanager
async def connected(
    folder: Path, tls: tuple[Path, Path] | None = None
) -> AsyncIterator[tuple[Agent, Hosts, RemoteHost]]:
    agent = Agent(folder)
    await agent.start(tls)
    tls_ca = None if tls is None else tls[0]
    hosts = Hosts(HostList((HostPlace(f"127.0.0.1:{agent.port}"),), TOKEN, tls_ca), "run", QUICK)
    hosts.open()
    try:
        await until(lambda: hosts.all[0].lease)
        yield agent, hosts, hosts.all[0]
    finally:
        await hosts.close()
        await agent.stop()
        agent.world.close()


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def start(agent: Agent, host: RemoteHost, name: str = "engine-0") -> RemoteHandle:
    handle = host.start(name, agent.world.start.config, 1)
    await handle.starting
    return handle


def version(number: int, location: str = "/trainer") -> Weights:
    return Weights(run="run", version=number, fingerprint="f", source=FileSource(folder=location), dtype="float32")


def test_a_service_learns_faults_and_lines_of_an_engine_and_tells_which_processes_it_needs(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host):
            handle = await start(agent, host)
            engine = agent.world.launcher.handles[0]
            assert str(handle.log) == f"127.0.0.1:{tmp_path}/engine-0.log"
            handle.need([7])
            await until(lambda: engine.needed == [7])
            await until(lambda: handle.log_lines() == ["one", "two"])
            engine.lines.append("three")
            await until(lambda: handle.log_lines() == ["one", "two", "three"])
            await asyncio.sleep(0.1)
            # Nothing is told twice.
            assert (engine.needed, handle.log_lines()) == ([7], ["one", "two", "three"])
            assert handle.find_fault() is None
            watching = asyncio.create_task(agent.world.engines.watch())
            engine.fault = "its process 7 has ended"
            await until(lambda: handle.find_fault() == engine.fault)
            watching.cancel()
            await asyncio.to_thread(handle.kill)
            assert engine.is_killed

    asyncio.run(check())


def test_agents_are_asked_for_few_starts_at_once_and_nothing_reaches_an_engine_before_its_start(tmp_path, monkeypatch):
    monkeypatch.setattr(messages, "_CONNECTS_AT_ONCE", 2)
    under_way, answered, most, reached = [], [], [], []

    async def reach(request: httpx.Request) -> httpx.Response:
        reached.append(1)
        answer = pack(EngineAnswer(number=0, status=200, kind="", body=b""))
        return httpx.Response(200, stream=httpx.ByteStream(answer))

    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host):
            ask, forwarded = host._ask, host.connect("engine-4")
            may_end = asyncio.Event()

            async def ask_slowly(method: str, route: str, *others: Any, **named: Any) -> Any:
                if method != "PUT":
                    return await ask(method, route, *others, **named)
                under_way.append(route)
                most.append(len(under_way))
                answer = await ask(method, route, *others, **named)
                answered.append(route)
                await may_end.wait()
                under_way.remove(route)
                return answer

            monkeypatch.setattr(host, "_ask", ask_slowly)
            monkeypatch.setattr(host._transport, "handle_async_request", reach)
            handles = [host.start(f"engine-{number}", agent.world.start.config, 1) for number in range(5)]
            await until(lambda: len(answered) == 2)
            # Those that wait for their turn when the host is lost are started under its next lease.
            lease = host.lease
            host._lose("its link is cut")
            await agent.world.engines.leave()
            asking = asyncio.create_task(
                httpx.AsyncClient(transport=forwarded, base_url="http://engine", timeout=None).get("/health")
            )
            await until(lambda: host.lease not in ("", lease))
            assert not reached
            may_end.set()
            await asyncio.gather(*(handle.starting for handle in handles))
            assert all(handle.is_started for handle in handles)
            assert all("was lost" in (handle.find_fault() or "") for handle in handles[:2])
            assert not any(handle.find_fault() for handle in handles[2:])
            assert (await asking).status_code == 200

    asyncio.run(check())
    assert max(most) == 2


@pytest.mark.parametrize(("num_engines", "pause"), [(1, 0.1), (20, 0.1), (1024, 5.12)])
def test_engines_that_start_together_are_asked_less_often_the_more_they_are(monkeypatch, num_engines, pause):
    pauses, answers = [], iter((False, False, True))

    async def is_healthy() -> bool:
        return next(answers)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(Connection, "num_watched", num_engines)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asking = SimpleNamespace(_connection=SimpleNamespace(is_healthy=is_healthy, fault=None))
    asyncio.run(VllmEngine._until_healthy(asking))
    assert pauses == pytest.approx([pause, pause])


def test_an_engine_that_ends_before_it_is_ready_has_its_fault_after_that():
    async def is_healthy() -> bool:
        return False

    fault = "its host 10.0.0.2:7100 has not answered for 21 s (): start its agent, or open the way to it"
    asking = SimpleNamespace(
        _connection=SimpleNamespace(is_healthy=is_healthy, fault=fault), name="engine-0", last_words=lambda: "no line"
    )
    with pytest.raises(EngineLost) as lost:
        asyncio.run(VllmEngine._until_healthy(asking))
    assert str(lost.value) == f"engine engine-0 ended before it was ready: {fault}\nno line"


def test_an_engine_that_cannot_be_started_has_the_agents_reason(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, _, host):
            config = dataclasses.replace(agent.world.start.config, model="/no/model")
            handle = host.start("engine-0", config, 1)
            await handle.starting
            assert "did not start it: the folder /no/model of the model does not exist" in (handle.find_fault() or "")

    asyncio.run(check())


def test_engines_of_a_lease_that_is_over_are_lost_and_the_host_is_asked_for_another(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, hosts, host):
            handle, epoch, lease = await start(agent, host), hosts.list_for_delivery([]).epoch, host.lease
            await agent.world.engines.leave()
            await until(lambda: host.lease not in ("", lease))
            assert "was lost" in (handle.find_fault() or "")
            assert hosts.list_for_delivery([]).epoch == epoch + 2
            # The end of an engine of the first lease does not touch those of the second.
            again = await start(agent, host)
            await asyncio.to_thread(handle.kill)
            assert again.find_fault() is None
            assert [engine.is_killed for engine in agent.world.launcher.handles] == [True, False]

    asyncio.run(check())


def test_a_host_whose_agent_has_ended_is_lost_at_once_and_found_again(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, hosts, host):
            handle, news = await start(agent, host), HostNews()
            assert list(news.list_lines(hosts.status())) == []
            await agent.stop()
            assert not await host.answers()
            await until(lambda: "is lost: its agent has ended" in (handle.find_fault() or ""))
            (line,) = news.list_lines(hosts.status())
            assert line == f"warning: host {host.name} is lost: its agent has ended, and its engines with it"
            assert list(news.list_lines(hosts.status())) == []
            assert hosts.status()[host.name]["state"] == "lost"
            assert hosts.list_for_delivery([]).hosts == []
            later = host.start("engine-1", agent.world.start.config, 1)
            await asyncio.sleep(0.1)
            assert not later.starting.done()
            await agent.start()
            await host.until_back()
            await later.starting
            assert later.is_started
            assert hosts.status()[host.name]["state"] == "up"
            assert list(news.list_lines(hosts.status())) == [f"host {host.name} is back"]
            assert list(news.list_lines(hosts.status())) == []
            # What it had started for the earlier lease is ended.
            assert agent.world.launcher.handles[0].is_killed

    asyncio.run(check())


def test_weights_lie_where_the_host_was_given_them(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, hosts, host):
            (listed,) = hosts.list_for_delivery([]).hosts
            assert (listed.address, listed.port) == ("127.0.0.1", agent.world.receivers[0].port)
            assert agent.world.receivers[0].token == hosts.list_for_delivery([]).token
            assert not await host.is_given(version(3))
            assert not await host.is_given(version(4))
            with pytest.raises(NotGiven, match="was not given version 4"):
                await host.find_weights(version(4))
            (tmp_path / "weights" / "version-4").mkdir()
            assert await host.is_given(version(4))
            assert (await host.find_weights(version(4)))[0].folder == str(tmp_path / "weights" / "version-4")
            # What a host had before it was lost does not count.
            await agent.stop()
            assert await host._find_arrived(version(4)) is None
            # A lost host takes no weights; that does not mean that it shares the trainer's folder.
            await until(lambda: not host.lease)
            shared = version(4, location=str(tmp_path))
            assert not await host.is_given(shared)
            assert not await host.has_copy(shared)
            with pytest.raises(NotGiven, match="was not given version 4"):
                await host.find_weights(shared)
            assert isinstance(host.explain_not_written(shared, WeightsNotWritten("2 tensors are missing")), NotGiven)
            await agent.start()
            await host.until_back()
            # A version that is neither complete nor being written has come to its end.
            (tmp_path / "weights" / "version-3").mkdir()
            assert not await host.is_given(version(3))
            hosts.leave_out(host.name, 3, "its link was slow")
            error = host.explain_not_written(version(3), WeightsNotWritten("2 tensors are missing"))
            assert isinstance(error, NotGiven)
            assert "2 tensors are missing" in str(error)
            assert "its link was slow" in str(error)

    asyncio.run(check())


def test_a_version_of_a_former_trainer_is_not_taken_for_one_with_its_number(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (_, _, host):
            (tmp_path / "weights" / "version-4").mkdir()
            former, current = version(4), msgspec.structs.replace(version(4), fingerprint="g")
            assert await host.is_given(former)
            assert not await host.is_given(current)
            assert not await host.has_copy(current)
            with pytest.raises(NotGiven, match="was not given version 4"):
                await host.find_weights(current)
            with writing(tmp_path / "weights" / "version-4", 1, 1):
                await host.beat()
                assert (host.is_being_written(former), host.is_being_written(current)) == (True, False)

    asyncio.run(check())


def test_a_request_of_an_old_lease_reaches_nothing(tmp_path):
    async def check() -> None:
        async with connected(tmp_path) as (agent, hosts, host):
            await start(agent, host)
            for task in hosts._tasks.values():
                task.cancel()
            await agent.world.engines.take_lease(LeaseRequest(run="run", seconds=30.0, token=host._request.token))
            body = msgspec.json.encode(agent.world.start)
            for method, route in (("PUT", "/v1/engines/engine-1"), ("DELETE", "/v1/lease"), ("POST", "/v1/beat")):
                with pytest.raises(HostLost):
                    await host._send(method, route, body)
            assert len(agent.world.launcher.handles) == 1

    asyncio.run(check())


def test_a_request_whose_host_is_found_lost_by_the_question_for_its_engines_health_says_so():
    class Losing(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/health":
                faults.append("its host 10.0.0.2:7100 is lost")
                raise httpx.ConnectError("")
            raise httpx.ReadError("")

    faults: list[str] = []
    handle = SimpleNamespace(find_fault=lambda: next(iter(faults), None), log_lines=list, log="engine-0.log")

    async def send() -> None:
        await Connection("engine-0", Losing(), handle, 1).send("load", "/load")  # type: ignore[arg-type]

    with pytest.raises(EngineLost, match="engine-0: load got no answer: its host 10.0.0.2:7100 is lost"):
        asyncio.run(send())


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a certificate for the loopback address, which is its own authority, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*words, "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="this host has no openssl to make certificates")
def test_an_agent_with_a_certificate_is_spoken_to_by_tls_and_another_certificate_is_refused(tmp_path):
    async def check() -> None:
        tls = make_certificate(tmp_path, "agent")
        async with connected(tmp_path, tls) as (agent, _, host):
            await start(agent, host)
            await host.beat()
            async with httpx.AsyncClient(transport=host.connect("engine-0"), base_url="http://engine") as client:
                with pytest.raises(httpx.ReadError, match="the engine gave no answer"):
                    await client.post("/a")
            for wrong in (make_certificate(tmp_path, "another")[0], None):
                others = Hosts(HostList((host.place,), TOKEN, wrong), "run", QUICK)
                others.open()
                await until(others.all[0].find_fault)
                assert "has not answered" in (others.all[0].find_fault() or "")
                assert wrong is None or "CERTIFICATE_VERIFY_FAILED" in (others.all[0].find_fault() or "")
                await others.close()

    asyncio.run(check())


def test_requests_to_an_engine_end_if_its_host_accepts_no_connection() -> None:
    async def check() -> None:
        with full_listener() as port:
            hosts = Hosts(HostList((HostPlace(f"127.0.0.1:{port}"),), TOKEN), "run", QUICK)
            request = httpx.Request("POST", "http://engine/generate")
            async with asyncio.timeout(60):
                with pytest.raises(httpx.ConnectTimeout):
                    await hosts.all[0].connect("engine-0").handle_async_request(request)

    asyncio.run(check())
