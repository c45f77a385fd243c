"""One real vLLM server for all tests of a session; it takes some twenty seconds to start."""

import asyncio
from collections.abc import Iterator

import pytest

from megatron_rl.sidecar.vllm.engine import VllmEngine
from tests.sidecar import vllm_models
from tests.sidecar.vllm_models import Models, Run


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
