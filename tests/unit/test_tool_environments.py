"""Environments whose public methods are tools: their schemas, their results, and what the policy is told of a fault."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.confined.pool import PoolSettings
from megatron_rl.confined.process import CallFailed
from megatron_rl.environments.pool import EnvironmentPool, describe_environment
from megatron_rl.environments.worker import Environment, describe
from megatron_rl.errors import UsageError

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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shop.py"
    path.write_text(SHOP)
    return path


def build(file: Path, name: str = "Shop") -> EnvironmentPool:
    config = EnvironmentConfig(source=f"{file}:{name}", timeout=1.0, workers=1)
    return EnvironmentPool(config, PoolSettings(log=file.parent / "log"))


def test_tools_are_described_and_used_and_the_policy_is_told_what_is_wrong_with_a_call(file: Path) -> None:
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

    async def run() -> None:
        pool = build(file)
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

    asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "said"), [("Broken", "because it has no docstring"), ("Untyped", "item is missing a type hint")]
)
def test_a_tool_that_cannot_be_described_is_refused_by_name(file: Path, name: str, said: str) -> None:
    config = EnvironmentConfig(source=f"{file}:{name}")
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
