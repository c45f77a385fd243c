"""Coroutines as tests, and one real vLLM server for all tests of a session; it takes some twenty seconds to start."""

import asyncio
import dataclasses
import inspect
import os
import shutil
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.sidecar.launcher import LocalLauncher
from megatron_rl.sidecar.temporary import make_socket_folder
from megatron_rl.sidecar.vllm.engine import VllmEngine
from megatron_rl.sidecar.vllm.factory import VllmFactory
from tests.sidecar import vllm_models
from tests.sidecar.fake_engines import FakeFactory
from tests.sidecar.vllm_models import Models

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.function):
        return None
    names = inspect.signature(pyfuncitem.function).parameters
    asyncio.run(pyfuncitem.function(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def factory() -> FakeFactory:
    return FakeFactory()


def _kernels() -> dict[str, str]:
    """Return the kernels that the tests are run with, which an engine does not inherit from the sidecar."""
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Yield a function that runs a coroutine on the session's one event loop, where the engine's connections live."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return vllm_models.draw("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def sockets() -> Iterator[Path]:
    """Make a private folder whose path is short enough for sockets."""
    folder = make_socket_folder()
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def engine(run: Run, models: Models, sockets: Path) -> Iterator[VllmEngine]:
    config = dataclasses.replace(
        vllm_models.CONFIG,
        model=str(models.first),
        flags=(*vllm_models.CONFIG.flags, "--worker-extension-cls", "tests.sidecar.held_extension.Extension"),
        environment={"PYTHONPATH": str(Path(__file__).parents[2]), **_kernels()},
    )
    engine = VllmFactory(config, sockets, LocalLauncher()).create("engine-0")
    try:
        run(engine.start())
        yield engine
    finally:
        run(engine.close())
