"""Streams to engines on other hosts: the address of rank 0, the engines of a group, and what breaks it; no group."""

import asyncio
import logging
import socket
import threading
from typing import Any

import httpx
import msgspec
import pytest

from megatron_rl.config.settings import RolloutConfig
from megatron_rl.errors import UsageError
from megatron_rl.shared.protocol.client import RolloutClient
from megatron_rl.shared.protocol.wire import Weights
from megatron_rl.sidecar import publication
from megatron_rl.sidecar.engines import EngineState
from megatron_rl.sidecar.publication import StepDeadlines
from megatron_rl.sidecar.settings import _problems_of_hosts
from megatron_rl.sidecar.supervisor import PublishFailed, WrongWorkerCount
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.received import Refusal, must_be_reached
from megatron_rl.sidecar.vllm.worker import WorkerExtension
from megatron_rl.trainer.mcore.publish import senders
from megatron_rl.trainer.mcore.publish.senders import find_free_port, find_own_address
from tests.sidecar.fake_engines import streamed
from tests.sidecar.supervised import supervised, until
from tests.sidecar.test_publish_to_hosts import Factory
from tests.unit.test_host_sources import write
from tests.unit.test_remote_host import connected, version

HOURS = StepDeadlines(*[3600.0] * 6)
ROUTES = {
    "127.0.0.1": "127.0.0.1", "127.0.0.2": "127.0.0.1", "localhost": "::1", "own": "10.0.0.1", "host-2": "10.0.0.1",
    "10.0.0.3": "10.0.0.1", "192.168.0.2": "192.168.0.1", "2001:db8::2": "2001:db8::1",
}  # fmt: skip
"""The addresses from which a host connects to others."""


@pytest.fixture
def routes(monkeypatch):
    monkeypatch.setattr(senders, "_find_source", ROUTES.__getitem__)


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["localhost", "127.0.0.2"], "127.0.0.1"),
        (["127.0.0.1", "host-2"], "10.0.0.1"),
        (["host-2", "10.0.0.3", "own", "localhost"], "10.0.0.1"),
    ],
)
def test_rank_0_is_told_at_the_address_that_every_other_host_reaches(routes, hosts, address):
    assert find_own_address(hosts) == address


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (["host-2", "192.168.0.2", "10.0.0.3"], "host-2, 10.0.0.3 from 10.0.0.1; 192.168.0.2 from 192.168.0.1: name"),
        (["127.0.0.1", "2001:db8::2"], "connects to 2001:db8::2 from 2001:db8::1, and a stream needs IPv4"),
    ],
)
def test_hosts_that_reach_no_common_address_of_rank_0_are_refused_by_name(routes, hosts, words):
    with pytest.raises(UsageError) as raised:
        find_own_address(hosts)
    assert words in str(raised.value)


def test_the_address_is_asked_of_the_kernel_and_a_host_without_a_way_is_named(monkeypatch):
    assert find_own_address(["127.0.0.2", "127.0.0.1"]) == "127.0.0.1"
    with socket.create_server(("127.0.0.1", find_free_port("127.0.0.1"))):
        pass

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match=r"no way to host-9, which has engines \(Name or service not known\)"):
        find_own_address(["host-9"])


def find_engine_hosts(endpoint: str, engines: list[str], hosts: dict[str, tuple[str, list[str]]]) -> list[str]:
    """Return the client's answer if the sidecar has these engines, of which hosts have some."""
    status = {
        "engines": {"engines": dict.fromkeys(engines)},
        "hosts": {name: {"state": state, "engines": held} for name, (state, held) in hosts.items()},
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=status))
    with RolloutClient(endpoint, "the-token", transport=transport) as client:
        return client.find_engine_hosts()


def test_hosts_with_engines_are_those_that_are_up_and_the_sidecars_own_as_the_trainer_reaches_it():
    hosts = {
        "10.0.0.2:7100": ("up", ["engine-1"]),
        "[2001:db8::2]:7100": ("up", ["engine-2"]),
        "10.0.0.4:7100": ("lost", ["engine-3"]),
        "10.0.0.5:7100": ("leaving", ["engine-4"]),
        "10.0.0.6:7100": ("up", []),
    }
    numbers = [f"engine-{number}" for number in range(5)]
    found = find_engine_hosts("http://10.0.0.9:7099", numbers, hosts)
    assert found == ["10.0.0.9", "10.0.0.2", "2001:db8::2"]
    assert find_engine_hosts("http://127.0.0.1:7099", numbers[1:], hosts) == ["10.0.0.2", "2001:db8::2"]
    # The sidecar reaches this agent on its own host, which is another one for the trainer.
    of_own = {"127.0.0.1:7100": ("up", ["engine-0"])}
    assert find_engine_hosts("http://10.0.0.9:7099", ["engine-0"], of_own) == ["10.0.0.9"]
    assert find_engine_hosts("http://[::1]:7099", ["engine-0"], {}) == ["::1"]


