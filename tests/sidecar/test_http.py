"""The rollout service as ranks reach it: over HTTP, with a token, from many threads at once."""

import asyncio
import contextlib
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from fastapi.routing import APIRoute

from megatron_rl.errors import InputError, MegatronRLError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.client import (
    EvaluationLost,
    IterationLost,
    RolloutClient,
    RolloutError,
    WorkersChanged,
    read_token,
)
from megatron_rl.sidecar.engines.scripted import ScriptedEngine
from megatron_rl.sidecar.evaluation import EvaluationFailed
from megatron_rl.sidecar.http import build_application
from megatron_rl.sidecar.iteration import IterationFailed, NoSuchSlot
from megatron_rl.sidecar.service import Conflict, RolloutService
from megatron_rl.sidecar.serving import open_listener
from megatron_rl.sidecar.supervisor import WrongWorkerCount
from megatron_rl.sidecar.temporary import make_socket_folder
from tests.sidecar.scripted_service import Engines, Memory, RewardLength, engine, submission, weights

TOKEN = "secret"


@pytest.fixture
def tmp_path() -> Path:
    """Make a folder with a short path, for the socket of a service."""
    return make_socket_folder()


class Server:
    """A service on a unix socket, in a thread of this process."""

    def __init__(self, socket: Path, engines: tuple[ScriptedEngine, ...]):
        self.socket = socket
        self.service: RolloutService | None = None
        self._engines = engines
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self.service = RolloutService(Engines(*self._engines), RewardLength(), Memory())
        app = build_application(self.service, TOKEN, shutdown=self.stop)
        self._server = uvicorn.Server(uvicorn.Config(app, uds=str(self.socket), log_level="warning"))
        await self._server.serve()
        await self.service.close()

    def start(self) -> None:
        self._thread.start()
        deadline = time.monotonic() + 60
        while not (self._server and self._server.started):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def client(self, token: str = TOKEN, patience: float = 5.0) -> RolloutClient:
        return RolloutClient("http://sidecar", token, patience, httpx.HTTPTransport(uds=str(self.socket)))

    def raw(self) -> httpx.Client:
        return httpx.Client(base_url="http://sidecar", transport=httpx.HTTPTransport(uds=str(self.socket)), timeout=10)


@contextlib.contextmanager
def started_server(folder: Path, *engines: ScriptedEngine) -> Iterator[Server]:
    server = Server(folder / "socket", engines or (engine("0"), engine("1")))
    server.start()
    try:
        yield server
    finally:
        server.stop()
        server.join()


def started(server: Server) -> RolloutClient:
    client = server.client()
    client.take_lease("run")
    client.publish(weights(), 10)
    return client


def test_ranks_in_many_threads_get_the_same_bytes_for_the_same_slot(tmp_path: Path) -> None:
    with started_server(tmp_path, engine("0", delay=lambda r: 0.02), engine("1")) as server, started(server) as client:
        lease = client.take_lease("run")
        client.publish(weights(), 10)

        def rank(seed: int) -> dict[tuple[int, int], wire.Slot]:
            with server.client() as mine:
                mine.use_lease(lease)
                places = [(replica, index) for replica in range(2) for index in range(2)]
                return {place: mine.slot(0, *place, 10) for place in random.Random(seed).sample(places, 4)}

        with ThreadPoolExecutor(8) as pool:
            ranks = [pool.submit(rank, seed) for seed in range(8)]
            client.submit(submission())
            answers = [future.result() for future in ranks]
        assert all(answer == answers[0] for answer in answers)
        assert sorted(p.prompt_index for slot in answers[0].values() for p in slot.parts) == list(range(8))
        drafts = wire.Drafts(count=2, drafted=8, accepted=3)
        assert server.service is not None
        server.service.engines.drafts = drafts  # type: ignore[attr-defined]
        assert client.complete(0).drafts == drafts
        assert client.status()["iteration"]["groups"]["claimed"] == 8


def test_a_failed_iteration_reaches_every_rank_with_its_reason(tmp_path: Path) -> None:
    faults = {f"run-0-{i}": "die" for i in range(8)}
    with started_server(tmp_path, engine("0", group_faults=faults)) as server, started(server) as client:
        client.submit(submission())
        for place in ((0, 0), (1, 1)):
            with pytest.raises(IterationLost, match="no engine is left"):
                client.slot(0, *place, 10)


