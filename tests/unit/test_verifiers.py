"""The client of verifiers' environment servers, with a stand-in that speaks their wire format."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.process import CallFailed
from megatron_rl.environments.types import find_flag_problems
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.gateway import verifiers
from megatron_rl.gateway.rollout_context import RolloutContext
from megatron_rl.gateway.verifiers import VerifiersServer, build_request
from megatron_rl.sidecar.temporary import make_socket_folder
from tests.reward_pools import in_event_loop, wait_until

CONTEXT = RolloutContext({"prompt": "abc", "answer": "cba"}, "http://127.0.0.1:8000/v1", "the-key", 7, "policy")
Messages = Sequence[tuple[bytes, Any]]


def trace(name: str = "t", model: str = "policy", **scalars: Any) -> dict[str, Any]:
    """Make a delta that has a whole trace, as the server sends those of short rollouts."""
    return {
        "trace": name,
        "open": {"version": 1, "id": name, "verifiers": {"version": "0.4.0"}, "task": {}},
        "nodes": [{"message": {"role": "assistant"}, "token_ids": [1, 2]}],
        "calls": [{"model": model, "finish_reason": "stop"}],
        "links": {0: [{"node": 1}]},
        "set": {"agent": {"name": "agent", "config": {}, "trainable": True}, "ok": True, **scalars},
    }


def reply(*names: str, ok: bool = True, calls: int = 1, **fields: Any) -> tuple[bytes, Any]:
    traces = [{"id": name, "nodes": 1, "calls": calls} for name in names]
    head = {"id": "e", "ok": ok, "errors": [], "env": {"id": "reverse"}}
    return b"reply", {"success": True, "error": None, "head": head, "traces": traces, **fields}


def rewards(**scores: Any) -> dict[str, Any]:
    return {name: score if score is None else {"score": score, "weight": 0.5} for name, score in scores.items()}


class Server:
    """A stand-in for the environment server: answers each rollout with given messages."""

    def __init__(self, address: str, messages: Messages = ()) -> None:
        self.requests: list[tuple[bytes, Any]] = []
        self.is_silent = False
        self._messages = messages
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.bind(address)
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        with contextlib.closing(self._socket):
            while True:
                client, request, method, payload = await self._socket.recv_multipart()
                if method == b"health" and not self.is_silent:
                    answers: Messages = [(b"reply", {"success": True, "error": None})]
                else:
                    answers = self._messages if method == b"run" else ()
                if method != b"health":
                    self.requests.append((method, msgspec.msgpack.decode(payload)))
                for kind, content in answers:
                    data = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
                    await self._socket.send_multipart([client, request, kind, data])


@pytest.fixture
def tmp_path() -> Path:
    """Make a folder with a short path, for the socket of a server."""
    return make_socket_folder()


@contextlib.asynccontextmanager
async def serving(
    folder: Path, messages: Messages = (), *, timeout: float = 60, patience: float = 30
) -> AsyncIterator[tuple[VerifiersServer, Server]]:
    """Serve these messages, and connect a client."""
    address = f"ipc://{folder / 's'}"
    server, client = Server(address, messages), VerifiersServer(address, timeout, patience, concurrency=2)
    try:
        async with asyncio.timeout(60):
            await client.start()
            yield client, server
    finally:
        await client.close()
        server.task.cancel()
        await asyncio.gather(server.task, return_exceptions=True)


async def act(folder: Path, *messages: tuple[bytes, Any]) -> Any:
    async with serving(folder, messages) as (client, _):
        return await client.act(CONTEXT)


async def wait_for_requests(server: Server, number: int) -> list[bytes]:
    """Wait until the server has this many requests; return their methods."""
    await wait_until(lambda: len(server.requests) >= number)
    return [method for method, _ in server.requests]


@in_event_loop
async def test_rewards_are_the_weighted_ones_of_the_trace_that_was_not_discarded(tmp_path: Path) -> None:
    first = trace("first", rewards=rewards(exact=-8.0), ok=False)
    found = await act(
        tmp_path,
        (b"delta", first),
        (b"delta", {"trace": "first", "discard": True}),
        (b"delta", trace("second", rewards=rewards(exact=3.0))),
        (b"delta", {"trace": "second", "set": {"rewards": rewards(exact=1.0, format=0.5)}}),
        (b"delta", {"trace": "second", "pending": []}),
        reply("second"),
    )
    assert found == {"exact": 0.5, "format": 0.25}


@in_event_loop
async def test_a_judge_with_a_model_of_its_own_is_no_second_agent(tmp_path: Path) -> None:
    judge = trace("judge", "another", rewards=rewards(own=9.0))
    found = await act(tmp_path, (b"delta", judge), (b"delta", trace(rewards=rewards(exact=1.0))), reply("judge", "t"))
    assert found == {"exact": 0.5}


@in_event_loop
async def test_a_request_has_the_task_and_the_way_to_the_policy(tmp_path: Path) -> None:
    async with serving(tmp_path, [(b"delta", trace(rewards=rewards(exact=1.0))), reply("t")]) as (client, server):
        await client.act(CONTEXT)
    ((method, request),) = server.requests
    assert method == b"run"
    assert request["task_data"] == {"prompt": "abc", "answer": "cba"}
    assert (request["model"], request["sampling"]) == ("policy", {})
    assert (request["client"]["type"], request["client"]["base_url"]) == ("eval", CONTEXT.address)
    assert set(request["client"]["headers"].values()) == {"Bearer the-key", "the-key"}
    whole = RolloutContext({"prompt": "?", "task": {"prompt": None, "turns": ["a", "b"]}}, "", "", 0, "policy")
    assert build_request(whole)["task_data"] == {"prompt": None, "turns": ["a", "b"]}


DONE = trace(rewards=rewards(exact=1.0))
FAILED = {**trace(ok=False, rewards={"exact": None}), "errors": [{"type": "TaskError", "message": "no such word"}]}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([(b"reply", {"success": False, "error": "ValueError: no such task"})], "the server failed: ValueError: no"),
        ([(b"delta", FAILED), reply("t", ok=False)], "TaskError: no such word"),
        ([(b"delta", DONE), reply("t", ok=False)], "the rollout ended by a failure without a name"),
        ([(b"delta", trace(rewards=rewards(exact=1.0), ok=False, stop_condition="late")), reply("t")], "by late"),
        ([(b"delta", trace()), reply("t")], "gave no reward"),
        ([(b"delta", trace(rewards=rewards(exact=1.0, judge=None))), reply("t")], "gave no reward judge"),
        ([(b"delta", trace(rewards=rewards(exact=float("nan")))), reply("t")], "the reward exact is nan, and must be"),
        ([(b"delta", DONE), reply("t", "u")], "messages of the trace u were lost"),
        ([(b"delta", DONE), reply("t", calls=2)], "messages of the trace t were lost"),
        ([(b"delta", DONE), (b"delta", {**DONE, "trace": "u"}), reply("t", "u")], "these did: agent, agent"),
        ([(b"delta", trace(model="another", rewards=rewards(exact=1.0))), reply("t")], "these did: none"),
        ([(b"delta", trace(agent={"name": "judge", "trainable": False})), reply("t")], "these did: judge"),
        ([(b"delta", b"\xc1")], "not of verifiers 0.4"),
        ([(b"delta", {"trace": 3})], "not of verifiers 0.4"),
        ([(b"another", {})], "not of verifiers 0.4: a message of kind"),
    ],
)
@in_event_loop
async def test_a_rollout_without_a_reward_of_its_own_fails_by_name(
    tmp_path: Path, messages: Messages, reason: str
) -> None:
    with pytest.raises(CallFailed, match=reason):
        await act(tmp_path, *messages)


@in_event_loop
async def test_a_rollout_that_is_called_off_is_cancelled_on_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, server):
        acting = asyncio.create_task(client.act(CONTEXT))
        await wait_for_requests(server, 1)
        acting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acting
        assert await wait_for_requests(server, 2) == [b"run", b"cancel"]
        assert list(server.requests[1][1]) == ["request_id"]


@in_event_loop
async def test_a_rollout_that_takes_too_long_is_cancelled_on_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path, timeout=0.2) as (client, server):
        with pytest.raises(CallFailed, match=r"the server used more than 0\.2 seconds"):
            await client.act(CONTEXT)
        assert await wait_for_requests(server, 2) == [b"run", b"cancel"]


@in_event_loop
async def test_rollouts_beyond_the_bound_wait_for_a_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as (client, server):
        acting = [asyncio.create_task(client.act(CONTEXT)) for _ in range(3)]
        await wait_for_requests(server, 2)
        await asyncio.sleep(0.1)
        assert [method for method, _ in server.requests] == [b"run"] * 2
        acting[0].cancel()
        assert sorted(await wait_for_requests(server, 4)) == [b"cancel", b"run", b"run", b"run"]
        for task in acting:
            task.cancel()
        await asyncio.gather(*acting, return_exceptions=True)


@in_event_loop
async def test_a_server_that_falls_silent_fails_its_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "_ASK_SECONDS", 0.01)
    async with serving(tmp_path, patience=0.5) as (client, server):
        server.is_silent = True
        with pytest.raises(CallFailed, match=r"said nothing for 0\.5 seconds"):
            await client.act(CONTEXT)
        # It may only have been slow, and would act to the rollout's end.
        assert await wait_for_requests(server, 2) == [b"run", b"cancel"]


@in_event_loop
async def test_a_run_without_a_server_ends_before_it_begins(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="no environment server of verifiers answered within 0.2 seconds"):
        await VerifiersServer(f"ipc://{tmp_path / 's'}", 60, 0.2, 1).start()
    with pytest.raises(UsageError, match=r"--rollout-verifiers here: .*; write it as tcp://"):
        await VerifiersServer("here", 60, 0.2, 1).start()


def test_one_flag_says_who_acts(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("")
    config = EnvironmentConfig(agent=f"{agent}:act", verifiers="tcp://127.0.0.1:5000")
    (problem,) = find_flag_problems(config)
    assert problem.startswith("--rollout-agent and --rollout-verifiers each say who writes")
    assert find_flag_problems(EnvironmentConfig(verifiers="tcp://127.0.0.1:5000")) == []
    assert EnvironmentConfig(verifiers="tcp://127.0.0.1:5000").has_turns
