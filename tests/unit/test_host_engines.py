"""The lease of a host's agent, on a clock that the test sets; no processes."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from megatron_rl.errors import InputError, UsageError
from megatron_rl.sidecar.agent.application import build_agent_application
from megatron_rl.sidecar.agent.engines import HostEngines, HostTaken, LeaseOver
from megatron_rl.sidecar.agent.main import parse
from megatron_rl.sidecar.agent.messages import LEASE_HEADER, PROTOCOL, Beat, EngineStart, LeaseRequest
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.server import ServerConfig


class Handle:
    """An engine without processes."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.needed: list[int] = []
        self.fault: str | None = None
        self.is_killed = False
        self.lines = ["one", "two"]

    def poll(self) -> str | None:
        return None

    def need(self, pids: list[int]) -> None:
        self.needed += pids

    def find_fault(self) -> str | None:
        return self.fault

    def new_lines(self, num_seen: int) -> tuple[int, list[str]]:
        return len(self.lines), self.lines[num_seen:]

    def kill(self) -> None:
        self.is_killed = True


class Launcher:
    def __init__(self) -> None:
        self.specs: list[Any] = []
        self.handles: list[Handle] = []

    def start(self, spec: Any) -> Handle:
        if spec.command[0] == "/no/python":
            raise FileNotFoundError(2, "No such file or directory")
        assert all(handle.is_killed for handle in self.handles if handle.address == spec.address)
        self.specs.append(spec)
        self.handles.append(Handle(spec.address))
        return self.handles[-1]


class Receiver:
    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        self.token = token
        self.port = 7101
        self.is_closed = False

    def describe(self) -> dict[str, Any]:
        return {"version": 4, "fingerprint": "f", "complete": True}

    def close(self) -> None:
        self.is_closed = True