@pytest.mark.parametrize(
    ("kind", "expected", "said"),
    [
        (IterationFailed, IterationLost, "the reason"),
        (EvaluationFailed, EvaluationLost, "the reason"),
        (WrongWorkerCount, WorkersChanged, "the reason"),
        (Conflict, RolloutError, "POST /v1/iterations was answered 409: the reason"),
        (NoSuchSlot, RolloutError, "POST /v1/iterations was answered 404: the reason"),
        (InputError, RolloutError, "POST /v1/iterations was answered 400: the reason"),
        (MegatronRLError, RolloutError, "POST /v1/iterations was answered 500: the reason"),
    ],
)
def test_a_rank_tells_errors_of_the_service_apart_after_their_classes_were_renamed(
    kind: type[Exception], expected: type[RolloutError], said: str, tmp_path: Path
) -> None:
    renamed = type("Renamed", (kind,), {})

    async def fail(_: object) -> None:
        raise renamed("the reason")

    with started_server(tmp_path) as server, started(server) as client:
        assert server.service is not None
        server.service.submit = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(expected) as caught:
            client.submit(submission())
    assert (type(caught.value), str(caught.value)) == (expected, said)


def test_without_the_token_every_route_but_health_answers_401(tmp_path: Path) -> None:
    with started_server(tmp_path) as server, server.raw() as raw:
        assert server.service is not None
        app = build_application(server.service, TOKEN, shutdown=lambda: None)
        routes = [
            (method, route.path) for route in app.routes if isinstance(route, APIRoute) for method in route.methods
        ]
        assert len(routes) >= 10
        for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/no/such/route")]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
                expected = 200 if path == "/health" else 401
                assert (
                    raw.request(method, re.sub(r"{(\w+)(:int)?}", "0", path), headers=headers).status_code == expected
                )
        with pytest.raises(RolloutError, match="401"), server.client(token="wrong") as wrong:
            wrong.status()


def test_a_thousand_malformed_requests_are_answered_and_change_nothing(tmp_path: Path) -> None:
    generator = random.Random(0)
    valid = wire.encode(submission())
    paths = [
        "/v1/publish",
        "/v1/iterations",
        "/v1/iterations/0/slots/0/0",
        "/v1/iterations/x/slots/-1/99999999999999999",
    ]
    with started_server(tmp_path) as server, started(server) as client, server.raw() as raw:
        before = client.status()
        seen: dict[int, int] = {}
        for number in range(1000):
            body = bytearray(valid[: generator.randrange(len(valid))] if number % 2 else generator.randbytes(200))
            for _ in range(3):
                if body:
                    body[generator.randrange(len(body))] = generator.randrange(256)
            headers = {"Authorization": f"Bearer {TOKEN}", "X-Lease": generator.choice(["1", "0", "9", "-1", "x", ""])}
            answer = raw.request(
                generator.choice(["POST", "GET", "PUT", "DELETE"]),
                generator.choice(paths),
                params={"patience": generator.choice(["0", "nan", "-5", "0.001", "x"])},
                headers=headers,
                content=bytes(body),
            )
            seen[answer.status_code] = seen.get(answer.status_code, 0) + 1
        assert set(seen) <= {204, 400, 404, 405, 409, 422}, seen
        after = client.status()
        before["counters"], after["counters"] = {}, {}
        assert before == after


def test_threads_share_a_client_and_one_that_waits_keeps_no_other_waiting(tmp_path: Path) -> None:
    # The engine answers after all others have been answered, so any request for its group waits to the end.
    let_go = threading.Event()

    class Held(ScriptedEngine):
        async def generate(self, request):
            await asyncio.to_thread(let_go.wait, 60)
            return await super().generate(request)

    with started_server(tmp_path, Held("0", engine().script)) as server, started(server) as client:
        client.submit(submission())
        with ThreadPoolExecutor(8) as pool:
            waits = [pool.submit(client.slot, 0, replica, index, 10) for replica in range(2) for index in range(2)]
            while len(client.status()["iteration"]["slots_waiting"]) < len(waits):
                time.sleep(0.01)
            versions = list(pool.map(lambda _: client.status()["version"], range(60)))
            assert versions == [0] * 60
            assert not any(wait.done() for wait in waits)
            let_go.set()
            prompts = [part.prompt_index for wait in waits for part in wait.result().parts]
        assert sorted(prompts) == list(range(8))
        client.complete(0)


def test_a_sidecar_that_stays_away_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with (
        RolloutClient("http://sidecar", TOKEN, 0.6, httpx.HTTPTransport(uds=str(tmp_path / "none"))) as client,
        pytest.raises(RolloutError, match="did not answer for 1 s.*read its log, or start one"),
    ):
        client.status()


def test_a_stopped_sidecar_is_named_after_the_patience_and_not_after_twice_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.shared.protocol.client._POLL_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(tmp_path / "socket"))
        # The kernel accepts connections to a process that is stopped, and no answer comes.
        stopped.listen()
        stopped.setblocking(False)
        transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"))
        with (
            RolloutClient("http://sidecar", TOKEN, 0.4, transport) as client,
            pytest.raises(RolloutError, match=r"did not answer for \d+ s \(ReadTimeout"),
        ):
            client.status()
        assert stopped.accept()
        with pytest.raises(BlockingIOError):
            stopped.accept()


