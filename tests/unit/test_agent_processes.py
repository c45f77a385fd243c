"""Agents as processes: each rollout has one of its own, with the policy's address and key in its environment."""

import asyncio
import os
import signal
import socket
import venv
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.confined.pool import Interpreter
from megatron_rl.environments.types import AGENT_PYTHON_FLAG, OnError
from megatron_rl.errors import MegatronRLError, UsageError
from megatron_rl.gateway import processes
from megatron_rl.gateway.processes import list_children
from megatron_rl.shared.protocol import wire
from tests.agents import World, acting
from tests.reward_pools import in_event_loop, wait_until

NUM_ROLLOUTS = 32
# Seconds that no other program on this host sleeps.
MARK = f"600.{os.getpid()}"
# A prompt has one word from here on, its rollout's own.
FIRST_WORD = 100
AGENT = '''
import asyncio, multiprocessing, os
from concurrent.futures import ThreadPoolExecutor
import anthropic, openai

def set_environment(base_url, api_key):
    """Do what people did when a rollout had no environment of its own."""
    os.environ.update(OPENAI_BASE_URL=base_url, OPENAI_API_KEY=api_key)

def ask(word, client=None):
    messages = [{"role": "user", "content": str(word)}]
    answer = (client or openai.OpenAI()).chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content

def act_alone(base_url, api_key, model, word):
    set_environment(base_url, api_key)
    return float(bool(ask(word)) and bool(ask(word)))

def act_with_both(base_url, api_key, model, word):
    """Use what the process found in its environment."""
    messages = [{"role": "user", "content": str(word)}]
    told = anthropic.Anthropic().messages.create(model=model, max_tokens=9, messages=messages)
    return float(bool(ask(word)) and bool(told.content[0].text))

def act_in_threads(base_url, api_key, model, word):
    set_environment(base_url, api_key)
    with ThreadPoolExecutor(2) as executor:
        return float(all(executor.map(ask, [word, word])))

async def act_in_tasks(base_url, api_key, model, word):
    set_environment(base_url, api_key)

    async def ask_client():
        async with openai.AsyncOpenAI() as client:
            messages = [{"role": "user", "content": str(word)}]
            return await client.chat.completions.create(model=model, messages=messages)

    return float(all(await asyncio.gather(ask_client(), ask_client())))

def act_in_processes(base_url, api_key, model, word):
    set_environment(base_url, api_key)
    children = [multiprocessing.get_context("fork").Process(target=ask, args=(word,)) for _ in range(2)]
    for child in children: child.start()
    for child in children: child.join()
    return float(not any(child.exitcode for child in children))
'''


async def act(world: World, number: int, **columns: Any) -> wire.Response:
    """Have one rollout, whose word follows from its number."""
    (response,) = await world.act(number, word=FIRST_WORD + number, **columns)
    return response


async def act_many(world: World) -> None:
    """Have many rollouts, and check that the engines were asked for each with its own word alone."""
    responses = await asyncio.gather(*[act(world, number) for number in range(NUM_ROLLOUTS)])
    assert [response.reward for response in responses] == [1.0] * NUM_ROLLOUTS
    asked: dict[str, set[int]] = {}
    for request in world.engines.requests:
        words = {token for token in request.prompt_tokens if token >= FIRST_WORD}
        asked.setdefault(request.request_id.partition("-")[0], set()).update(words)
    assert asked == {f"{number}": {FIRST_WORD + number} for number in range(NUM_ROLLOUTS)}


@pytest.mark.parametrize(
    "name",
    [
        "act_in_tasks",
        *[pytest.param(f"act_{how}", marks=pytest.mark.each_change) for how in ("alone", "in_threads", "in_processes")],
        "act_with_both",
    ],
)
@in_event_loop
async def test_rollouts_whose_clients_read_the_environment_hold_their_own_words_alone(
    tmp_path: Path, name: str
) -> None:
    async with acting(tmp_path, AGENT, name) as world:
        await act_many(world)