@pytest.mark.parametrize("kind", ["static", "slurm", "kubernetes"])
@pytest.mark.parametrize("transport", ["nccl", "hccl"])
def test_hosts_of_every_kind_may_have_engines_that_take_streams(tmp_path, kind, transport):
    own = {
        "static": "[[host]]\naddress = 'a:1'",
        "slurm": "[slurm]",
        "kubernetes": "[kubernetes]\nstateful_set = 'a'\nservice = 'b'\nreplicas = 2",
    }
    path = write(tmp_path, f"token_file = 'token'\n{own[kind]}\n").partition(":")[2]
    assert list(_problems_of_hosts(RolloutConfig(transport=transport, hosts=f"{kind}:{path}"))) == []


def of_stream(number: int) -> Weights:
    return msgspec.structs.replace(version(number), source=streamed(number, 1).source)


async def test_a_stream_reaches_a_host_while_it_answers_and_leaves_no_copy_there(tmp_path):
    async with connected(tmp_path) as (agent, _, host):
        asked = []

        async def bring(host: Any, weights: Weights) -> bool:
            asked.append(weights)
            return True

        host.bring = bring
        assert await host.is_given(of_stream(4))
        # Files of a version of this number are not the stream's.
        (tmp_path / "weights" / "version-4").mkdir()
        await host.is_given(version(4))
        host._arrived = msgspec.structs.replace(host._arrived, is_being_written=True)
        assert host.is_being_written(version(4))
        assert not host.is_being_written(of_stream(4))
        assert not await host.has_copy(of_stream(4))
        assert asked == []
        await agent.stop()
        assert not await host.is_given(of_stream(4))
        await agent.start()


@pytest.mark.parametrize("step", ["pause", "reach"])
async def test_a_host_that_is_lost_before_a_stream_is_left_out_and_joins_with_the_next_one(step, caplog):
    caplog.set_level(logging.INFO)
    factory = Factory()
    factory.host.has_copy = have_no_copy  # type: ignore[method-assign]
    async with supervised(factory) as supervisor:
        other = factory.engine("engine-1")
        factory.host.back.clear()
        factory.fail("engine-0", step, "lost")
        with pytest.raises(WrongWorkerCount, match=f"version 1 lost workers: engine engine-0 is lost at {step}"):
            await supervisor.publish(streamed(1, 4))
        assert supervisor.status()["num_workers"] == 2
        published = await supervisor.publish(streamed(1, 2))
        assert [proof.engine for proof in published.proofs] == ["engine-1"]
        factory.host.back.set()
        await until(lambda: factory.engine("engine-0").state is EngineState.WAITING)
        await until(lambda: "a stream leaves no copy" in caplog.text)
        assert "engine engine-0 waits for the next publish: version 1" in caplog.text
        assert supervisor.status()["num_workers"] == 4
        published = await supervisor.publish(streamed(2, 4))
        assert [proof.engine for proof in published.proofs] == ["engine-0", "engine-1"]
        assert factory.engine("engine-1") is other


async def have_no_copy(weights: Weights) -> bool:
    return False


async def test_a_host_that_does_not_answer_is_not_counted_and_a_group_of_no_engine_is_counted_again():
    factory = Factory()
    async with supervised(factory) as supervisor:
        engine = factory.engine("engine-0")
        factory.host.given = set()
        with pytest.raises(WrongWorkerCount, match="streamed to 4 workers, and the engines that answer have 2"):
            await supervisor.publish(streamed(1, 4))
        factory.killed["engine-1"] = 1
        await until(lambda: factory.engine("engine-1").state is EngineState.DEAD)
        factory.host.given = {1}
        await until(lambda: factory.engine("engine-1").state is EngineState.WAITING)
        await supervisor.publish(streamed(1, 4))
        # It only waited.
        assert factory.engine("engine-0") is engine
    async with supervised(Factory(), 1) as supervisor:
        supervisor._members["engine-0"].engine.host.given = set()
        for num_workers in (2, 0):
            with pytest.raises(WrongWorkerCount, match="the engines that answer have 0"):
                await supervisor.publish(streamed(1, num_workers))


