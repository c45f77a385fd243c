"""Environments in processes of their own: what they say, their tools, how they fail, and what that leaves to others."""

import asyncio
import contextlib
import dataclasses
import json
import select
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.confined.process import CallFailed, ProcessEnded
from megatron_rl.environments.pool import EnvironmentPool, describe_environment
from megatron_rl.environments.types import Description, OnError
from megatron_rl.environments.worker import Environment, describe
from megatron_rl.errors import UsageError
from megatron_rl.gateway.chats import NumberChats
from megatron_rl.sidecar.conversations import Conversations
from tests.reward_pools import in_event_loop, leftovers, started, wait_until
from tests.unit.test_conversations import PROMPT, REQUEST, Engines

GAME = """
import asyncio, os, time

class Game:
    def reset(self, secret, seed, **row):
        if secret == "broken": raise ValueError("no such game")
        self.secret, self.tries, self.others = secret, 0, sorted(row)
        return f"{seed}:"

    async def step(self, completion):
        self.tries += 1
        if completion == "hang": time.sleep(60)
        if completion == "wait": await asyncio.sleep(60)
        if completion == "raise": raise RuntimeError("no such move")
        if completion == "half": raise RuntimeError("\\ud83d")
        if completion == "flood": return "x" * (1 << 20)
        if completion == "number": return 7
        if completion == "die": os._exit(3)
        if completion == "paid badly": return "more", float("nan")
        if completion == "row": return " ".join(self.others)
        return None if completion == self.secret else completion + "?"

    def get_reward(self):
        return 1.0 / self.tries if self.secret != "nothing" else float("nan")

    def close(self):
        print("closed", self.__dict__.get("secret"), flush=True)

class Paid(Game):
    def step(self, completion):
        return (completion, 0.5) if completion == "1" else completion if completion == "2" else (None, 0.25)

class Opened:
    # Opens what must be closed, slowly: it waits until the file `go` exists beside the class.

    def reset(self, slow, **row):
        self.says = []
        if slow == "reset": self._wait()
        self.says.append("open")

    def step(self, completion):
        self._wait()
        self.says.append("step")

    def _wait(self):
        here = os.path.dirname(__file__)
        print("waiting", flush=True)
        while not os.path.exists(here + "/go"): time.sleep(0.01)

    def close(self):
        print("closed after", *self.says, flush=True)

class Nothing:
    def reset(self, **row): pass

def make_game():
    return Game()
"""


def build(folder: Path, name: str = "Game", code: str = GAME, **changes: Any) -> EnvironmentPool:
    file = folder / "game.py"
    file.write_text(code)
    config = EnvironmentConfig(source=f"{file}:{name}", **{"timeout": 1.0, "workers": 1, **changes})
    return EnvironmentPool(config, PoolSettings(log=folder / "log"))


@in_event_loop
async def test_a_step_may_return_a_reward_with_what_it_says(tmp_path: Path) -> None:
    async with started(build(tmp_path, "Paid")) as pool, pool.hold({"secret": "5"}, 8) as game:
        assert [await game.step(move) for move in "2123"] == ["2", "1", "2", None]
        # The first and the third turn have none.
        assert game.turn_rewards == [0.0, 0.5, 0.0, 0.25]
    async with started(build(tmp_path)) as pool:
        with pytest.raises(CallFailed, match="step returned nan, not a finite number"):
            await play(pool, "paid badly")


@in_event_loop
async def test_calls_are_noted_from_their_begin_to_their_end_also_those_that_fail(tmp_path: Path) -> None:
    noted: list[tuple[str, str]] = []

    def note(call: str):
        noted.append(("begin", call))
        return lambda: noted.append(("end", call))

    async with started(build(tmp_path)) as pool:
        with contextlib.suppress(CallFailed):
            async with pool.hold({"secret": "5"}, 8, note=note) as game:
                await game.step("3")
                await game.step("raise")
    calls = ["place", "open", "step", "step", "close"]
    assert noted == [(when, call) for call in calls for when in ("begin", "end")]


