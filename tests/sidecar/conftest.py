"""Coroutines as tests, and one real vLLM server for all tests of a session; it takes some twenty seconds to start."""

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from megatron_rl.sidecar.vllm.engine import VllmEngine
from tests.sidecar import vllm_models
from tests.sidecar.fake_engines import FakeFactory
from tests.sidecar.vllm_models import Models, Run


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


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """Yield a function that runs a coroutine on the session's one event loop, where the engine's connections live."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return vllm_models.draw("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def engine(run: Run, models: Models) -> Iterator[VllmEngine]:
    config = vllm_models.configure(models.first, "tests.sidecar.worker_extensions.StaleTensors")
    with vllm_models.started(run, config) as engine:
        yield engine
