"""Agents in processes of their own: what they are given, what they may reach, how they fail, and what that ends."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.environments.types import OnError
from megatron_rl.errors import MegatronRLError, UsageError
from megatron_rl.shared.protocol import wire
from megatron_rl.shared.protocol.turns import mask_sampled
from megatron_rl.sidecar.agent_rollouts import GatewayOpening
from megatron_rl.sidecar.engines import GroupRequest
from tests.agents import Engines, acting
from tests.reward_pools import in_event_loop, wait_until

AGENT = '''
import asyncio, contextlib, http.client, json, os, time
from urllib.parse import urlsplit

def ask(base_url, api_key, model, messages, raw=None):
    place = urlsplit(base_url)
    connection = http.client.HTTPConnection(place.hostname, place.port)
    body = raw if raw is not None else json.dumps({"model": model, "messages": messages})
    connection.request("POST", place.path + "/chat/completions", body, {"authorization": "Bearer " + api_key})
    answer = json.loads(connection.getresponse().read())
    if "error" in answer:
        raise RuntimeError(answer["error"]["message"])
    return answer["choices"][0]["message"]["content"]

async def act(base_url, api_key, model, task, seed, **row):
    """Have two turns, and do what the task says after the first one."""
    policy = (base_url, api_key, model)
    messages = [{"role": "user", "content": "7 8"}]
    if task == "silent": raise RuntimeError("cannot begin")
    if task == "mute": return 1.0
    if task == "refused":
        for _ in range(3):
            with contextlib.suppress(RuntimeError): ask(*policy, None, raw=json.dumps({"model": model, "top_p": 0.5}))
        return 1.0
    if task == "caught":
        with contextlib.suppress(RuntimeError): ask(*policy, [{"role": "user", "content": "7 8 2"}])
        return 1.0
    if task == "foreseen": return len([ask(*policy, [{"role": "user", "content": said}]) for said in ("7 8 2", "7 8")])
    messages += [{"role": "assistant", "content": ask(*policy, messages)}, {"role": "user", "content": "20 21"}]
    if task == "raise": raise RuntimeError("no such move")
    if task == "hang": await asyncio.sleep(60)
    if task == "stubborn": time.sleep(60)
    if task == "die": os._exit(3)
    if task == "malformed": ask(*policy, None, raw="{")
    if task == "none": return None
    if task == "text": return "much"
    if task == "nan": return {"score": float("nan")}
    if task == "endless":
        while True: ask(*policy, messages)
    said = ask(*policy, messages)
    if task == "parts": return {"turns": 2, "seed": seed % 10, "others": len(row)}
    return 1.0 if said else 0.0

def plain(base_url, api_key, model):
    ask(base_url, api_key, model, [{"role": "user", "content": "7 8"}])
    return True

def other(url): pass
'''


@in_event_loop
async def test_agents_act_through_the_gateway_and_each_fails_alone(tmp_path: Path) -> None:
    async with acting(tmp_path, AGENT) as world:
        first, second = await world.act(size=2, task="parts", other="")
        assert first.components == {"turns": 2.0, "seed": 0.0, "others": 2.0}
        assert (first.reward, second.reward, first.seed, second.seed) == (4.0, 5.0, 100, 101)
        tokens = wire.decode_tokens(first.tokens)
        assert tokens[~mask_sampled(first)].tolist() == [20, 21]
        assert (tokens[0], tokens[4], first.finish_reason) == (2, 6, "stop")
        assert not first.branches
        assert world.engines.requests[0].prompt_tokens == (7, 8)
        for task in ("raise", "malformed", "text", "nan"):
            (response,) = await world.act(task=task)
            assert (response.finish_reason, response.reward) == ("failed", -1.0)
            assert response.failure
            assert response.components == {"agent": -1.0}
            assert len(response.tokens) // 4 == 2
            with pytest.raises(
                MegatronRLError, match=r"the agent of prompt 4 \(rows:4\) failed: \S.*-on-error exclude$"
            ):
                await world.act(task=task, on_error=OnError(stops=True))
        # A refusal at a limit never ends the run.
        for on_error, reward in ((OnError(reward=-1.0), -1.0), (OnError(stops=True), 0.0), (OnError(), 0.0)):
            (response,) = await world.act(task="endless", on_error=on_error, sampling={"max_turns": 3})
            assert (response.finish_reason, response.reward) == ("limit", reward)
        (response,) = await world.act(task="finish", sampling={"max_tokens": 5})
        assert (response.finish_reason, len(response.tokens) // 4, response.reward) == ("length", 5, 1.0)
        # The call that comes last has said what another one was given, so the response has fewer tokens.
        (response,) = await world.act(task="foreseen", sampling={"max_tokens": 4})
        assert (response.finish_reason, len(response.tokens) // 4) == ("limit", 3)
        (response,) = await world.act(task="none", functions=("exact",))
        assert (response.reward, response.components) == (0.0, {})
        # A function's values would take the place of the agent's.
        (response,) = await world.act(task="parts", functions=("exact", "seed"))
        assert (response.finish_reason, response.components) == ("failed", {"agent": -1.0})
        assert response.failure == "returned a reward named seed, and --reward has a function seed: rename one"
        for task, said in (
            ("none", "returned None"),
            ("mute", "left nothing to train on: it ended without a call"),
            ("refused", "3 of its calls were refused, the last one because 2 parts are refused: top_p 0.5 would"),
        ):
            with pytest.raises(MegatronRLError, match=said):
                await world.act(task=task)
        # There is nothing that a reward could be for.
        (response,) = await world.act(task="silent")
        assert (response.reward, response.cause, response.tokens) == (None, "raised", b"")
        # Of an agent that takes a refusal for an end, too.
        with pytest.raises(MegatronRLError, match="had no answer: this rollout may have 1 tokens"):
            await world.act(task="caught", sampling={"max_tokens": 1})
        assert (await world.act(task="finish"))[0].reward == 1.0


@in_event_loop
async def test_an_agent_whose_process_ends_fails_alone_and_its_workers_end_is_not_its_own(
    tmp_path: Path, caplog
) -> None:
    async with acting(tmp_path, AGENT) as world:
        dying = asyncio.create_task(world.act(task="die"))
        others = [asyncio.create_task(world.act(task="finish")) for _ in range(2)]
        (response,) = await dying
        assert (response.finish_reason, response.reward, len(response.tokens) // 4) == ("failed", -1.0, 2)
        assert "its process ended with exit code 3: its reward is -1" in caplog.text
        assert response.cause == "process"
        assert {(await other)[0].reward for other in others} == {1.0}
        (worker,) = world.agents._processes
        assert not worker.is_worn
        # The rollouts of a worker that ends begin again in another one.
        num_asked = len(world.engines.requests)
        world.engines.longest = 2
        waiting = asyncio.create_task(world.act(task="finish"))
        await wait_until(lambda: len(world.engines.requests) >= num_asked + 2)
        world.engines.longest = 1000
        os.kill(worker._pid, signal.SIGKILL)
        assert (await waiting)[0].reward == 1.0
        assert world.agents._processes != [worker]


@in_event_loop
async def test_the_time_in_which_calls_are_unanswered_is_not_the_agents(tmp_path: Path, caplog) -> None:
    loop = asyncio.get_running_loop()
    read_clock, hours = loop.time, [0]
    loop.time = lambda: read_clock() + 3600 * hours[0]  # type: ignore[method-assign]

    async def generate(request: GroupRequest) -> list[wire.Response]:
        # An engine is lost, and an hour goes by until another one answers.
        hours[0] += 1
        for _ in range(100):
            await asyncio.sleep(0)
        return await Engines.generate(engines, request)

    async with acting(tmp_path, AGENT, agent_timeout=1800.0, concurrency=1) as world:
        engines, world.engines.generate = world.engines, generate  # type: ignore[method-assign]
        # One of them waits for its place.
        assert [response.reward for response in await world.act(task="finish", size=2)] == [1.0, 1.0]
        hanging = asyncio.create_task(world.act(task="hang"))
        await wait_until(lambda: len(world.engines.requests) >= 5)
        # Its call is answered, once it counts.
        while world.gateway.status()["gateway_rollouts"]:
            hours[0] += 1
            await asyncio.sleep(0.01)
        (response,) = await hanging
        assert (response.finish_reason, response.reward, len(response.tokens) // 4) == ("failed", -1.0, 2)
        assert "used more than 1800 seconds of its own: its reward is -1" in caplog.text


@in_event_loop
async def test_an_iteration_that_is_given_up_ends_its_rollouts_and_their_keys(tmp_path: Path) -> None:
    async with acting(tmp_path, AGENT) as world:
        hanging = asyncio.create_task(world.act(task="stubborn", size=2))
        await wait_until(lambda: len(world.engines.requests) >= 2)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert world.gateway.status()["gateway_rollouts"] == 0
        (worker,) = world.agents._processes
        assert not worker.num_open
        assert not worker.is_worn
        assert (await world.act(task="finish"))[0].reward == 1.0


@in_event_loop
async def test_a_function_that_cannot_act_is_refused_by_name(tmp_path: Path) -> None:
    said = "other of .*: an agent has the parameters base_url, api_key and model, and base_url is missing"
    with pytest.raises(UsageError, match=f"--rollout-agent: .*{said}"):
        async with acting(tmp_path, AGENT, "other"):
            raise AssertionError("it started")
    with pytest.raises(UsageError, match=r"write --rollout-agent FILE\.py:FUNCTION"):
        GatewayOpening.open(EnvironmentConfig(agent="agent.py"), PoolSettings())