async def play(pool: EnvironmentPool, *moves: str, secret: str = "5", is_alone: bool = False) -> list[Any]:
    async with pool.hold({"secret": secret, "prompt": "a game"}, 8, is_alone) as game:
        return [game.opening, *[await game.step(move) for move in moves], await game.get_reward()]


@in_event_loop
async def test_each_conversation_has_an_environment_of_its_own_which_fails_alone(tmp_path: Path) -> None:
    pool = build(tmp_path)
    assert (await pool.start()).has_reward
    assert await play(pool, "3", "row", "5") == ["8:", "3?", "prompt", None, pytest.approx(1 / 3)]
    moves = ("hang", "wait", "raise", "half", "flood", "number", "4")
    games = [asyncio.create_task(play(pool, move, "5")) for move in moves]
    *failed, good = await asyncio.gather(*games, return_exceptions=True)
    assert good == ["8:", "4?", None, 0.5]
    for error, said in zip(
        failed,
        (
            "did not answer step within 1 seconds",
            "did not answer step within 1 seconds",
            f"RuntimeError: no such move ({tmp_path}/game.py:14)",
            f"RuntimeError: \\ud83d ({tmp_path}/game.py:15)",
            "said 1,048,578 bytes, and 524,288 are allowed",
            "returned int, and must return text or None",
        ),
        strict=True,
    ):
        assert isinstance(error, CallFailed)
        assert not isinstance(error, ProcessEnded)
        assert said in str(error)
        assert str(error).isascii()
    with pytest.raises(CallFailed, match="get_reward returned nan"):
        await play(pool, secret="nothing")
    with pytest.raises(CallFailed, match="ValueError: no such game"):
        await play(pool, secret="broken")
    with pytest.raises(CallFailed, match="a column of the row cannot be passed on as JSON: .*bytes"):
        async with pool.hold({"secret": b"5"}, 8):
            pass
    # A process with a call that never ends holds no conversation any more, and another one has its place.
    assert await play(pool, "5") == ["8:", None, 1.0]
    await pool.close()
    assert not leftovers()
    # Each but the two that hang is closed, the one too whose reset fails.
    log = (tmp_path / "log").read_text()
    closed = [line for line in log.splitlines() if line.startswith("closed")]
    assert sorted(closed) == [*["closed 5"] * 7, "closed None", "closed nothing"]
    assert "KeyError" not in log


@in_event_loop
async def test_a_process_that_ends_says_which_conversations_may_be_the_cause(tmp_path: Path) -> None:
    async with started(build(tmp_path)) as pool:
        async with pool.hold({"secret": "5"}, 8) as other:
            with pytest.raises(ProcessEnded, match="its process ended with exit code 3") as caught:
                await play(pool, "die")
            assert caught.value.had_call
            with pytest.raises(ProcessEnded) as caught:
                await other.step("4")
            assert not caught.value.had_call
        with pytest.raises(ProcessEnded):
            await asyncio.gather(play(pool, "die", is_alone=True), play(pool, "5"))
        assert await play(pool, "5", is_alone=True) == ["8:", None, 1.0]