@in_event_loop
async def test_the_process_of_a_rollout_has_three_mebibytes_of_its_own_at_most(tmp_path: Path) -> None:
    async with (
        acting(tmp_path, AGENT, "act_alone") as world,
        world.agents.hold({"word": 7}, 1) as rollout,
    ):
        lines = Path(f"/proc/{rollout.process}/smaps_rollup").read_text().splitlines()
        private = [int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:"))]
        assert len(private) == 2
        assert 0 < sum(private) < 3 << 10


# Calls the policy with nothing but Python's own packages.
BARE_AGENT = """
import http.client, json, os, subprocess, sys, time
from urllib.parse import urlsplit

def ask(key=None, **headers):
    place = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(place.hostname, place.port)
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "100"}]})
    headers["authorization"] = "Bearer " + (key or os.environ["OPENAI_API_KEY"])
    connection.request("POST", place.path + "/chat/completions", body, headers)
    answer = json.loads(connection.getresponse().read())
    return answer.get("error", {}).get("message", "")
"""


@in_event_loop
async def test_agents_run_in_the_python_of_another_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "other", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (packages / "only_there.py").write_text("WORDS = 3")
    program = tmp_path / "other" / "bin" / "agents-tool"
    program.write_text("#!/bin/sh\necho 4")
    program.chmod(0o700)
    text = f"""{BARE_AGENT}
import importlib.util, only_there

def act(base_url, api_key, model, word):
    assert not ask()
    foreign = [name for name in ("msgspec", "openai", "torch") if importlib.util.find_spec(name)]
    said = subprocess.run(["agents-tool"], capture_output=True, check=True).stdout
    return {{"words": only_there.WORDS, "tool": int(said), "foreign": len(foreign)}}
"""

    python = tmp_path / "other" / "bin" / "python"
    async with acting(tmp_path, text, agent_python=python) as world:
        response = await act(world, 0)
        assert response.components == {"words": 3, "tool": 4, "foreign": 0}
        assert str(python) in world.agents.identity


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("#!/bin/sh\nexit 3", "cannot be run as Python: .*exit status 3"),
        ('#!/bin/sh\necho \'[[3, 9], "/", "/", []]\'', "is Python 3.9, and must be 3.11 or later"),
    ],
)
def test_a_python_that_agents_cannot_run_in_is_refused_by_name(tmp_path: Path, program: str, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o700)

    with pytest.raises(UsageError, match=f"--rollout-agent-python .*{said}"):
        Interpreter.ask(python, AGENT_PYTHON_FLAG)


@in_event_loop
async def test_clients_that_the_agents_file_makes_call_for_the_rollout_of_their_process(tmp_path: Path) -> None:
    text = f"""{BARE_AGENT}
import openai
CLIENT = openai.OpenAI()

def act(base_url, api_key, model, word):
    messages = [{{"role": "user", "content": str(word)}}]
    return float(all(CLIENT.chat.completions.create(model=model, messages=messages).choices for _ in range(2)))
"""

    async with acting(tmp_path, text) as world:
        await act_many(world)


@in_event_loop
async def test_rollouts_act_at_once_though_none_connects_in_its_own_process(tmp_path: Path) -> None:
    text = f'''{BARE_AGENT}
from pathlib import Path

def act(base_url, api_key, model, word):
    # Each in the folder of a rollout, which is removed at its end.
    Path("~/began").expanduser().touch()
    while len(list(Path("~").expanduser().parent.glob("*/began"))) < 4: time.sleep(0.01)
    subprocess.run([sys.executable, "-c", "import agent; agent.ask()"], cwd="{tmp_path}", check=True)
    return 1.0
'''

    async with acting(tmp_path, text) as world:
        responses = await asyncio.gather(*[act(world, number) for number in range(4)])
        assert [response.reward for response in responses] == [1.0] * 4


@in_event_loop
async def test_rollouts_of_a_worker_that_is_stuck_begin_again_in_another_one(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    read_clock, hours = loop.time, [0]
    loop.time = lambda: read_clock() + 3600 * hours[0]  # type: ignore[method-assign]
    async with acting(tmp_path, AGENT, "act_alone", agent_timeout=1e9) as world:
        (worker,) = world.agents._processes
        os.kill(worker._pid, signal.SIGSTOP)
        acting_one = asyncio.create_task(act(world, 0))
        await wait_until(lambda: worker._waiting)
        hours[0] += 1
        assert (await acting_one).reward == 1.0
        await wait_until(lambda: not worker.is_alive)


@in_event_loop
async def test_numpys_generator_is_seeded_in_the_first_rollout_of_a_worker_too(tmp_path: Path) -> None:
    text = f"""{BARE_AGENT}
def act(base_url, api_key, model, word, seed):
    ask()
    import numpy
    return {{"drawn": numpy.random.rand(), "expected": numpy.random.RandomState(seed % 2**32).rand()}}
"""

    async with acting(tmp_path, text) as world:
        components = (await act(world, 0)).components
        assert components["drawn"] == components["expected"]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), 40)", "was killed by signal 40"),
    ],
)
@in_event_loop
async def test_a_rollouts_end_is_noticed_though_a_module_blocks_the_signal_of_it(
    tmp_path: Path, end: str, reason: str
) -> None:
    text = f"""{BARE_AGENT}
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGCHLD}})

def act(base_url, api_key, model, word):
    ask()
    {end}
"""

    async with acting(tmp_path, text) as world:
        with pytest.raises(MegatronRLError, match=f"its process {reason}"):
            await act(world, 0, on_error=OnError(stops=True))


