"""Run a recipe of the cookbook as it is, with data made here in place of those of the hub.

python -m tests.tinker.recipe NAME chats|additions key=value ...
"""

import importlib
import sys
from typing import Any

import chz
import datasets

from tests.tinker import learned_loop


def make_dataset(kind: str, name: str) -> datasets.DatasetDict:
    """Make rows with the columns of the data set of this name."""
    if name == "HuggingFaceH4/no_robots":
        chats = [
            [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": f"{number}" * 3}]
            for number in range(64)
        ]
        rows = {"train": [{"messages": messages} for messages in chats]}
    elif name == "openai/gsm8k" and kind == "chats":
        sums = [{"question": f"{a}+{b}", "answer": f"#### {a + b}"} for a in range(8) for b in range(8)]
        rows = {"train": sums, "test": sums[:8]}
    elif name == "openai/gsm8k":
        rows = learned_loop.list_rows()
    else:
        raise ValueError(f"{name} has no stand-in here")
    return datasets.DatasetDict({part: datasets.Dataset.from_list(of_part) for part, of_part in rows.items()})


def main(name: str, kind: str, words: list[str]) -> None:
    def load(of_hub: str, *_: Any, **__: Any) -> datasets.DatasetDict:
        return make_dataset(kind, of_hub)

    datasets.load_dataset = load
    chz.nested_entrypoint(importlib.import_module(f"tinker_cookbook.recipes.{name}").main, argv=words)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
