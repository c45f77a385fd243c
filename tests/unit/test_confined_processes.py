"""The contract of confined processes, which the workers of rewards, environments and agents pass alike."""

import asyncio
import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.confined.confinement import NETWORK, landlock_version
from megatron_rl.confined.pool import ConfinedPool, PoolSettings, Program
from megatron_rl.confined.process import CallFailed, ConfinedProcess
from megatron_rl.environments.pool import EnvironmentProcess
from megatron_rl.errors import PlatformError, UsageError
from megatron_rl.gateway.agents import AgentProcess
from megatron_rl.rewards.types import RewardSpec
from tests.reward_pools import in_event_loop, leftovers, started, wait_until

# Seconds that no other program on this host sleeps.
MARK = f"601.{os.getpid()}"
NUMBERS = itertools.count(1)
CODE = """
import os, re, socket, subprocess, time

def do(how):
    what, _, with_what = how.partition(" ")
    if what == "print":
        print("printed")
        subprocess.run(["echo", "echoed"])
    if what == "raise":
        try: {}["lost"]
        except KeyError as error: raise RuntimeError("no such move") from error
    if what == "die": os._exit(3)
    # Python's lock is held until the match has failed, which takes years.
    if what == "lock": re.match("(a+)+$", 60 * "a" + "!")
    if "leave" in how:
        with_what = how.split()[-1]
        subprocess.Popen(["sleep", with_what], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0: os.execvp("sleep", ["sleep", with_what])
            os._exit(0)
    if "hang" in how: time.sleep(600)
    if what == "connect": socket.create_connection(("127.0.0.1", int(with_what))).close()

def score(completions, how, **kwargs):
    do(how[0])
    return [1.0] * len(completions)

class Game:
    def reset(self, how):
        self.how = how

    def step(self, completion):
        do(self.how)
        return "over"

def act(base_url, api_key, model, how):
    do(how)
    return 1.0
"""


async def score(process: Any, how: str, timeout: float) -> Any:
    content = {"prompt": "p", "completions": ["a"], "completion_ids": [[1]], "columns": {"how": how}}
    group = json.dumps(content).encode()
    said = await process.call("score", timeout, {"group": group}, function=0, prompt_index=0)
    if "error" in said:
        raise CallFailed(said["error"])
    return said["values"]


async def step(process: Any, how: str, timeout: float) -> Any:
    number = next(NUMBERS)
    await process.call("open", 300, conversation=number, row={"how": how}, seed=1)
    return await process.call("step", timeout, conversation=number, completion="")


