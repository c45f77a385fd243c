"""A plugin for pytest in vLLM's sources: their servers are `megatron-rl serve` for a tiny model and adapter."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# The model's name, and its folder's here, so that tests load its tokenizer by that name.
NAME, ADAPTER = "policy", "adapter"
ROOT = Path(__file__).parents[2]


def start(self: Any, model: str, flags: list[str], environment: dict[str, str] | None) -> None:
    """Start a server in the place of `vllm serve`."""
    command = [sys.executable, "-m", "megatron_rl.cli", "serve", NAME, *flags]
    variables = {**(environment or {}), "VLLM_API_KEY": self.DUMMY_API_KEY, "PYTHONPATH": str(ROOT)}
    self.proc = subprocess.Popen(command, env=os.environ | variables, start_new_session=True)


def pytest_sessionstart(session: Any) -> None:
    from vllm.transformers_utils import repo_utils

    from tests.utils import RemoteOpenAIServer  # type: ignore[attr-defined]

    RemoteOpenAIServer._start_server = start
    # Adapters of the hub.
    repo_utils.hf_api = lambda: SimpleNamespace(snapshot_download=lambda **_: str(Path(ADAPTER).resolve()))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Give the tests the model's name, in what is parametrized too."""
    names = {item.module: item.module.MODEL_NAME for item in items if hasattr(item.module, "MODEL_NAME")}
    for item in items:
        # It is for GPUs.
        item.add_marker("skip_global_cleanup")
        params = item.callspec.params if hasattr(item, "callspec") else {}
        params |= {key: NAME for key, value in params.items() if value == names.get(item.module, NAME)}
    for module in names:
        module.MODEL_NAME = NAME