@pytest.mark.parametrize(("slow", "said"), [("reset", "open"), ("step", "open step")])
@in_event_loop
async def test_an_environment_that_is_called_off_is_closed_once_its_running_call_has_ended(
    tmp_path: Path, slow: str, said: str
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"

    async def hold(pool: EnvironmentPool) -> None:
        async with pool.hold({"slow": slow}, 8) as opened:
            await opened.step("1")

    async with started(build(tmp_path, "Opened", timeout=60.0)) as pool:
        holding = asyncio.create_task(hold(pool))
        await wait_until(lambda: "waiting" in log.read_text())
        holding.cancel()
        # Another conversation comes and goes meanwhile, so the worker has read the call of `close`.
        await asyncio.sleep(0)
        async with pool.hold({"slow": ""}, 8):
            pass
        go.touch()
        with pytest.raises(asyncio.CancelledError):
            await holding
        assert not any(worker.is_worn for worker in pool._processes)
    assert log.read_text().splitlines() == ["waiting", "closed after open", f"closed after {said}"]


@in_event_loop
async def test_a_function_may_make_environments_and_their_number_is_bounded(tmp_path: Path) -> None:
    async with started(build(tmp_path, "make_game", concurrency=2, workers=2, timeout=0.5)) as pool:
        begun = asyncio.get_running_loop().time()
        games = await asyncio.gather(*[play(pool, "wait") for _ in range(4)], return_exceptions=True)
        assert all(isinstance(game, CallFailed) for game in games)
        assert asyncio.get_running_loop().time() - begun > 1.0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Nothing", "Nothing has no method step, which answers text, and no other that is a tool"),
        ("os", "has no class or function os"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        asyncio.run(build(tmp_path, name).start())
    assert not leftovers()


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.py cannot be read"):
        EnvironmentPool(EnvironmentConfig(source=f"{tmp_path}/none.py:Game"))
    with pytest.raises(UsageError, match=r"write --rollout-env FILE\.py:CLASS"):
        EnvironmentPool(EnvironmentConfig(source="game"))


LOCKING = """
import os, re, time

BEGUN = os.path.join(os.environ["TMPDIR"], "begun")

class Graded:
    def reset(self, **row):
        pass

    def step(self, completion):
        if completion.endswith(" 2"):
            open(BEGUN, "w").close()
            # Python's lock is held until the match has failed, which takes years.
            re.match("(a+)+$", 60 * "a" + "!")
        while not os.path.exists(BEGUN): time.sleep(0.01)
        return None

    def get_reward(self):
        return 1.0
"""


@in_event_loop
async def test_an_answer_that_came_while_the_event_loop_stood_still_counts(tmp_path: Path) -> None:
    limit = 2.0
    async with started(build(tmp_path, timeout=limit)) as pool, pool.hold({"secret": "5"}, 1) as conversation:
        begin = time.monotonic()
        step = asyncio.ensure_future(conversation.step("said"))
        await asyncio.sleep(0)
        answers = conversation._process._process.stdout._transport.get_extra_info("pipe")
        # The loop reads nothing while it stands here.
        select.select([answers], [], [])
        time.sleep(max(0.0, begin + limit - time.monotonic()) + 0.1)
        assert await step == "said?"


@in_event_loop
async def test_a_call_that_never_lets_go_of_pythons_lock_fails_its_own_conversation_alone(tmp_path: Path) -> None:
    async with started(build(tmp_path, "Graded", LOCKING, timeout=5.0)) as pool:
        conversations = Conversations(Engines(), pool, NumberChats(), OnError(reward=0.0), Description("Graded", True))  # type: ignore[arg-type]
        made = await conversations.hold_group(dataclasses.replace(REQUEST, group_size=5), PROMPT)
    outcomes = [(transcript.response.finish_reason, transcript.response.reward) for transcript in made]
    assert outcomes == [("failed", 0.0) if number == 2 else ("stop", 1.0) for number in range(5)]


SHOP = '''
import asyncio, time

class Shop:
    def __init__(self): self._sold = []

    @property
    def total(self): raise RuntimeError("nobody looks at the total")

    def reset(self, **row): return "Welcome."

    def sell(self, item: str, count: int = 1) -> str:
        """Sell an item.

        Args:
            item: What to sell.
            count: How many.

        Returns:
            A receipt.
        """
        if item == "ghost": raise KeyError("no such item")
        if item == "slow": time.sleep(60)
        if item == "half": return "\\ud83d"
        if item == "half an error": raise ValueError("\\ud83d")
        if item == "long error": raise ValueError("x" * (2 << 20))
        if item == "flood": return "x" * (1 << 20)
        self._sold.append((item, count))
        return f"sold {count} {item}"

    async def list_sold(self) -> list:
        """List what was sold."""
        await asyncio.sleep(0)
        return self._sold

    def _hide(self): pass
    def get_reward(self): return float(len(self._sold))

class Broken(Shop):
    def lend(self, item): pass

class Untyped(Shop):
    def lend(self, item):
        """Lend it.

        Args:
            item: What to lend.
        """
'''


@in_event_loop
async def test_tools_are_described_and_used_and_the_policy_is_told_what_is_wrong_with_a_call(tmp_path: Path) -> None:
    calls = [
        ("sell", {"item": "tea"}, "sold 1 tea"),
        ("sell", {"item": "tea", "count": 2}, "sold 2 tea"),
        ("list_sold", {}, "[('tea', 1), ('tea', 2)]"),
        # As TRL writes errors.
        ("sell", {"item": "ghost"}, str({"error": str(KeyError("no such item"))})),
        ("buy", {}, str({"error": "Tool buy not found."})),
        ("reset", {}, str({"error": "Tool reset not found."})),
        ("_hide", {}, str({"error": "Tool _hide not found."})),
        ("sell", {"things": 3}, str({"error": "Shop.sell() got an unexpected keyword argument 'things'"})),
        ("sell", [1], str({"error": "The arguments must be a JSON object, not list."})),
    ]

    pool = build(tmp_path, "Shop", SHOP)
    offered = await pool.start()
    assert (offered.has_step, offered.has_reward) == (False, True)
    listed, sell = [tool["function"] for tool in offered.tools]
    assert (listed["name"], sell["name"], sell["description"]) == ("list_sold", "sell", "Sell an item.")
    assert sell["parameters"]["required"] == ["item"]
    assert sell["parameters"]["properties"]["count"] == {"type": "integer", "description": "How many."}
    async with pool.hold({"prompt": "?"}, 8) as shop:
        assert shop.opening == "Welcome."
        for name, arguments, said in calls:
            assert await shop.use(name, json.dumps(arguments)) == said, name
        assert "Expecting value" in await shop.use("sell", "no JSON")
        # What no tokenizer reads, or is too long, is an error of the call.
        for item, said in (
            ("flood", "{'error': 'said 1,048,578 bytes, and 524,288 are allowed'}"),
            ("half", "{'error': \"'utf-8' codec can't encode character"),
            ("half an error", "{'error': '\\\\ud83d'}"),
            ("long error", "{'error': 'xxx"),
        ):
            answer = await shop.use("sell", json.dumps({"item": item}))
            assert answer.startswith(said)
            assert len(answer.encode()) < 3000
        assert await shop.use("sell", json.dumps({"item": "tea"})) == "sold 1 tea"
        assert await shop.get_reward() == 3.0
    with pytest.raises(CallFailed, match="did not answer tool within 1 seconds"):
        async with pool.hold({"prompt": "?"}, 8) as shop:
            await shop.use("sell", json.dumps({"item": "slow"}))
    await pool.close()


@pytest.mark.parametrize(
    ("name", "said"), [("Broken", "because it has no docstring"), ("Untyped", "item is missing a type hint")]
)
def test_a_tool_that_cannot_be_described_is_refused_by_name(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "game.py").write_text(SHOP)
    config = EnvironmentConfig(source=f"{tmp_path}/game.py:{name}")
    with pytest.raises(UsageError, match=rf"{name}.lend is a tool.*{said}.*begin its name with an underscore"):
        describe_environment(config, PoolSettings())


def test_only_the_first_process_makes_schemas() -> None:
    class Game:
        def reset(self) -> None: ...
        def guess(self) -> None: ...

    assert describe(Game, has_schemas=False) == {"name": "Game", "has_reward": False, "has_step": False, "tools": []}
    with pytest.raises(TypeError, match=r"Game\.guess is a tool"):
        describe(Game, has_schemas=True)


def test_a_class_may_answer_text_beside_its_tools() -> None:
    class Chat:
        heard: list[Any] = []

        def reset(self) -> str:
            return "Hello."

        def step(self, completion: str) -> str | None:
            return completion.upper()

        def count(self) -> int:
            return 3

    chat = Environment(Chat)
    assert chat.call({"call": "open", "row": {}, "seed": 1}) == "Hello."
    assert chat.call({"call": "step", "completion": "you"}) == "YOU"
    assert chat.call({"call": "tool", "name": "count", "arguments": "{}"}) == "3"