@in_event_loop
async def test_a_process_that_is_not_the_workers_child_outlives_the_end_of_a_rollout(tmp_path: Path) -> None:
    stranger = await asyncio.create_subprocess_exec("sleep", MARK)
    try:
        async with acting(tmp_path, AGENT, "act_alone") as world:
            world.agents._processes[0].end_process(stranger.pid)
            assert (await act(world, 0)).reward == 1.0
    finally:
        stranger.terminate()
    assert await stranger.wait() == -signal.SIGTERM


@in_event_loop
async def test_callers_are_unknown_where_the_kernel_finds_no_connections(tmp_path: Path, monkeypatch) -> None:
    assert not processes.find_unknown()
    # No connection of this test is DCCP's: the kernel answers as one does that cannot find those of TCP.
    monkeypatch.setattr(processes, "_PROTOCOL", 33)
    assert "CONFIG_INET_TCP_DIAG" in processes.find_unknown()[processes.CALLERS]

    async with acting(tmp_path, AGENT, "act_alone") as world:
        assert processes.CALLERS in world.agents.missing
        assert (await act(world, 0)).reward == 1.0


def test_a_client_on_loopback_that_is_not_found_has_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert processes.find_socket(server.getsockname(), ("127.0.0.1", 1)) == 0
        assert processes.find_socket(server.getsockname(), ("192.0.2.1", 1)) is None


@in_event_loop
async def test_children_of_rollouts_may_call_where_the_kernel_lists_no_children(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(processes, "list_children", lambda pid: [])

    async with acting(tmp_path, AGENT, "act_in_processes") as world:
        assert (await act(world, 0)).reward == 1.0


@in_event_loop
async def test_a_call_with_the_key_of_another_rollout_is_refused_and_ends_the_run(tmp_path: Path) -> None:
    text = f'''{BARE_AGENT}
from pathlib import Path

def act(base_url, api_key, model, word, is_thief):
    ask()
    if not is_thief:
        Path(os.path.dirname(os.environ["HOME"]), "key").write_text(api_key)
        time.sleep(600)
    key = Path(os.path.dirname(os.environ["HOME"]), "key")
    while not key.exists(): time.sleep(0.01)
    # In a child, which counts as the rollout's, and which claims to be another host's.
    program = "import agent, sys; sys.exit(agent.ask(sys.argv[1], **{{'x-forwarded-for': '203.0.113.1'}}))"
    raise RuntimeError(subprocess.run([sys.executable, "-c", program, key.read_text()], cwd="{tmp_path}").returncode)
'''

    async with acting(tmp_path, text) as world:
        robbed = asyncio.create_task(act(world, 0, is_thief=False))
        thief = asyncio.create_task(act(world, 1, on_error=OnError(stops=True), is_thief=True))
        with pytest.raises(MegatronRLError, match="another process called with this rollout's key"):
            await robbed
        with pytest.raises(MegatronRLError, match="RuntimeError"):
            await thief
        # Nothing was sampled for the call.
        assert len(world.engines.requests) == 2


@in_event_loop
async def test_the_processes_of_a_rollout_end_with_it_however_it_ends(tmp_path: Path) -> None:
    text = f'''{BARE_AGENT}
import signal
from pathlib import Path

def act(base_url, api_key, model, word, how):
    ask()
    # A child, a session of its own, and one that its parent has left.
    subprocess.Popen(["sleep", "{MARK}"])
    subprocess.Popen(["sleep", "{MARK}"], start_new_session=True)
    subprocess.run(["sh", "-c", "sleep {MARK} &"])
    Path(os.environ["TMPDIR"], "file").write_text("of this rollout")
    if how == "raise": raise RuntimeError
    if how == "exit": os._exit(3)
    if how == "killed": os.kill(os.getpid(), signal.SIGKILL)
    if how == "wait": signal.pause()
    return 1.0
'''

    async with acting(tmp_path, text, on_error=OnError(reward=-1.0)) as world:
        (worker,) = world.agents._processes
        for how in ("return", "raise", "exit", "killed", "wait"):
            acting_one = asyncio.create_task(act(world, 0, how=how))
            if how == "wait":
                await wait_until(lambda: len(find_marked()) == 3)
                acting_one.cancel()
            await asyncio.gather(acting_one, return_exceptions=True)
            await wait_until(lambda: not find_marked())
            await wait_until(lambda: not list_children(worker._pid))
            assert not os.listdir(world.agents._scratch)
        assert worker.is_alive


def find_marked() -> list[str]:
    """Find the processes that an agent of this test has started, those that have ended left out."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if line == f"sleep {MARK}"]