async def test_an_engine_that_leaves_with_the_next_publish_is_not_counted(factory):
    async with supervised(factory) as supervisor:
        supervisor.remove("engine-0")
        assert supervisor.status()["num_workers"] == 2
        published = await supervisor.publish(streamed(1, 2))
        assert [proof.engine for proof in published.proofs] == ["engine-1"]


async def test_a_worker_that_does_not_reach_rank_0_ends_the_publish_before_any_engine_has_joined(factory):
    async with supervised(factory) as supervisor:
        factory.fail("engine-0", "reach", "refused")
        with pytest.raises(PublishFailed, match="version 1 was not published: engine engine-0 refuses reach") as it:
            await supervisor.publish(streamed(1, 4))
        assert not isinstance(it.value, WrongWorkerCount)
        assert factory.made["engine-1"][0].steps == ["pause", "reach"]


@pytest.mark.parametrize("fault", ["lost", "refused"])
async def test_engines_are_cut_off_soon_after_one_of_them_has_left_the_stream_and_all_start_again(
    factory, fault, monkeypatch
):
    monkeypatch.setattr(publication, "_REASON_SECONDS", 0.05)
    async with supervised(factory, 3, deadlines=HOURS) as supervisor:
        factory.fail("engine-0", "load", "hang")
        factory.fail("engine-1", "load", fault)
        said = (
            "load; engine engine-0: its load was cut off, because engine engine-1 had left the stream\nlast words "
            "of engine-0"
        )
        with pytest.raises(PublishFailed) as raised:
            await asyncio.wait_for(supervisor.publish(streamed(1, 6)), 60)
        assert str(raised.value).startswith("version 1 was not published: engine engine-1 ")
        assert str(raised.value).endswith(said)
        assert not isinstance(raised.value, WrongWorkerCount)
        await until(lambda: [len(factory.made[f"engine-{number}"]) for number in range(3)] == [2, 2, 1])
        await until(lambda: supervisor.status()["num_workers"] == 6)
        await supervisor.publish(streamed(2, 6))


async def test_an_engine_that_is_found_to_hold_other_numbers_cuts_no_other_one_off(factory, monkeypatch):
    monkeypatch.setattr(publication, "_REASON_SECONDS", 0.0)
    async with supervised(factory, deadlines=HOURS) as supervisor:
        factory.found_out = {"engine-1"}
        engine = factory.engine("engine-0")
        load, is_received = engine.load, asyncio.Event()

        async def load_slowly(weights: Weights) -> Any:
            await is_received.wait()
            return await load(weights)

        engine.load = load_slowly  # type: ignore[method-assign]
        publishing = asyncio.create_task(supervisor.publish(streamed(1, 4)))
        await until(lambda: "load" in factory.engine("engine-1").steps)
        await asyncio.sleep(0.1)
        assert not publishing.done()
        is_received.set()
        with pytest.raises(PublishFailed, match="engine-1 holds other numbers than were given"):
            await publishing
        assert factory.engine("engine-0") is engine


def test_a_worker_waits_for_the_sender_to_listen_and_names_its_host_if_it_never_does(monkeypatch):
    port = find_free_port("127.0.0.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "host-2")
    with pytest.raises(Refusal, match=rf"host host-2 does not reach rank 0 .* at 127\.0\.0\.1:{port} within 0\.2 s"):
        must_be_reached("127.0.0.1", port, seconds=0.2)
    tried = threading.Event()
    connect = socket.create_connection

    def connect_and_tell(*arguments: Any) -> Any:
        try:
            return connect(*arguments)
        finally:
            tried.set()

    monkeypatch.setattr(socket, "create_connection", connect_and_tell)
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(WorkerExtension().megatron_rl_reach("127.0.0.1", str(port)))
    )
    asking.start()
    assert tried.wait(10)
    with socket.create_server(("127.0.0.1", port)):
        asking.join(60)
    assert answers == [{}]


async def test_all_workers_of_an_engine_are_asked_whether_they_reach_the_place_of_the_group():
    engine, asked = VllmEngine("engine-0", "/nowhere"), []

    async def ask(*call: str) -> list[dict[str, Any]]:
        asked.append(call)
        return [{}]

    engine._workers = ask  # type: ignore[assignment]
    await engine.reach(streamed(1, 1, "10.0.0.1:29400"))
    assert asked == [("reach", "megatron_rl_reach", "10.0.0.1", "29400")]
