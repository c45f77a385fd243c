"""Let SkyRL's own tests of its Tinker server ask a service of this project: a plug-in for their pytest.

The service's address and key are in the environment. Their server is neither imported nor started.
"""

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

_URL, _KEY = os.environ["SERVED_URL"], os.environ["SERVED_KEY"]


def pytest_configure() -> None:
    for name in ("skyrl", "skyrl.tinker", "skyrl.tinker.api", "skyrl.tinker.config"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["skyrl.tinker.api"].__dict__["_build_uv_run_cmd_engine"] = None
    sys.modules["skyrl.tinker.config"].__dict__["EngineConfig"] = dict


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    @contextlib.contextmanager
    def start_api_server(*_: Any, **__: Any) -> Iterator[tuple[None, str]]:
        yield None, os.devnull

    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        module.start_api_server = start_api_server
        module.TEST_SERVER_PORT = module.TEST_SERVER_PORT_FAST_CLEANUP = int(_URL.rpartition(":")[2])
        module.TINKER_API_KEY = _KEY
