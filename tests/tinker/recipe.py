"""Run a recipe of the cookbook as it is, with data made here in place of those of the hub.

python -m tests.tinker.recipe NAME key=value ...
"""

import importlib
import sys
from typing import Any

import datasets


def load_dataset(name: str, *_: Any, **__: Any) -> datasets.DatasetDict:
    """Make rows with the columns of the data set of this name."""
    if name == "HuggingFaceH4/no_robots":
        chats = [
            [{"role": "user", "content": f"say {number}"}, {"role": "assistant", "content": f"{number}" * 3}]
            for number in range(64)
        ]
        rows = [{"messages": messages} for messages in chats]
    elif name == "openai/gsm8k":
        rows = [{"question": f"{a}+{b}", "answer": f"#### {a + b}"} for a in range(8) for b in range(8)]
    else:
        raise ValueError(f"{name} has no stand-in here")
    return datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=datasets.Dataset.from_list(rows[:8]))


if __name__ == "__main__":
    datasets.load_dataset = load_dataset
    import chz

    chz.nested_entrypoint(importlib.import_module(f"tinker_cookbook.recipes.{sys.argv[1]}").main, argv=sys.argv[2:])