class World:
    """A host, its clock and what it has made."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.launcher = Launcher()
        self.receivers: list[Receiver] = []
        self.start = EngineStart(config=ServerConfig(str(folder), 64, num_threads=0, python=""), num_workers=1)
        launcher: Any = self.launcher

        def make(token: str) -> Any:
            (folder / "weights").mkdir()
            self.receivers.append(Receiver(folder / "weights", token))
            return self.receivers[-1]

        self.sockets = make_socket_folder()
        self.engines = HostEngines(self.sockets, folder, launcher, make, lambda: self.now)

    def close(self) -> None:
        shutil.rmtree(self.sockets)


def hello(run: str = "run", **changes: Any) -> LeaseRequest:
    return LeaseRequest(run=run, **{"seconds": 30.0, "token": "secret", **changes})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def test_a_lease_that_is_not_renewed_ends_with_its_engines_and_the_delivery_of_weights(world):
    async def check() -> None:
        watching = asyncio.create_task(world.engines.watch())
        welcome = await world.engines.take_lease(hello())
        world.engines.check_lease(welcome.lease)
        await world.engines.start("engine-0", world.start)
        world.now = 29.0
        assert world.engines.beat(Beat()).engines.keys() == {"engine-0"}
        world.now = 58.0
        await asyncio.sleep(0.5)
        assert not world.launcher.handles[0].is_killed
        world.now = 59.5
        async with asyncio.timeout(30):
            while not world.receivers[0].is_closed:
                await asyncio.sleep(0.001)
        assert world.launcher.handles[0].is_killed
        with pytest.raises(LeaseOver):
            world.engines.check_lease(welcome.lease)
        # Now it is free for another run.
        assert (await world.engines.take_lease(hello("another", token="other"))).lease != welcome.lease
        watching.cancel()

    asyncio.run(check())


def test_a_host_is_for_one_run_and_a_service_that_comes_again_finds_no_old_engine(world, tmp_path):
    async def check() -> None:
        first = await world.engines.take_lease(hello())
        await world.engines.start("engine-0", world.start)
        with pytest.raises(HostTaken, match="work for the run 'run'"):
            await world.engines.take_lease(hello("another", token="other"))
        world.engines.check_lease(first.lease)
        second = await world.engines.take_lease(hello())
        assert world.launcher.handles[0].is_killed
        assert not world.engines.beat(Beat()).engines
        (tmp_path / "weights" / "version-1").mkdir()
        # The same service keeps the weights that have arrived. Another one of the same run has another secret.
        assert not world.receivers[0].is_closed
        with pytest.raises(HostTaken):
            await world.engines.take_lease(hello(token="other"))
        world.now += 10
        # Another run waits until the lease is over.
        with pytest.raises(HostTaken):
            await world.engines.take_lease(hello("another", token="other"))
        third = await world.engines.take_lease(hello(token="other"))
        assert world.receivers[0].is_closed
        # Its memory is free.
        assert not (tmp_path / "weights" / "version-1").exists()
        assert [receiver.token for receiver in world.receivers] == ["secret", "other"]
        for lease in ("", first.lease, second.lease):
            with pytest.raises(LeaseOver):
                world.engines.check_lease(lease)
        world.engines.check_lease(third.lease)

    asyncio.run(check())


def test_a_service_of_another_protocol_or_with_an_endless_lease_is_refused(world):
    for wrong in (hello(protocol=PROTOCOL + 1), hello(seconds=float("inf")), hello(seconds=0.0)):
        with pytest.raises(InputError):
            asyncio.run(world.engines.take_lease(wrong))


def test_an_engine_is_started_with_the_hosts_own_environment_and_once_under_a_name(world, tmp_path, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "of this host")

    async def check() -> None:
        with pytest.raises(LeaseOver):
            await world.engines.start("engine-0", world.start)
        await world.engines.take_lease(hello())
        for _ in range(2):
            await world.engines.start("engine-0", world.start)
        assert [handle.is_killed for handle in world.launcher.handles] == [True, False]
        spec = world.launcher.specs[-1]
        assert spec.environment["NCCL_DEBUG"] == "of this host"
        # With one process on it, it has all cores.
        assert int(spec.environment["OMP_NUM_THREADS"]) >= 1
        assert spec.log == tmp_path / "engine-0.log"
        missing = EngineStart(config=ServerConfig(str(tmp_path / "none"), 64), num_workers=1)
        with pytest.raises(InputError, match="does not exist on this host"):
            await world.engines.start("engine-1", missing)
        without = EngineStart(config=ServerConfig(str(tmp_path), 64, python="/no/python"), num_workers=1)
        with pytest.raises(InputError, match="/no/python cannot be started: .* No such file"):
            await world.engines.start("engine-1", without)

    asyncio.run(check())


def test_an_engine_with_a_setting_that_the_agent_does_not_know_is_refused(world):
    known = msgspec.json.decode(msgspec.json.encode(world.start))
    later = {**known, "config": {**known["config"], "computes_otherwise": True}}

    async def check() -> list[Any]:
        application = build_agent_application(world.engines, "token")
        lease = (await world.engines.take_lease(hello())).lease
        headers = {"authorization": "Bearer token", LEASE_HEADER: lease}
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://agent", headers=headers) as client:
            return [await client.put("/v1/engines/engine-0", json=start) for start in (later, known)]

    refused, started = asyncio.run(check())
    assert refused.status_code == 400
    assert "computes_otherwise of EngineStart.config is unknown: install the same megatron_rl" in refused.text
    assert started.status_code == 200
    assert len(world.launcher.specs) == 1


def test_a_beat_tells_faults_new_lines_and_the_folder_of_a_version(world, tmp_path):
    async def check() -> None:
        await world.engines.take_lease(hello())
        await world.engines.start("engine-0", world.start)
        handle = world.launcher.handles[0]
        pulse = world.engines.beat(Beat(needed={"engine-0": [7], "engine-9": [8]}, num_lines={"engine-0": 1}))
        assert (handle.needed, pulse.engines["engine-0"].lines) == ([7], ["two"])
        assert world.engines.beat(Beat(version=4)).arrived is None
        (tmp_path / "weights" / "version-4").mkdir()
        arrived = world.engines.beat(Beat(version=4)).arrived
        assert arrived is not None
        assert arrived.is_complete
        assert arrived.folder == str(tmp_path / "weights" / "version-4")
        (tmp_path / "weights" / "version-3").mkdir()
        # Only of the newest version is it known that it is complete.
        older = world.engines.beat(Beat(version=3)).arrived
        assert older is not None
        assert not older.is_complete
        watching = asyncio.create_task(world.engines.watch())
        handle.fault = "its process 7 has ended"
        async with asyncio.timeout(30):
            while world.engines.beat(Beat()).engines["engine-0"].fault != handle.fault:
                await asyncio.sleep(0.02)
        watching.cancel()

    asyncio.run(check())


@pytest.mark.parametrize(
    ("mode", "text", "words", "message"),
    [
        (0o644, "", "", "chmod 600"),
        (0o600, "short", "", "16 characters or more"),
        (0o600, "0123456789abcdef", "--tls-cert TOKEN", "belong together"),
        (0o600, "0123456789abcdef", "--tls-cert TOKEN --tls-key TOKEN", "cannot be used"),
        (0o600, "0123456789abcdef", "", None),
    ],
)
def test_mistakes_in_an_agents_flags_are_named(tmp_path, mode, text, words, message):
    token = tmp_path / "token"
    token.write_text(f"{text}\n")
    token.chmod(mode)
    flags = ["--listen", "[::1]:7100", "--token-file", str(token), "--folder", str(tmp_path)]
    flags += words.replace("TOKEN", str(token)).split()
    if message is None:
        settings = parse(flags)
        assert (settings.listen, settings.token, settings.shares_folder) == (("::1", 7100), text, False)
        return
    with pytest.raises(UsageError, match=message) as raised:
        parse(flags)
    assert len(raised.value.problems) == 1


def test_all_mistakes_in_an_agents_flags_are_named_at_once():
    with pytest.raises(UsageError) as raised:
        parse(["--listen", "10.0.0.2"])
    assert len(raised.value.problems) == 3