async def act(process: Any, how: str, timeout: float) -> Any:
    number = next(NUMBERS)
    pid = await process.call("open", 300, conversation=number, row={"how": how}, seed=1)
    process.note_process(pid)
    try:
        return await process.call("act", timeout, conversation=number, base_url="", api_key="", model="")
    finally:
        if process.is_alive:
            process.end_process(pid)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of confined processes."""

    module: str
    name: str
    """The class or function in the code."""
    process: type[ConfinedProcess]
    call: Callable[[Any, str, float], Awaitable[Any]]
    answer: Any

    def write_setup(self, file: Path) -> Mapping[str, Any]:
        if self.name == "score":
            specs = [dataclasses.asdict(RewardSpec("score", str(file), "score"))]
            return {"specs": specs, "sources": {str(file): file.read_text()}}
        return {"file": str(file), "name": self.name, "source": file.read_text()}


KINDS = {
    "rewards": Kind("rewards", "score", ConfinedProcess, score, [1.0]),
    "environments": Kind("environments", "Game", EnvironmentProcess, step, "over"),
    "agents": Kind("gateway", "act", AgentProcess, act, {"agent": 1.0}),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def build(kind: Kind, folder: Path, code: str = CODE, ports: tuple[int, ...] = (), **settings: Any) -> ConfinedPool:
    file = folder / "code.py"
    file.write_text(code)
    program = Program(
        f"megatron_rl.{kind.module}.worker", kind.write_setup(file), (folder,), "things", kind.name, "--flag",
        "--flag-workers", ports,
    )  # fmt: skip
    pool = ConfinedPool(program, PoolSettings(log=folder / "log", **settings), 1)
    pool.PROCESS = kind.process  # type: ignore[misc]
    return pool


async def call(kind: Kind, pool: ConfinedPool, how: str, timeout: float = 300) -> Any:
    async with pool.lend() as process:
        return await kind.call(process, how, timeout)


@in_event_loop
async def test_a_call_is_answered_and_all_that_is_printed_goes_to_the_log(kind: Kind, tmp_path: Path) -> None:
    async with started(build(kind, tmp_path)) as pool:
        assert await call(kind, pool, "say") == kind.answer
        assert await call(kind, pool, "print") == kind.answer
    assert sorted((tmp_path / "log").read_text().split()) == ["echoed", "printed"]


@in_event_loop
async def test_an_error_is_described_with_line_and_cause_and_its_traceback_is_in_the_log(
    kind: Kind, tmp_path: Path
) -> None:
    async with started(build(kind, tmp_path)) as pool:
        with pytest.raises(CallFailed) as failed:
            await call(kind, pool, "raise")
        file = tmp_path / "code.py"
        assert str(failed.value) == f"RuntimeError: no such move; caused by KeyError: 'lost' ({file}:11)"
        assert await call(kind, pool, "say") == kind.answer
    log = (tmp_path / "log").read_text()
    assert 'code.py", line 11, in do' in log
    assert "direct cause" in log
    assert "RuntimeError: no such move\n" in log


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("die", "its process ended with exit code 3"),
        ("hang", r"did not answer \w+ within 0.5 seconds"),
        ("lock", r"did not answer \w+ within 0.5 seconds"),
    ],
)
@in_event_loop
async def test_a_call_that_ends_its_process_or_never_ends_fails_by_name_and_the_next_is_answered(
    kind: Kind, tmp_path: Path, how: str, reason: str
) -> None:
    async with started(build(kind, tmp_path)) as pool:
        # What is read is the text of the start, also in processes that start later.
        (tmp_path / "code.py").write_text("")
        (process,) = pool._processes
        with pytest.raises(CallFailed, match=reason):
            await call(kind, pool, how, 300 if how == "die" else 0.5)
        assert await call(kind, pool, "say") == kind.answer
        # Also if other threads of it could still answer. An agent that dies has a process of its own.
        assert (process in pool._processes) == (kind.process is AgentProcess and how == "die")


@in_event_loop
async def test_an_answer_that_is_none_ends_the_process_and_calls_after_the_end_fail(kind: Kind, tmp_path: Path) -> None:
    async with started(build(kind, tmp_path)) as pool, pool.lend() as process:
        calling = asyncio.create_task(kind.call(process, "hang", 300))
        await wait_until(lambda: process._waiting)
        process._process.stdout.feed_data(b"{}\n")
        with pytest.raises(CallFailed, match="something in its process wrote into the channel of the answers"):
            await calling
        with pytest.raises(CallFailed, match="wrote into the channel"):
            await process.call("say", 1.0)


@pytest.mark.parametrize("namespace", [True, False])
@in_event_loop
async def test_all_that_was_started_ends_with_the_pool_and_calls_that_wait_fail(
    kind: Kind, tmp_path: Path, namespace: bool
) -> None:
    async with started(build(kind, tmp_path, namespace=namespace)) as pool:
        calling = asyncio.create_task(call(kind, pool, f"leave {MARK}"))
        await wait_until(lambda: len(leftovers(f"sleep {MARK}", 0)) == 2 or calling.done())
        assert await calling == kind.answer
        waiting = asyncio.create_task(call(kind, pool, "hang"))
        await wait_until(lambda: pool._processes[0]._waiting)
    assert leftovers(f"sleep {MARK}") == []
    with pytest.raises(CallFailed, match="its process was ended"):
        await waiting


@pytest.mark.parametrize("namespace", [True, False])
def test_nothing_outlives_a_parent_that_is_killed(kind: Kind, tmp_path: Path, namespace: bool, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()

    async def run() -> None:
        pool = build(kind, tmp_path, namespace=namespace)
        await pool.start()
        async with pool.lend() as process:
            calling = asyncio.create_task(kind.call(process, f"leave and hang {MARK}", 300))
            await wait_until(lambda: leftovers(f"sleep {MARK}", 0))
            os.kill(os.getpid(), signal.SIGKILL)
            await calling

    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(run()))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert leftovers(f"sleep {MARK}") == []
    assert leftovers(f".worker {child.pid} ") == []
    assert not list((tmp_path / "scratch").iterdir())


@in_event_loop
async def test_with_ports_no_other_can_be_reached(kind: Kind, tmp_path: Path) -> None:
    if landlock_version() < 4:
        pytest.skip("this kernel lacks Landlock for TCP ports, which Linux has from 6.7 on")

    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("127.0.0.1", 0)) as other:
        async with started(build(kind, tmp_path, ports=(allowed.getsockname()[1],))) as pool:
            assert await call(kind, pool, f"connect {allowed.getsockname()[1]}") == kind.answer
            with pytest.raises(CallFailed, match="PermissionError"):
                await call(kind, pool, f"connect {other.getsockname()[1]}")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = 1\ny = nothing", r"code.py:2 does not import: NameError: name 'nothing'"),
        ("def f(:", "code.py:1 does not import: SyntaxError"),
        ("", "has no .*function"),
        ("import os; os._exit(4)", "a process that loads .* its process ended with exit code 4"),
        ("import time; time.sleep(60)", "did not finish importing within 0.5 seconds"),
    ],
)
def test_code_that_does_not_load_is_named(kind: Kind, tmp_path: Path, code: str, reason: str) -> None:
    pool = build(kind, tmp_path, code, start_timeout=0.5 if "sleep" in code else 300)
    with pytest.raises(UsageError, match=rf"--flag: .*{reason}"):
        asyncio.run(pool.start())
    assert leftovers() == []


def test_confinement_that_is_missing_is_said_and_refused_where_it_is_required(kind: Kind, tmp_path: Path) -> None:
    async def list_missing(**settings: Any) -> list[str]:
        async with started(build(kind, tmp_path, **settings)) as pool:
            assert len(pool.warnings) == len(pool.missing)
            return [*pool.missing]

    if landlock_version() < 6:
        pytest.skip("this kernel's Landlock does not scope signals")
    assert asyncio.run(list_missing()) == []
    assert asyncio.run(list_missing(namespace=False)) == ["processes"]
    assert asyncio.run(list_missing(confine="off")) == ["everything"]
    with pytest.raises(PlatformError, match=r"things cannot be confined in processes \(no namespace .*; write auto"):
        asyncio.run(list_missing(confine="require", namespace=False))
    # A kernel that confines files and not the network.
    with pytest.raises(PlatformError, match=r"things cannot be confined in network \(no ports.*; write auto"):
        build(kind, tmp_path, confine="require")._check_confinement({NETWORK: "no ports"})
