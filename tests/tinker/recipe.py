"""Run a recipe of the cookbook as it is, with stand-ins for the data of the hub and for the sandbox.

python -m tests.tinker.recipe NAME chats|additions key=value ...
"""

import importlib
import json
import os
import runpy
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import datasets

from tests.tinker import learned_loop, sandbox

Rows = list[dict[str, Any]]


def _list_chats() -> Rows:
    asked = [{"role": "user", "content": f"guess {number}"} for number in range(512)]
    return [{"messages": [one, {"role": "assistant", "content": f"Guess: {n % 8}"}]} for n, one in enumerate(asked)]


def _list_sums() -> Rows:
    return [{"question": f"{a}+{b}", "answer": f"#### {a + b}"} for a in range(8) for b in range(8)]


def _list_preferences() -> Rows:
    asked = [f"\n\nHuman: guess {number}\n\nAssistant: " for number in range(64)]
    return [{"chosen": f"{one}Guess: {n % 8}", "rejected": f"{one}I will not."} for n, one in enumerate(asked)]


def _list_programs() -> Rows:
    """List programs to write that print one digit."""
    tests = [json.dumps([{"input": "", "output": f"{number}\n", "testtype": "stdin_stdout"}]) for number in range(8)]
    return [{"problem": f"Print {number}.", "tests": one} for number, one in enumerate(tests)]


_STAND_INS: Mapping[str, Callable[[], Mapping[str, Rows]]] = {
    "HuggingFaceH4/no_robots": lambda: {"train": _list_chats(), "test": _list_chats()[:128]},
    "openai/gsm8k": lambda: {"train": _list_sums(), "test": _list_sums()[:8]},
    "Anthropic/hh-rlhf": lambda: {"train": _list_preferences(), "test": _list_preferences()[:8]},
    "allenai/tulu-3-sft-mixture": lambda: {"train": _list_chats()},
    "agentica-org/DeepCoder-Preview-Dataset": lambda: {"train": _list_programs(), "test": _list_programs()[:2]},
}
"""Rows with the columns of data sets of the hub, by their names."""


class _Rollouts(types.ModuleType):
    """The cookbook's module of rollouts, which passes an argument that the recipe for verifiers does not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "do_group_rollout":
            super().__setattr__(name, lambda *words, termination=None, **others: value(*words, **others))
        else:
            super().__setattr__(name, value)


def main(name: str, kind: str, words: list[str]) -> None:
    def load(of_hub: str, *_: Any, split: str | None = None, **__: Any) -> Any:
        parts = learned_loop.list_rows() if kind == "additions" else _STAND_INS[of_hub]()
        loaded = {part: datasets.Dataset.from_list(rows) for part, rows in parts.items()}
        return datasets.DatasetDict(loaded) if split is None else loaded[split]

    datasets.load_dataset = load
    with sandbox.running() as url:
        os.environ["SANDBOX_URL"] = url
        sys.argv[1:] = words
        if name == "verifiers_rl.train":
            importlib.import_module("tinker_cookbook.rl.rollouts").__class__ = _Rollouts
        runpy.run_module(f"tinker_cookbook.recipes.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