def test_a_publish_is_repeated_after_a_broken_connection_and_not_after_its_deadline() -> None:
    faults: list[httpx.TransportError] = [httpx.ReadError("connection reset")]

    def answer(_: httpx.Request) -> httpx.Response:
        if faults:
            # A publish may take longer than the client waits for a sidecar that is away.
            time.sleep(0.02)
            raise faults.pop()
        return httpx.Response(200, json={"published": {}})

    with RolloutClient("http://sidecar", TOKEN, patience=0.01, transport=httpx.MockTransport(answer)) as client:
        assert client.publish(weights(1), 60.0) == wire.PublishAnswer()
        faults.append(httpx.ReadTimeout("timed out"))
        with pytest.raises(RolloutError, match="POST /v1/publish was not answered within 70 s: http://sidecar/v1/st"):
            client.publish(weights(1), 60.0)


def test_a_client_waits_for_a_sidecar_that_is_only_late(tmp_path: Path) -> None:
    server = Server(tmp_path / "socket", (engine(),))
    late = threading.Timer(0.7, server.start)
    late.start()
    with server.client() as client:
        assert client.take_lease("run")
        client.shutdown()
    late.join()
    server.join()


BOTH = f"and this side speaks {wire.WIRE_VERSION}: install the same megatron_rl on both"
LATER = wire.WIRE_VERSION + 1


def test_a_trainer_of_another_wire_version_takes_no_lease_and_is_told_both_versions(tmp_path: Path) -> None:
    with started_server(tmp_path) as server, started(server) as client, server.raw() as raw:
        for query in ("", "&wire=1", "&wire=2", "&wire=3"):
            answer = raw.post(f"/v1/lease?run=run{query}", headers={"Authorization": f"Bearer {TOKEN}"})
            assert answer.status_code == 400
            said = f"the wire version of the trainer is {query[-1:] or 1}, {BOTH}"
            assert answer.json()["error"] == said
        # The lease still belongs to the first trainer.
        client.submit(submission())


@pytest.mark.parametrize(("answer", "theirs"), [({"lease": 7}, 1), ({"lease": 7, "wire": LATER}, LATER)])
def test_a_trainer_refuses_a_sidecar_of_another_wire_version(answer: dict[str, int], theirs: int) -> None:
    sidecar = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
    said = f"the wire version of the sidecar at http://sidecar is {theirs}, {BOTH}"
    with RolloutClient("http://sidecar", TOKEN, transport=sidecar) as client, pytest.raises(InputError, match=said):
        client.take_lease("run")


def test_a_message_of_another_wire_version_is_named_by_it_whatever_its_fields() -> None:
    current = msgspec.msgpack.decode(wire.encode(weights()))
    said = f"the wire version of the message is {LATER}, {BOTH}"
    for fields in ({}, {"colour": 1}, {"version": "next"}):
        message = msgspec.msgpack.encode(current | {"wire": LATER} | fields)
        with pytest.raises(InputError, match=said):
            wire.decode(message, wire.Weights)
    unknown = msgspec.msgpack.encode(current | {"colour": 1})
    with pytest.raises(InputError, match=f"not a Weights of wire version {wire.WIRE_VERSION}: .*colour"):
        wire.decode(unknown, wire.Weights)


def test_a_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(0o644)
    with pytest.raises(RolloutError, match="chmod 600"):
        read_token(path)
    path.chmod(0o600)
    assert read_token(path) == "secret"


def test_the_openapi_page_describes_the_routes(tmp_path: Path) -> None:
    with started_server(tmp_path) as server, server.raw() as raw:
        headers: dict[str, Any] = {"Authorization": f"Bearer {TOKEN}"}
        description = raw.get("/openapi.json", headers=headers).json()
        assert "/v1/iterations/{version}/slots/{replica}/{index}" in str(description["paths"]).replace(":int", "")
        assert raw.get("/docs", headers=headers).status_code == 200


def test_probe_answers_and_mismatches_reach_the_service(tmp_path: Path) -> None:
    probed = msgspec.structs.replace(weights(), probe=wire.encode_tokens([3, 4]))
    answer = wire.ProbeAnswer(run="run", version=0, fingerprint="weights-0", log_probs=b"", dtype="float32")
    mismatch = wire.Mismatch(mean=1e-6, largest=1e-5, bound=None)
    with started_server(tmp_path) as server, started(server) as client:
        with ThreadPoolExecutor(1) as pool:
            published = pool.submit(client.publish, probed, 10)
            client.probed(answer)
            assert published.result() == wire.PublishAnswer(kind=wire.EngineKind(has_model=False))
        client.submit(submission())
        for place in [(replica, index) for replica in range(2) for index in range(2)]:
            client.slot(0, *place, 10)
        client.refuse(0, msgspec.structs.replace(mismatch, bound=1e-9))
        with pytest.raises(IterationLost, match="beyond"):
            client.complete(0, mismatch)


def test_every_write_of_the_service_is_sent_at_once():
    with (
        open_listener("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as ours,
    ):
        assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
